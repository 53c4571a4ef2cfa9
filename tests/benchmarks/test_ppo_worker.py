"""One side of the PPO benchmark: models, references, what it times, and what it counts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

import fastrl
from benchmarks.before import (
    ppo_cases,
    ppo_eager,
    ppo_float64,
    ppo_gate,
    ppo_tables,
    ppo_worker,
)
from benchmarks.before.ppo_worker import Side

TOY, TOY_QWEN = (case.shape for case in ppo_cases.QUICK)


@pytest.fixture(autouse=True)
def a_process_of_its_own() -> Iterator[None]:
    """As far as accelerate is concerned, which keeps a process to one precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_worker_reports_every_phase() -> None:
    shape = vars(TOY) | {"layers": 1, "batch": 2, "epochs": 1}
    side = Side(fastrl, shape)
    first, second = side.check()["statistics"]
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["objective/kl"] != 0.0
    found = side.iterate()
    seconds = found["seconds"]
    assert found["peak"] is None  # a CPU keeps no count
    assert seconds.keys() == ppo_tables.PHASES.keys()
    assert all(value > 0 for value in seconds.values())


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", list(ppo_cases.REFERENCES))
def test_a_worker_keeps_the_reference_that_was_asked_for(reference: str) -> None:
    shape = vars(TOY) | {"batch": 2, "mini_batch": 2, "epochs": 1}
    side = Side(fastrl, shape, reference)
    assert side.trainer.reference.mode == reference

    found = side.check()
    first, second = (statistics["objective/kl"] for statistics in found["statistics"])
    if reference == "none":
        assert first != first
        assert side.trainer.config.init_kl_coef == 0
    else:
        # An adapter's policy is off its base from the start: the gate sees which one is scored.
        assert (abs(first) > 1e-4) == (reference == "adapter")
        assert first != second

    layers = {name.split(".h.")[1][0] for name in found["trained"] if ".h." in name}
    assert layers == ({"1"} if reference == "trunk" else {"0", "1"})
    assert any("wte" in name for name in found["trained"]) == (
        reference not in ("trunk", "adapter")
    )
    assert found["trained"]["v_head.summary.weight"] == TOY.width
    assert any("lora_B" in name for name in found["trained"]) == (reference == "adapter")


def test_the_peer_is_told_of_the_kl_coefficient_alone() -> None:
    class Trl:
        __name__ = "trl"

    assert ppo_worker.settings(Trl, "offload") == {}
    assert ppo_worker.settings(Trl, "none") == {"init_kl_coef": 0.0}


