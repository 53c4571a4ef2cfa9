"""What the trainer runs: one forward for a batch, and a reference however it is kept."""

from typing import Any

import pytest
import torch

from fastrl.alignment import DPO
from fastrl.data.columns import FEEDBACK, PAIRS
from fastrl.models import CausalLMPolicy
from tests import tiny_models
from tests.alignment.conftest import Make, examples, losses_of, make_factory, trained
from tests.trainers.conftest import weights


def test_both_responses_share_a_forward_and_prompts_are_not_scored(make_trainer: Make) -> None:
    model = tiny_models.language_model()
    trainer = make_trainer("simpo", model, epochs=3)
    tokens_run: list[int] = []
    rows: list[int] = []
    model.transformer.h[0].register_forward_pre_hook(
        lambda _m, args: tokens_run.append(args[0].shape[:2].numel())
    )
    score = CausalLMPolicy.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["scoring"].rows))
        return score(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalLMPolicy, "forward", noted)
        trainer.train()
    tokens = sum(len(r.ids) for row in examples(PAIRS) for r in row.responses)
    prompts = sum(len(row.prompt_ids) for row in examples(PAIRS))
    assert rows[-3:] == [tokens] * 3
    assert tokens_run[-3:] == [prompts + tokens] * 3


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_cached_reference_is_a_copys(make_trainer: Make, family: str) -> None:
    runs = {
        mode: trained(make_trainer, tiny_models.language_model(family), reference=mode)
        for mode in ("copy", "cached", "offload", "auto")
    }
    chosen = {mode: type(trainer.learner.reference) for mode, (_, trainer) in runs.items()}
    assert chosen["auto"] is chosen["cached"] is not chosen["copy"]
    losses = {mode: found for mode, (found, _) in runs.items()}
    assert losses["copy"][0] - losses["copy"][-1] > 0.1
    for found in losses.values():
        assert found == pytest.approx(losses["copy"], rel=1e-5)


def test_a_cached_reference_keeps_no_second_model_and_sees_every_pair_once(
    make_trainer: Make,
) -> None:
    model = tiny_models.language_model()
    calls: list[bool] = []
    model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    rows = examples(PAIRS, 8)
    _, trainer = trained(make_trainer, model, rows=rows, epochs=4)
    assert trainer.learner.reference.model is None
    # Two batches are looked at before training; afterwards there are the policy's alone, and the
    # few that choose how the head is run.
    assert calls.count(True) == 8
    assert calls[-8:] == [True] * 8


def test_ktos_other_pairs_are_cached_too(make_trainer: Make) -> None:
    rows = examples(FEEDBACK, 8)
    settings = {"rows": rows, "epochs": 3, "shuffle": True, "logging_steps": 1}
    found = []
    for mode in ("copy", "cached"):
        trainer = make_trainer("kto", reference=mode, learning_rate=1e-2, **settings)
        trainer.train()
        found.append(losses_of(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_an_adapters_base_is_its_reference(make_trainer: Make) -> None:
    """As a copy of the base is, and whether it is cached or not."""

    def by(mode: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)  # the adapter is drawn by the trainer
        return trained(make_trainer, peft_config=tiny_models.lora(), reference=mode)

    (expected, _), (cached, trainer) = by("adapter"), by("cached")
    assert expected[0] != pytest.approx(0.6931, abs=1e-3)  # the adapter changes outputs already
    assert cached == pytest.approx(expected, rel=1e-5)
    assert trainer.learner.reference.mode == "adapter"


def test_shared_layers_are_stored_once_and_stay(make_trainer: Make) -> None:
    model = tiny_models.language_model("llama")
    before = weights(model)
    losses, trainer = trained(make_trainer, model, num_shared_layers=1)
    assert trainer.learner.reference.mode == "trunk"
    copied, _ = trained(make_trainer, tiny_models.language_model("llama"), reference="copy")
    assert losses[0] == pytest.approx(copied[0], rel=1e-5)
    after = weights(model)
    frozen = [n for n in before if n.startswith(("model.embed_tokens", "model.layers.0."))]
    assert frozen
    for name, x in before.items():
        assert torch.equal(x, after[name]) == (name in frozen), name


def test_a_response_that_was_not_there_before_training_has_no_cached_reference(
    make_trainer: Make,
) -> None:
    trainer = make_trainer("dpo", rows=examples(PAIRS, 4))
    trainer.train()
    policy, reference = trainer.learner.views(trainer.model)
    batch = next(iter(make_factory("offline-pairwise", examples(PAIRS, 4, seed=5))))
    with pytest.raises(ValueError, match="was not computed before training"):
        DPO()(batch, policy, reference)
