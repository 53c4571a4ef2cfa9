"""Subclasses that override methods of TRL's trainers: to TRL 1.16's weights, or refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

import fastrl
from fastrl.overrides import CALLED, NOT_CALLED
from fastrl.trainers.groups.methods import OverridableTrainer
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import reward_model, weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
    "max_completion_length": 5, "max_steps": 3, "optim": "sgd", "learning_rate": 0.3,
    "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "shuffle_dataset": False, "bf16": False,
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True,
}  # fmt: skip


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def responses(prompt_ids: list[list[int]]) -> list[list[int]]:
    """They hang on the prompts and their order alone."""
    return [
        [(7 * ids[0] + i * (j + 3)) % 90 + 3 for j in range(2 + i % 4)]
        for i, ids in enumerate(prompt_ids)
    ]


def said(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = tiny.tokenizer()(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": responses(ids), "logprobs": None}


class Saying:
    """Of TRL's RLOOTrainer, which has no rollout_func."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
        return responses(prompt_ids)


def of_own(trainer: Any, inputs: dict[str, Any], model: Any) -> Tensor:
    """REINFORCE with a bonus for long responses, written as for TRL."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].size(1)
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, width, compute_entropy=True
    )
    learned = inputs["completion_mask"]
    loss = -(logps * inputs["advantages"].unsqueeze(1) * learned).sum() / 20
    loss = loss - 0.1 * (entropies * learned).sum() / 20
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["own"].append(loss.item())
    return loss / trainer.current_gradient_accumulation_steps


def own_loss(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return of_own(self, inputs, model)

    return Own


def louder(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            louder = {**inputs, "advantages": inputs["advantages"] * 2 + 0.1}
            return super()._compute_loss(model, louder)

    return Own


def public_loss(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 0.5 * super().compute_loss(model, inputs, *args, **kwargs)

    return Own


def own_columns(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            lengths = batch["completion_mask"].sum(1)
            batch["advantages"] = batch["advantages"] - lengths / 10
            return batch | {"tokens": lengths.float(), "names": [x["prompt"] for x in inputs]}

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            assert len(inputs["names"]) == len(inputs["tokens"]) == 4
            weighted = inputs["advantages"] * inputs["tokens"]
            return of_own(self, {**inputs, "advantages": weighted}, model)

    return Own


def shaped(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            return batch | {"advantages": batch["advantages"].clamp(-0.5, 0.5) + 0.1}

    return Own


def own_rewards(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _calculate_rewards(
            self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
        ) -> Any:
            given = inputs, prompts, completions, completion_ids_list
            assert all(row["prompt"] == x for row, x in zip(inputs, prompts, strict=True))
            rewards = super()._calculate_rewards(*given).clone()
            rewards[:, 1] = torch.tensor([float(max(ids)) for ids in completion_ids_list])
            rewards[0, 0] = torch.nan
            return rewards

    return Own


def own_logprobs(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * 0.5, *others

    return Own


def own_order(base: type) -> type:
    class Own(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            order = [i for i in super()._get_train_sampler(dataset)]
            return [7 - i for i in order]

    return Own


def own_choice(base: type) -> type:
    """Learns from the tokens of low entropy."""

    class Own(base):  # type: ignore[misc, valid-type]
        def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
            high = super().get_high_entropy_mask(entropies, mask, threshold)
            return mask.bool() & ~high

    return Own


def plain(base: type) -> type:
    return base


REPEATED = {"num_iterations": 2, "beta": 0.1, "steps_per_generation": 2}
CASES: list[tuple[str, Callable[[type], type], dict[str, Any]]] = [
    ("GRPO", plain, REPEATED),
    ("GRPO", own_loss, {}),
    ("GRPO", louder, {"beta": 0.1}),
    ("GRPO", louder, {"loss_type": "grpo", "beta": 0.1}),
    ("GRPO", public_loss, {}),
    ("GRPO", own_columns, {}),
    ("GRPO", shaped, REPEATED),
    ("GRPO", own_rewards, {}),
    ("GRPO", own_logprobs, REPEATED),
    ("GRPO", own_order, {}),
    ("GRPO", own_choice, {"top_entropy_quantile": 0.5, "gradient_accumulation_steps": 1}),
    ("RLOO", own_loss, {}),
    ("RLOO", louder, {"beta": 0.1, "num_iterations": 2}),
    ("RLOO", shaped, {}),
    ("RLOO", own_rewards, {"normalize_advantages": True}),
    ("RLOO", own_logprobs, {"num_iterations": 2}),
]


def trained(library: Any, kind: str, change: Any, folder: Path, **settings: Any) -> Any:
    base, config = getattr(library, f"{kind}Trainer"), getattr(library, f"{kind}Config")
    tiny_models.language_model("llama").save_pretrained(folder / "start")
    answers: dict[str, Any] = {"rollout_func": said}
    if kind == "RLOO" and library is not fastrl:
        base, answers = type("Base", (Saying, base), {}), {}
    trainer = change(base)(
        str(folder / "start"),
        reward_funcs=[even, long],
        args=config(output_dir=str(folder), **{**COMMON, **settings}),
        train_dataset=Dataset.from_dict({"prompt": [f"w{3 + i} w{5 + i}" for i in range(8)]}),
        processing_class=tiny.tokenizer("left"),
        **answers,
    )
    trainer.train()
    return trainer


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
@pytest.mark.parametrize(
    ("kind", "change", "settings"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_subclass_learns_what_trls_does(
    kind: str, change: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    found = [
        trained(library, kind, change, tmp_path / name, **settings)
        for name, library in (("ours", fastrl), ("theirs", trl))
    ]
    ours, theirs = (weights(trainer.model) for trainer in found)
    start = weights(tiny_models.language_model("llama"))
    assert max((x - start[name]).abs().max() for name, x in theirs.items()) > 1e-2
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-5)


def of_trl_0(base: type) -> type:
    """:func:`own_logprobs` as TRL before 1.9 had it."""

    class Own(base):  # type: ignore[misc, valid-type]
        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int,
            batch_size: int | None = None, compute_entropy: bool = False,
        ) -> Any:  # fmt: skip
            given = model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy
            logps, entropies, _ = super()._get_per_token_logps_and_entropies(*given)
            return logps * 0.5, entropies

    return Own


def unasked(base: type) -> type:
    """:func:`own_logprobs` with a loss of experts that is not asked for."""

    class Own(own_logprobs(base)):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return *super()._get_per_token_logps_and_entropies(*args, **kwargs)[:2], 0.0

    return Own


def test_log_probs_of_an_older_trl_are_learned_from(tmp_path: Path) -> None:
    changes = {"old": of_trl_0, "new": own_logprobs, "unasked": unasked}
    old, new, beside = (
        weights(trained(fastrl, "GRPO", x, tmp_path / name, **REPEATED).model)
        for name, x in changes.items()
    )
    assert all(torch.equal(x, other[name]) for name, x in old.items() for other in (new, beside))


@pytest.mark.parametrize("further", [(), (None,)])
def test_a_loss_of_experts_that_is_not_returned_is_refused(further: tuple[None, ...]) -> None:
    class Without:
        def _get_per_token_logps_and_entropies(self, *_: Any) -> Any:
            return torch.zeros(1, 1), torch.zeros(1, 1), *further

    names = (f"{part}_{name}" for part in ("prompt", "completion") for name in ("ids", "mask"))
    inputs = {name: torch.ones(1, 1) for name in names}
    without: Any = Without()
    with pytest.raises(ValueError, match="returned no loss of the experts"):
        OverridableTrainer.own_logprobs(without, torch.nn.Identity(), inputs, True, True)


class Plain:
    pass


class OfText:
    def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
        return super()._prepare_dataset(dataset.select([2, 0, 1]), *given)  # type: ignore[misc]


class OfTokens:
    """Rows that are ready, in the place of all that TRL does."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, *_: Any) -> Any:
        def encode(row: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": processing_class(row["text"] + " w7")["input_ids"]}

        return dataset.map(encode, remove_columns=dataset.column_names)


class OfLogits:
    """A loss by the model's logits, as programs compute it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        ids = inputs["input_ids"]
        if isinstance(self, fastrl.SFTTrainer):  # TRL's collator may make a dict
            assert getattr(inputs, "input_ids", None) is ids
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logprobs = outputs.logits[:, :-1].log_softmax(-1)
        mask = labels[:, 1:] != -100
        chosen = logprobs.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
        loss = -(chosen.exp() * chosen * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


TEXTS = [{"text": "w3 w4 w5"}, {"text": "w6 w7"}, {"text": "w8 w9 w10 w11"}]
PAIRS = [
    {"prompt": f"w{3 + i}", "chosen": f" w{9 - i} w5", "rejected": f" w{20 + i}"} for i in range(3)
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0}
    for i, row in enumerate(PAIRS)
]
SUPERVISED: list[tuple[str, Any, list[dict[str, Any]], dict[str, Any]]] = [
    ("SFT", OfText, TEXTS, {}),
    ("SFT", OfTokens, TEXTS, {}),
    ("SFT", OfLogits, TEXTS, {}),
    ("DPO", OfText, PAIRS, {}),
    ("KTO", OfText, JUDGED, {"loss_type": "apo_zero_unpaired"}),
]


def fitted(library: Any, kind: str, mixin: Any, rows: Any, folder: Path, **settings: Any) -> Any:
    base, config = getattr(library, f"{kind}Trainer"), getattr(library, f"{kind}Config")
    tiny_models.language_model("llama").save_pretrained(folder / "start")
    common = {k: x for k, x in COMMON.items() if k not in ("num_generations", "shuffle_dataset")}
    common = {k: x for k, x in common.items() if k != "max_completion_length"}
    common |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}
    common |= {"gradient_checkpointing": False, **settings}
    trainer = type("Own", (mixin, base), {"__module__": "program"})(
        str(folder / "start"),
        args=config(output_dir=str(folder), **common),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return weights(trainer.model)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "mixin", "rows", "settings"), SUPERVISED)
def test_a_subclass_prepares_and_learns_as_trls_does(
    kind: str, mixin: Any, rows: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    ours, theirs, plain = (
        fitted(library, kind, one, rows, tmp_path / name, **settings)
        for name, library, one in (
            ("ours", fastrl, mixin),
            ("theirs", trl, mixin),
            ("plain", fastrl, Plain),
        )
    )
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-5)
    if mixin is not OfText:  # which only sorts
        assert max((x - plain[name]).abs().max() for name, x in ours.items()) > 1e-3


class Halves:
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return (found[0] / 2, found[1]) if isinstance(found, tuple) else found / 2


@pytest.mark.parametrize(("kind", "rows"), [("SFT", TEXTS), ("DPO", PAIRS), ("Reward", PAIRS)])
def test_evaluations_have_the_loss_of_a_subclass(kind: str, rows: Any, tmp_path: Path) -> None:
    base, config = getattr(fastrl, f"{kind}Trainer"), getattr(fastrl, f"{kind}Config")
    losses = []
    for mixin in (Plain, Halves):
        args = {"use_cpu": True, "report_to": "none", "per_device_eval_batch_size": 3}
        trainer = type("Own", (mixin, base), {"__module__": "program"})(
            reward_model("llama") if kind == "Reward" else tiny_models.language_model("llama"),
            args=config(output_dir=str(tmp_path), **args),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows),
            processing_class=tiny.tokenizer(),
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)


class Hinge:
    def dpo_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
    ) -> Any:
        sides = (
            policy_chosen_logps - reference_chosen_logps,
            policy_rejected_logps - reference_rejected_logps,
        )
        beta = self.args.beta  # type: ignore[attr-defined]
        return torch.relu(1 - beta * (sides[0] - sides[1])), *(beta * x for x in sides)


class Doubled:
    def dpo_loss(self, *logps: Tensor) -> Any:
        losses, *rewards = super().dpo_loss(*logps)  # type: ignore[misc]
        return 2 * losses, *rewards


def test_a_dpo_loss_of_a_subclass_is_learned_from(tmp_path: Path) -> None:
    for mixin, settings, rate in ((Hinge, {"loss_type": "hinge"}, 0.3), (Doubled, {}, 0.6)):
        for loss_type in ("sigmoid", "ipo"):
            own = {"loss_type": loss_type} | ({} if mixin is Hinge else settings)
            ours = fitted(fastrl, "DPO", mixin, PAIRS, tmp_path / "own", **own)
            plain = fitted(
                fastrl,
                "DPO",
                Plain,
                PAIRS,
                tmp_path / "plain",
                learning_rate=rate,
                **{**own, **settings},
            )
            for name, x in plain.items():
                torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_loss_is_computed_of_any_log_probs(loss_type: str, tmp_path: Path) -> None:
    args = fastrl.DPOConfig(str(tmp_path), loss_type=loss_type, beta=0.5, use_cpu=True)
    policy, data = tiny_models.language_model(), Dataset.from_list(PAIRS)
    trainer = fastrl.DPOTrainer(policy, None, args, None, data, processing_class=tiny.tokenizer())
    logps = [torch.tensor([x, 2 * x]) for x in (-1.0, -2.0, -1.5, -1.0)]
    if loss_type == "ipo":  # of means over the completions' tokens
        with pytest.raises(ValueError, match="'ipo' reads the completions' lengths"):
            trainer.dpo_loss(*logps)
        return
    losses, chosen, rejected = trainer.dpo_loss(*logps)
    assert chosen.tolist() == [0.25, 0.5]
    assert rejected.tolist() == [-0.5, -1.0]
    torch.testing.assert_close(losses, -torch.tensor([0.75, 1.5]).sigmoid().log())


def stepped(mixin: Any, **settings: Any) -> dict[str, Tensor]:
    kind = type("Own", (mixin, fastrl.PPOTrainer), {"__module__": "program"})
    config = fastrl.PPOConfig(batch_size=2, ppo_epochs=2, learning_rate=1e-2, **settings)
    trainer = kind(config, tiny_models.policy(), None, tiny.tokenizer())
    queries, said = tiny_models.prompts(3, 2), tiny_models.prompts(2, 4, seed=1)
    for _ in range(2):
        trainer.step(queries, said, [torch.tensor(1.0), torch.tensor(-1.0)])
    return weights(trainer.model)


class TwiceTheKL:
    def compute_rewards(self, scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any) -> Any:
        return super().compute_rewards(
            scores, logprobs, logprobs - 2 * (logprobs - ref_logprobs), masks
        )  # type: ignore[misc]


class Halved:
    def compute_advantages(self, values: Any, rewards: Any, mask: Any) -> Any:
        values, advantages, returns = super().compute_advantages(values, rewards, mask)  # type: ignore[misc]
        return values, torch.zeros_like(advantages), returns


def test_rewards_and_advantages_of_a_subclass_are_learned_from() -> None:
    fixed = {"adap_kl_ctrl": False, "optim": "sgd"}
    ours, plain = stepped(TwiceTheKL, **fixed), stepped(Plain, init_kl_coef=0.4, **fixed)
    other = stepped(Plain, **fixed)
    assert max((x - other[name]).abs().max() for name, x in ours.items()) > 1e-4
    for name, x in plain.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-6)
    values_alone = stepped(Halved, **fixed)
    assert any(not torch.equal(x, other[name]) for name, x in values_alone.items())


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "DPO", "KTO", "SFT", "Reward", "PPO"])
def test_what_training_does_not_call_is_refused(kind: str, tmp_path: Path) -> None:
    base = getattr(fastrl, f"{kind}Trainer")
    own = "OnlineTrainer" if kind in ("GRPO", "RLOO") else f"{kind}Trainer"
    for name, instead in NOT_CALLED[own].items():
        body = {name: lambda self: None, "__module__": "program"}
        for bases in ((base,), (type("Mixin", (), body), base)):
            kind_of = type("Mine", bases, body if len(bases) == 1 else {"__module__": "program"})
            with pytest.raises(TypeError, match=f"Mine overrides {name}, .* does not call") as told:
                kind_of(None)
            assert instead in str(told.value)
    assert all(callable(getattr(base, name)) for name in CALLED[own])


def test_what_a_loss_of_a_subclass_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="micro_batch_tokens splits batches, and Own computes"):
        trained(fastrl, "GRPO", own_loss, tmp_path, micro_batch_tokens=64)

    class OfTokens(fastrl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            each = inputs["advantages"][:, None].expand(inputs["completion_ids"].shape)
            return super()._compute_loss(model, {**inputs, "advantages": each})

    with pytest.raises(ValueError, match="advantages must be one number for each response"):
        trained(fastrl, "GRPO", lambda base: OfTokens, tmp_path)