def test_without_peft_an_adapter_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ppo_worker.why_absent("adapter") is None
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "peft cannot be imported" in ppo_worker.why_absent("adapter")
    assert ppo_worker.why_absent("trunk") is None


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", ["copy", "adapter", "trunk"])
def test_a_qwen2_in_bf16_has_its_layers_where_they_are_looked_for(reference: str) -> None:
    side = Side(fastrl, vars(TOY_QWEN) | {"batch": 2, "epochs": 1}, reference)
    config = side.trainer.model.pretrained_model.config
    assert (config.num_key_value_heads, config.intermediate_size) == (2, 96)
    assert {p.dtype for p in side.trainer.model.parameters()} == {torch.float32}
    assert side.trainer.accelerator.mixed_precision == "bf16"
    found = side.check()
    assert found["at_rest"] is None
    assert not list(ppo_gate.not_finite(found["statistics"], found["statistics"]))
    trained = found["trained"]
    layers = {name.split(".layers.")[1][0] for name in trained if ".layers." in name}
    assert layers == ({"1"} if reference == "trunk" else {"0", "1"})
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in trained if "lora" in name}
    assert adapted == ({"q_proj", "v_proj"} if reference == "adapter" else set())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_generation_is_run_in_the_precision_of_the_shape(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    side = Side(ppo_eager, vars(TOY_QWEN) | {"batch": 2, "epochs": 1, "dtype": dtype})
    seen = []

    def generate(queries: list[torch.Tensor], **_: object) -> list[torch.Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return [torch.ones(TOY_QWEN.response, dtype=torch.long) for _ in queries]

    monkeypatch.setattr(side.trainer, "generate", generate)
    side.iterate()
    assert seen == [dtype == "bf16"]
    assert not torch.is_autocast_enabled("cpu")


def test_no_response_ends_by_a_token_that_is_sampled() -> None:
    side = Side(ppo_eager, vars(TOY) | {"batch": 2})
    model = side.trainer.model.pretrained_model
    assert side.trainer.tokenizer.eos_token_id == model.config.eos_token_id == ppo_worker.EOS


@pytest.mark.parametrize("case", ppo_cases.cases("cuda"), ids=lambda case: case.shape.family)
def test_a_model_has_a_position_for_every_token(case: ppo_cases.Case) -> None:
    long = replace(case.shape, response=2000)
    config = ppo_worker.model_config(vars(long))
    assert config.max_position_embeddings >= long.query + long.response
    assert ppo_worker.model_config(vars(case.shape)).max_position_embeddings == 1024


# What TRL 0.11.4 reports and the gate compares.
STATISTICS = {
    "objective/kl", "objective/kl_coef", "objective/entropy", "ppo/mean_non_score_reward",
    "ppo/mean_scores", "ppo/std_scores", "tokens/queries_len_mean", "tokens/queries_len_std",
    "tokens/responses_len_mean", "tokens/responses_len_std", "ppo/loss/policy", "ppo/loss/value",
    "ppo/loss/total", "ppo/policy/entropy", "ppo/policy/approxkl", "ppo/policy/policykl",
    "ppo/policy/clipfrac", "ppo/policy/advantages_mean", "ppo/returns/mean", "ppo/returns/var",
    "ppo/val/vpred", "ppo/val/error", "ppo/val/clipfrac", "ppo/val/mean", "ppo/val/var",
    "ppo/val/var_explained", "ppo/learning_rate",
}  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_the_eager_peer_passes_the_gate_with_all_of_trls_statistics(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    shape = vars(ppo_cases.exact({"gpt2": TOY, "qwen2": TOY_QWEN}[family]))
    found = []
    for library in (fastrl, ppo_eager):
        # As the worker's main: both draw the mini-batches of seed 0.
        monkeypatch.setattr(np.random, "permutation", np.random.RandomState(0).permutation)
        found.append(Side(library, shape, optimizer="sgd").check())
    ours, theirs = found
    assert theirs["statistics"][0].keys() == STATISTICS
    # The coefficient moves by less than the gate's tolerance.
    coefficients = [side["statistics"][1]["objective/kl_coef"] for side in found]
    assert coefficients[0] == pytest.approx(coefficients[1], rel=1e-7) != 0.2
    assert not list(ppo_gate.disagreements(ours["statistics"], theirs["statistics"]))
    assert not list(ppo_gate.trained_otherwise(ours["trained"], theirs["trained"]))


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", ["copy", "adapter", "trunk", "none"])
def test_gradient_descent_stays_within_rounding_of_float64(
    monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    """A hundred times nearer than what the gate lets pass, though tokens of a copy are clipped."""
    found = []
    for library in (fastrl, ppo_float64):
        monkeypatch.setattr(np.random, "permutation", np.random.RandomState(0).permutation)
        found.append(Side(library, vars(TOY), reference, "sgd").check())
    ours, exact = found
    assert not list(ppo_gate.trained_otherwise(ours["trained"], exact["trained"]))
    monkeypatch.setattr(ppo_gate, "RELATIVE", 1e-5)
    unknown = ppo_cases.UNKNOWN.get(reference, set())
    both = ours["statistics"], exact["statistics"]
    assert not list(ppo_gate.disagreements(*both, unknown))
    if reference == "copy":
        assert min(stats["ppo/policy/clipfrac"] for stats in exact["statistics"]) > 0
    assert exact["statistics"][1]["objective/kl"] != pytest.approx(0, abs=1e-3)


def test_the_judge_computes_in_float64() -> None:
    side = Side(ppo_float64, vars(TOY) | {"batch": 2, "epochs": 1}, optimizer="sgd")
    assert {p.dtype for p in side.trainer.model.parameters()} == {torch.float64}
    seen = []
    loss = side.trainer._loss
    side.trainer._loss = lambda *args: seen.append(loss(*args)) or seen[-1]
    side.check()
    assert {value.dtype for value, _ in seen} == {torch.float64}


def test_the_eager_peer_generates_after_padding_and_ends_at_eos() -> None:
    side = Side(ppo_eager, vars(TOY) | {"batch": 2})
    queries = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    greedy = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    together = side.trainer.generate(queries, batch_size=2, return_prompt=False, **greedy)
    alone = [side.trainer.generate([query], return_prompt=False, **greedy)[0] for query in queries]
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]
    end = int(alone[1][1])
    side.trainer.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=end)
    (cut,) = side.trainer.generate(queries[1:], **greedy)
    until = alone[1].tolist().index(end) + 1
    assert cut.tolist() == [8, *alone[1].tolist()[:until]]


def test_on_a_gpu_memory_is_counted_from_where_it_was_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side(ppo_eager, vars(TOY) | {"batch": 2})
    side.device = torch.device("cuda")
    held = {"now": 5, "peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: held["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda _: held.update(peak=held["now"])
    )
    assert (side.at_rest(), side.peak()) == (5, 9)
    side.forget_peak()
    assert side.peak() == 5
