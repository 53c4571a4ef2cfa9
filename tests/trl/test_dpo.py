"""DPOTrainer: one step against float64 formulas, metrics, references, data, settings, resuming."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from fastrl import DPOConfig, DPOTrainer
from fastrl.data.preferences import OF_A_PAIR, prepare_pairs_of_ids
from fastrl_kernels import reference as formulas
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny
from tests.resuming import OwnStates, assert_same_run, resumed, straight
from tests.run.test_transformers_checkpoints import At, failing
from tests.trainers.conftest import GRADIENT_STEP, SETTINGS, pairs, weights
from tests.trl.test_tools import model as chat_model

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
PAIRS = 4


def trainer(
    folder: Path, model: Any = None, kind: Any = (DPOTrainer, DPOConfig), **settings: Any
) -> Any:
    given = {
        name: settings.pop(name)
        for name in ("ref_model", "peft_config", "eval_dataset", "train_dataset", "callbacks")
        if name in settings
    }
    given.setdefault("train_dataset", pairs(PAIRS))
    common = {**SETTINGS, "logging_steps": 1, "gradient_checkpointing": False, **settings}
    return kind[0](
        tiny_models.language_model("llama") if model is None else model,
        args=kind[1](output_dir=str(folder), **common),
        processing_class=tiny.tokenizer(),
        **given,
    )


def token_logprobs(model: Any, rows: Any, side: str) -> list[Tensor]:
    """Of each row's completion, in float64, one row at a time."""
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        every = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        found.append(every[len(row["prompt_ids"]) - 1 :])
    return found


@torch.no_grad()
def sums(model: Any, rows: Any) -> list[Tensor]:
    """Of chosen and of rejected completions, [B] each."""
    sides = (token_logprobs(model.double(), rows, side) for side in ("chosen", "rejected"))
    return [torch.stack([x.sum() for x in side]) for side in sides]


@torch.no_grad()
def expected_loss(policy: Any, ref: Any, rows: Any, kind: str) -> float:
    """By the papers' formulas, in float64."""
    if kind == "sft":
        return float(-torch.cat(token_logprobs(policy.double(), rows, "chosen")).mean())
    return float(
        formulas.pair_loss(*sums(policy, rows), *sums(ref, rows), kind=kind, beta=0.5).mean()
    )


def one_step(folder: Path, **settings: Any) -> DPOTrainer:
    """A trainer after a step of gradient descent by 1, from another model than its reference."""
    ref = tiny_models.language_model("llama", perturbation=0.05)
    made = trainer(folder, ref_model=ref, **{**GRADIENT_STEP, "beta": 0.5, **settings})
    made.train()
    return made


# Of all others, and of their gradients, tests/surfaces says that they are the framework's.
@pytest.mark.parametrize("kind", ["sigmoid", "aot", "aot_unpaired", "sft"])
def test_a_loss_follows_the_formula(tmp_path, kind):
    made = one_step(tmp_path, loss_type=[kind])
    policy = tiny_models.language_model("llama")
    expected = expected_loss(policy, made.ref_model, made.train_dataset, kind)
    assert made.state.log_history[0]["loss"] == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_sigmoid_smooths_labels_and_says_that_trl_1_does_not(tmp_path):
    with pytest.warns(UserWarning, match="label_smoothing=0.2 smooths the labels of sigmoid"):
        made = one_step(tmp_path, loss_type=["sigmoid"], label_smoothing=0.2)
    same = one_step(tmp_path, loss_type=["cdpo"], label_smoothing=0.2)
    plain = one_step(tmp_path, loss_type=["sigmoid"])
    found, cdpo, without = (x.state.log_history[0]["loss"] for x in (made, same, plain))
    assert found == cdpo != without


