"""What the trainer of the framework refuses, and what it says."""

from typing import Any

import pytest

from fastrl.alignment import BatchFactory, loss_of_pairs, make_loss
from fastrl.data.columns import PAIRS
from fastrl.data.datas_loader import DatasLoader
from fastrl.rollout import SamplingParams
from tests import tiny_models
from tests.alignment.conftest import Examples, LikesHigh, Make, examples, make_factory
from tests.golden import tiny
from tests.together import together


@together(("loss", "given", "says"), [
    ("sft", {"task": "offline-pairwise"}, "sft does not fit the task offline-pairwise"),
    ("dpo", {"task": "sft"}, "it is for offline-pairwise, online-pairwise; for sft choose sft"),
    ("kto", {"batch_size": 1}, "batch_size must be at least 2, got 1"),
    ("simpo", {"reference": "copy"}, "with the loss simpo there is none: leave reference out"),
    ("dpo", {"ledger": True}, "ledger=True is of responses that the policy samples"),
    ("dpo", {"log_completions": True}, "from the data: leave log_completions out"),
    ("sft", {"sync_ref_model": True}, "with the loss sft there is none: leave sync_ref_model"),
    ("bradley-terry", {"sync_ref_model": True}, "with the loss bradley-terry there is none"),
    ("dpo", {"sync_ref_model": True, "reference": "cached"},
     "that sync_ref_model changes: choose reference='copy'"),
    ("dpo", {"sync_ref_model": True, "peft_config": tiny_models.lora()},
     "sync_ref_model: reference='adapter' .* choose reference_adapter='start'"),
    ("dpo", {"sync_ref_model": True, "reference_dtype": "bfloat16"},
     "ref_model_mixup_alpha=0.6 with a reference in bfloat16"),
    ("dpo", {"task": "online-pairwise", "reference": "cached"},
     "unlike those of online-pairwise: choose 'copy', 'adapter'"),
    ("dpo", {"reference": "adapter"}, "needs a PEFT model"),
    ("dpo", {"reference": "trunk"}, "needs num_shared_layers"),
    ("dpo", {"reference": "whatever"}, "unknown reference 'whatever'"),
    ("dpo", {"rollout_slots": 0}, "rollout_slots must be at least 1"),
    ("dqo", {}, "unknown loss 'dqo': choose one of dpo"),
    ("aot", {}, r"aot compares .* have weights here: use fastrl.DPOConfig\(loss_type='aot'\)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    make_trainer: Make, loss: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_trainer(loss, **given)


def test_coefficients_that_a_loss_does_not_have_are_named() -> None:
    with pytest.raises(ValueError, match="simpo has no coefficient 'betta'"):
        make_loss("simpo", betta=1)


def test_what_is_no_loss_of_pairs_is_refused() -> None:
    with pytest.raises(TypeError, match="give beta a default"):
        loss_of_pairs()(lambda chosen, rejected, beta: chosen.sums)
    with pytest.raises(ValueError, match="a loss ipo already: give yours another name"):
        loss_of_pairs(name="ipo")(lambda chosen, rejected: chosen.sums)
    with pytest.raises(TypeError, match=r"write @loss_of_pairs\(\)"):
        loss_of_pairs(lambda chosen, rejected: chosen.sums)


def test_an_evaluation_of_another_task_is_refused(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match="eval_factory is for sft, factory for offline-pairwise"):
        make_trainer("dpo", eval_factory=make_factory("sft"))


def test_a_tokenizer_without_a_pad_token_is_refused(make_trainer: Make) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    factory = BatchFactory("offline-pairwise", Examples(examples(PAIRS), tokenizer))
    with pytest.raises(ValueError, match="has no pad token: set"):
        make_trainer("dpo", factory=factory)


def test_evaluation_needs_a_factory(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match="evaluation needs the eval_factory"):
        make_trainer("dpo").evaluate()


def test_a_classifier_with_two_labels_is_no_reward_model(make_trainer: Make) -> None:
    from tests.trainers.conftest import reward_model

    with pytest.raises(ValueError, match="has 2 labels, a reward model has one"):
        make_trainer("bradley-terry", reward_model("gpt2", num_labels=2))


@pytest.mark.parametrize(("setting", "remedy"), [
    ({"num_train_epochs": 2.0}, r"BatchFactory\(epochs=\) does, and is 1"),
    ({"per_device_train_batch_size": 2}, r"BatchFactory\(batch_size=\) does, and is 4"),
    ({"per_device_eval_batch_size": 2}, "the eval_factory's batch_size does, and is 4"),
    ({"label_smoothing_factor": 0.1}, "losses with labels have a label_smoothing"),
    ({"dataloader_drop_last": True}, r"BatchFactory\(examples=\)"),
    ({"train_sampling_strategy": "sequential"}, r"BatchFactory\(seed=, shuffle=\)"),
    ({"dataset_num_proc": 2}, "examples are encoded as they are read"),
])  # fmt: skip
def test_settings_that_a_factory_has_are_refused(
    make_trainer: Make, setting: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(setting))}=.*{remedy}"):
        make_trainer("dpo", **setting)


def test_settings_of_a_loader_change_nothing_and_are_named(make_trainer: Make) -> None:
    with pytest.warns(UserWarning, match="change nothing in AlignmentConfig: dataloader_num_wor"):
        make_trainer("dpo", dataloader_num_workers=1)


LONG = [{"prompt": "w5 " * 60, "chosen": " w6 w7", "rejected": " w8"}]
SHORT = [{"prompt": "w5", "chosen": " w6 w7", "rejected": " w8"}]


@pytest.mark.parametrize("limit", [None, 20])
def test_examples_are_as_long_as_the_model_takes(make_trainer: Make, limit: int | None) -> None:
    """Cut as the trainer is made, as the command has it: they ended a run as their turn came."""
    most = limit or tiny_models.CONTEXT
    factory = BatchFactory("offline-pairwise", DatasLoader(SHORT + LONG, tiny.tokenizer()))
    with pytest.warns(UserWarning, match=f"1 of 2 examples are longer than max_length={most}"):
        trainer = make_trainer("dpo", factory=factory, max_length=limit)
    lengths = [len(e.prompt_ids) + len(r.ids) for e in factory.data for r in e.responses]
    assert max(lengths) == most
    trainer.train()


def test_pairs_of_a_reward_model_that_are_too_long_are_left_out(make_trainer: Make) -> None:
    factory = BatchFactory("reward-modelling", DatasLoader(SHORT + LONG, tiny.tokenizer()))
    with pytest.warns(UserWarning, match="1 of 2 examples are longer than max_length=30.* dropped"):
        make_trainer("bradley-terry", factory=factory, max_length=30)
    assert len(factory) == 1


def test_prompts_leave_room_for_what_is_sampled(make_trainer: Make) -> None:
    def online(new: int) -> BatchFactory:
        loader = DatasLoader([{"prompt": "w5 " * 60}], tiny.tokenizer())
        params = SamplingParams(max_new_tokens=new)
        return BatchFactory("online-pairwise", loader, annotator=LikesHigh(), params=params)

    with pytest.warns(UserWarning, match="1 of 1 examples are longer than"):
        trainer = make_trainer("dpo", factory=online(8), task="online-pairwise")
    assert len(trainer.factory.data[0].prompt_ids) == tiny_models.CONTEXT - 8
    with pytest.raises(ValueError, match="max_new_tokens=48 leaves nothing of max_length=48"):
        make_trainer("dpo", factory=online(48), task="online-pairwise")