def test_a_data_set_whose_prompts_have_another_name_is_warned_of(tmp_path):
    rows = [{"question": "w3", "chosen": "w4", "rejected": " w5"}] * 2
    with pytest.warns(UserWarning, match=r"rename_column\('question', 'prompt'\)"):
        trainer(tmp_path, train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize("settings", [{}, {"micro_batch_tokens": 40}])
def test_a_step_without_padding_or_in_passes_is_the_same(tmp_path, settings):
    expected = weights(one_step(tmp_path).model)
    found = weights(one_step(tmp_path, padding_free=True, **settings).model)
    scale = max(float(x.abs().max()) for x in expected.values())
    for name, x in found.items():
        # Activations of two layers, rounded in another order: some 1e-5 of the largest.
        assert float((x - expected[name]).abs().max()) <= 2e-5 * scale, name


def test_losses_are_added_by_their_weights(tmp_path):
    made = trainer(
        tmp_path, max_steps=1, loss_type=["sigmoid", "sft"], loss_weights=[0.5, 2.0], beta=0.1
    )
    model = tiny_models.language_model("llama").double()
    nll = expected_loss(model, model, made.train_dataset, "sft")
    made.train()
    expected = 0.5 * math.log(2) + 2.0 * nll  # the policy is its reference
    assert made.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_tokens_behind_the_shorter_completion_count_less(tmp_path):
    made = trainer(tmp_path, ld_alpha=0.25, ref_model=tiny_models.language_model("llama", 0.05))
    made.train()
    rows, model = made.train_dataset, tiny_models.language_model("llama").double()
    with torch.no_grad():
        sides = [token_logprobs(model, rows, side) for side in ("chosen", "rejected")]
    sums = []
    for w, l in zip(*sides, strict=True):  # noqa: E741
        n = min(len(w), len(l))
        sums.append(float(w[:n].sum() + 0.25 * w[n:].sum()))
    assert made.state.log_history[0]["logps/chosen"] == pytest.approx(
        sum(sums) / len(sums), rel=1e-5
    )


def test_pairs_are_weighed_by_their_probability(tmp_path):
    made = trainer(tmp_path, use_weighting=True)
    made.train()
    rows, model = made.train_dataset, tiny_models.language_model("llama").double()
    weights = torch.ones(len(rows), dtype=torch.float64)
    for side in ("chosen", "rejected"):
        for i, row in enumerate(rows):
            ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            aligned = (own - (2 * logprobs).logsumexp(-1))[len(row["prompt_ids"]) - 1 :]
            weights[i] *= aligned.mean().exp()
    expected = float(weights.mean()) * math.log(2)
    assert made.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_metrics_are_those_of_the_formulas(tmp_path):
    model, other = tiny_models.language_model("llama"), tiny_models.language_model("llama", 0.05)
    made = trainer(tmp_path, model, ref_model=other, beta=0.5)
    rows, exact = made.train_dataset, copy.deepcopy(model).double()
    logps, refs = sums(exact, rows), sums(copy.deepcopy(other), rows)
    said: dict[str, list[float]] = {"entropy": [], "top": [], "chosen": [], "rejected": []}
    with torch.no_grad():
        for side in ("chosen", "rejected"):
            for row in rows:
                ids = torch.tensor([row["prompt_ids"] + row[f"{side}_ids"]])
                logits = exact(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
                p = logits.softmax(-1)
                said["entropy"] += (-(p * p.log()).sum(-1)).tolist()
                said[side] += logits.mean(-1).tolist()
                if side == "chosen":
                    own = torch.tensor(row["chosen_ids"])
                    said["top"] += (logits.argmax(-1) == own).double().tolist()
    made.train()
    log = made.state.log_history[0]
    rewards = [0.5 * (x - y) for x, y in zip(logps, refs, strict=True)]

    def mean(x: Any) -> float:
        return float(torch.as_tensor(x, dtype=torch.float64).mean())

    expected = {
        "rewards/chosen": mean(rewards[0]),
        "rewards/rejected": mean(rewards[1]),
        "rewards/margins": mean(rewards[0] - rewards[1]),
        "rewards/accuracies": mean((rewards[0] > rewards[1]).double()),
        "logps/chosen": mean(logps[0]), "logps/rejected": mean(logps[1]),
        "logits/chosen": mean(said["chosen"]), "logits/rejected": mean(said["rejected"]),
        "entropy": mean(said["entropy"]), "mean_token_accuracy": mean(said["top"]),
        "num_tokens": sum(
            2 * len(r["prompt_ids"]) + len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows
        ),
    }  # fmt: skip
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("way", ["precomputed", "adapter", "given"])
def test_a_reference_is_what_the_policy_began_as(tmp_path, way):
    """Without a step away from it, every reward is 0 and the loss log 2."""
    settings: dict[str, Any] = {"learning_rate": 0.0}
    if way == "precomputed":
        settings["precompute_ref_log_probs"] = True
    if way == "adapter":
        settings["peft_config"] = tiny_models.lora(
            target_modules=["q_proj"], fan_in_fan_out=False, init_lora_weights=True
        )
    if way == "given":
        settings["ref_model"] = tiny_models.language_model("llama")
    made = trainer(tmp_path, eval_dataset=pairs(3, seed=1), **settings)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert made.state.log_history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert made.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (made.ref_model is None) == (way != "given")


def test_a_reference_that_follows_moves_by_its_part_of_the_way(tmp_path):
    made = trainer(
        tmp_path,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.25,
        learning_rate=0.1,
    )
    before = {name: p.clone() for name, p in made.ref_model.named_parameters()}
    made.train()
    for name, p in made.model.named_parameters():
        expected = 0.25 * p.data + 0.75 * before[name]
        torch.testing.assert_close(made.ref_model.get_parameter(name), expected)


# Sides that begin alike within a word part there, in the middle of a token.
def test_pairs_of_equal_sides_are_counted():
    rows = [{"prompt": "w3", "chosen": " w4", "rejected": f" w{4 + i % 2}"} for i in range(4)]
    with pytest.warns(UserWarning, match="2 of 4 pairs have equal sides, such as row 0"):
        prepare_pairs_of_ids(Dataset.from_list(rows), tiny.tokenizer(), None, None)


@pytest.mark.filterwarnings("ignore:the end of a prompt")
def test_prompts_in_front_of_both_sides_are_found(tmp_path):
    rows = [{k: row["prompt"] + row[k] for k in ("chosen", "rejected")} for row in pairs(PAIRS)]
    explicit, implicit = trainer(tmp_path), trainer(tmp_path, train_dataset=Dataset.from_list(rows))
    explicit.train()
    implicit.train()
    for one, other in zip(explicit.train_dataset, implicit.train_dataset, strict=True):
        shared = len(other["prompt_ids"]) - len(one["prompt_ids"])
        assert shared >= 0  # completions may begin alike
        whole = [r["prompt_ids"] + r["chosen_ids"] for r in (one, other)]
        assert whole[0] == whole[1]


def test_a_stream_is_learned_from_and_evaluated(tmp_path):
    stream = pairs(PAIRS).to_iterable_dataset()
    made = trainer(tmp_path, train_dataset=stream, eval_dataset={"held_out": stream})
    expected = trainer(tmp_path)
    made.train()
    expected.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(
        expected.state.log_history[0]["loss"], rel=1e-6
    )
    assert "eval_held_out_loss" in made.evaluate()


def test_long_sequences_are_cut_and_long_prompts_dropped(tmp_path):
    rows = [
        {"prompt_ids": [5] * 3, "chosen_ids": [6] * 9, "rejected_ids": [7] * 2},
        {"prompt_ids": [5] * 8, "chosen_ids": [6], "rejected_ids": [7]},
    ]
    texts = [{"prompt": "w5 " * n, "chosen": "w6 " * 9, "rejected": "w7"} for n in (3, 8)]
    with pytest.warns(UserWarning, match="1 of 2 rows dropped"):
        made = trainer(tmp_path, train_dataset=Dataset.from_list(texts), max_length=8)
    assert len(made.train_dataset) == 1
    made = trainer(tmp_path, max_length=8)
    batch = made.data_collator(rows[:1])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["completion_mask"].sum(1).tolist() == [5, 2]


def test_metrics_that_nobody_logs_do_not_pile_up(tmp_path):
    made = trainer(tmp_path, max_steps=2, logging_strategy="no")
    states = OwnStates(made)
    made.train()
    assert [x["metrics"]["rows"] for x in states.seen] == [[]] * 2


def test_pad_token_is_the_tokenizers_and_the_models(tmp_path):
    made = trainer(tmp_path, pad_token="w51")
    assert made.processing_class.pad_token == "w51"
    assert made.model.config.pad_token_id == made.processing_class.pad_token_id == 51
    assert made.data_collator.pad_token_id == 51


def test_data_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lacks rejected"):
        trainer(tmp_path, train_dataset=Dataset.from_list([{"prompt": "w3", "chosen": "w4"}]))
    stream = pairs(2).to_iterable_dataset()
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        trainer(tmp_path, train_dataset=stream, precompute_ref_log_probs=True)
    model = tiny_models.language_model("llama")
    with pytest.raises(ValueError, match="the same object"):
        trainer(tmp_path, model, ref_model=model)


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.filterwarnings("ignore:chosen and rejected begin with the whole prompt")
def test_chats_are_read_as_people_have_them(tmp_path: Path) -> None:
    tokenizer, model = chat_tokenizer.tokenizer(), chat_model()
    question, answers = chat("w3"), [chat("w3", x)[1:] for x in ("w4", "w5 w6")]
    whole = [chat("w3", x) for x in ("w4", "w5 w6")]
    kinds = [
        {"prompt": question, "chosen": answers[0], "rejected": answers[1]},
        {"prompt": "w3", "chosen": answers[0], "rejected": answers[1]},
        {"prompt": "w3", "chosen": whole[0], "rejected": whole[1]},
        {"prompt": question, "chosen": whole[0], "rejected": whole[1]},
    ]
    found = []
    for row in kinds:
        args = DPOConfig(output_dir=str(tmp_path), **SETTINGS)
        rows = DPOTrainer(
            model, args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer
        ).train_dataset
        found.append({name: rows[0][name] for name in OF_A_PAIR})
    assert found[1:] == found[:1] * 3


def test_metrics_go_on_behind_a_step_whose_callback_failed(tmp_path):
    """The resumed run logs that step as it begins, when its model is not in training yet."""

    def made(folder: Path, *callbacks: Any) -> DPOTrainer:
        short = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps"}
        return trainer(folder, callbacks=list(callbacks), **short)

    fails = made(tmp_path / "run", At("on_step_end", 2, failing))
    with pytest.warns(UserWarning, match="saved in"), pytest.raises(RuntimeError, match="tired"):
        fails.train()
    again = resumed(made, tmp_path / "run", True)
    assert_same_run(again, straight(made, tmp_path / "whole"))
    assert len({row["logps/chosen"] for row in again.state.log_history if "loss" in row}) == 4


def test_metrics_of_predictions_see_both_sides_of_every_pair(tmp_path):
    """Also those of a last batch with fewer pairs than the others."""
    seen = []

    def made(size: int) -> None:
        settings = {"per_device_eval_batch_size": size, "pad_to_multiple_of": 32}
        policy = trainer(tmp_path, eval_dataset=pairs(6), **settings)
        policy.compute_metrics = lambda x: seen.append((x.predictions, x.label_ids)) or {}
        policy.evaluate()

    made(6)
    made(4)
    (logits, ids), (parts, ids_of_parts) = seen
    chosen, rejected = slice(0, 6), slice(6, 12)
    of_parts = [*range(4), 8, 9], [*range(4, 8), 10, 11]
    assert len(logits) == len(parts) == 12
    for side, rows in zip((chosen, rejected), of_parts, strict=True):
        assert (ids[side] == ids_of_parts[rows]).all()
        assert abs(logits[side] - parts[rows]).max() < 1e-5


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_an_order_by_lengths_that_rows_do_not_have_is_refused(tmp_path, strategy):
    with pytest.raises(ValueError, match="reads input_ids, which a pair does not have"):
        trainer(tmp_path, train_sampling_strategy=strategy)
