"""Rollouts and reference models: what they measure, and gates that can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

from benchmarks import test_ref_model, test_rollout, timing
from benchmarks.cases import OURS, Case, faster, rooflines
from benchmarks.harness import Measurement, Red, Run
from benchmarks.models import Model, build
from benchmarks.test_ref_model import CHECKPOINTING, COPY, HALF, MODES, Stepping, own_accelerate
from benchmarks.test_rollout import CONTINUOUS, GENERATE, STATIC, RolloutJob, Workload
from fastrl import RolloutEngine

CPU = torch.device("cpu")


def an_entry(module, job) -> dict:
    """What a module's measurement of a job comes to, red or not."""
    measurement = Measurement(Run(CPU, rounds=2), Case("toy", "toy", "toy", of=job))
    with contextlib.suppress(Red):
        module.measure(measurement, job)
    return measurement.entry


TINY = Model("tiny", "gpt2", 1, 16, 2, 2, 32, 101, 32, "fp32")
JOB = RolloutJob(TINY, 5, 2, (1, 4), 4, 6, 1.0)


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e9)


def test_every_side_of_a_rollout_is_measured() -> None:
    entry = an_entry(test_rollout, JOB)
    assert set(entry["sides"]) == {OURS, GENERATE, CONTINUOUS}
    assert STATIC in entry["absent"]
    assert entry["units"] == ["tokens", sum(test_rollout.workload(JOB).limits)]
    ours = entry["sides"][OURS]
    assert {phase: len(s) for phase, s in ours["seconds"].items()} == dict.fromkeys(
        ("rollout", "prefill", "decode", "decode step"), 2
    )
    assert rooflines(entry)[0] == ours["limit"][0] / ours["seconds"]["decode"][0]
    assert not entry["sides"][GENERATE]["limit"], "its decode steps are not known"


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("sequences", lambda x: (x + 1) % TINY.vocabulary, "greedy tokens of prompt 0"),
        ("logprobs_t1", lambda x: x + 2e-5, "log-probs are off"),
        ("logprobs_t1", lambda x: x * torch.nan, "log-probs are off by nan"),
    ],
)
def test_wrong_tokens_or_log_probs_have_no_figures(field, change, says, monkeypatch) -> None:
    honest = RolloutEngine.generate

    def generate(*arguments):
        output = honest(*arguments)
        setattr(output, field, [change(x) for x in getattr(output, field)])
        return output

    monkeypatch.setattr(RolloutEngine, "generate", generate)
    # the engine's own check would see that first
    monkeypatch.setattr(inspect.getmodule(RolloutEngine), "check_numbers", lambda _: None)
    entry = an_entry(test_rollout, JOB)
    assert says in entry["red"]
    assert not entry["sides"]


def test_a_peer_that_fails_or_stops_early_is_absent_and_says_why(monkeypatch) -> None:
    closed = []

    def broken(work: Workload) -> list[torch.Tensor]:
        raise RuntimeError("no kernels")

    def importing(*_: object, **__: object):
        raise ImportError("no such name")

    broken.close = lambda: closed.append("broken")
    made = {
        "broken": lambda *_, **__: (broken, ""),
        "short": lambda *_, **__: (lambda work: [torch.zeros(n - 1) for n in work.limits], ""),
        "old": importing,
    }
    monkeypatch.setattr(test_rollout, "PEERS", made)
    entry = an_entry(test_rollout, JOB)
    assert set(entry["sides"]) == {OURS}
    assert entry["absent"]["broken"] == "RuntimeError: no kernels"
    assert entry["absent"]["short"].startswith("sample 0 has ")
    assert "no such name" in entry["absent"]["old"]
    assert closed == ["broken"]


def test_every_side_makes_what_generate_makes_alone() -> None:
    model = build(TINY, CPU)
    work = test_rollout.short_work(TINY.vocabulary)
    expected = test_rollout.greedy_tokens(model, work)
    assert [len(x) for x in expected] == work.limits
    for make in (test_rollout.dynamic, test_rollout.continuous):
        call, _ = make(model, 2, work, greedy=True)
        assert test_rollout.differing(model, work, call(work), expected) is None
        getattr(call, "close", lambda: None)()
    wrong = [*expected[:2], expected[2].flip(0)]
    assert "prompt 2" in test_rollout.differing(model, work, wrong, expected)


@pytest.mark.parametrize(("gap", "tied"), [(0.0, True), (1e-5, True), (1e-3, False)])
def test_what_follows_two_likeliest_tokens_is_not_compared(gap: float, tied: bool) -> None:
    class Model:
        device = CPU

        def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
            assert ids.tolist() == [[7, 1]], "the prompt, and what both have"
            return SimpleNamespace(logits=torch.tensor([[[0.0, 0.0, 3.0, 3.0 - gap]]]))

    work = Workload([torch.tensor([7])], [3])
    expected = [torch.tensor([1, 2, 0])]
    differing = test_rollout.differing
    for found in ([1, 3, 1], [1, 3, 2]):
        assert (differing(Model(), work, [torch.tensor(found)], expected) is None) == tied
    assert differing(Model(), work, [torch.tensor([1, 1, 0])], expected)
    assert differing(Model(), work, [torch.tensor([1, 2])], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_less_precise_model_is_audited_by_the_mean(dtype: str) -> None:
    model = dataclasses.replace(TINY, family="qwen2", kv_heads=1, dtype=dtype)
    work = test_rollout.workload(dataclasses.replace(JOB, model=model))
    built = build(model, CPU)
    engine = test_rollout.Engine(built, slots=2)
    engine(work)
    assert test_rollout.audit(built, dtype, work, engine.output)[-1] is None
    first = engine.output.logprobs_t1[0]
    first[0] += 0.02  # one of many
    _, largest, wrong = test_rollout.audit(built, dtype, work, engine.output)
    assert largest == pytest.approx(0.02, rel=0.05)
    assert (wrong is None) == (dtype == "bf16")
    first += 0.1
    assert test_rollout.audit(built, dtype, work, engine.output)[-1] is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rollouts_fit_their_model_and_have_labels_of_their_own(device: str) -> None:
    found = test_rollout.cases(Run(torch.device(device), full=True))
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        limits = test_rollout.workload(case.of).limits
        assert case.of.prompt[1] + max(limits) <= case.of.model.context
        assert limits == test_rollout.workload(case.of).limits, "the same every time"


def test_bytes_of_a_step_are_those_that_it_cannot_but_read() -> None:
    # 1 layer of width 16 with its 32 inside; three norms; the head, which is the input's table too
    layer = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16)
    built = build(TINY, CPU)
    assert test_rollout.weight_bytes(built) == 4 * (layer + 3 * 32 + 101 * 16)
    work = Workload([torch.zeros(3), torch.zeros(1)], [2, 1])
    # keys and values of 16 numbers in fp32: of 3 + 4 tokens, and of 1
    assert test_rollout.kv_bytes(JOB, work) == 2 * 16 * 4 * (3 + 4 + 1)
    grouped = dataclasses.replace(TINY, kv_heads=1, dtype="bf16", layers=2)
    job = dataclasses.replace(JOB, model=grouped)
    assert test_rollout.kv_bytes(job, work) == 2 * 2 * 8 * 2 * (3 + 4 + 1)


((_, REF_CASE),) = enumerate(test_ref_model.cases(Run(CPU, toy=True)))
REF = REF_CASE.of
WIDTH, LAYERS, VOCABULARY = REF.model.width, REF.model.layers, REF.model.vocabulary


@pytest.fixture(scope="module")
def measured() -> dict:
    pytest.importorskip("peft")
    return an_entry(test_ref_model, REF)


def test_every_way_of_keeping_the_reference_is_measured_beside_a_copy(measured: dict) -> None:
    assert set(measured["sides"]) == {*MODES, COPY + CHECKPOINTING, HALF + CHECKPOINTING}
    assert measured["baseline"] == COPY
    for name, side in measured["sides"].items():
        assert {p: len(s) for p, s in side["seconds"].items()} == {"update": 2, "scores": 2}
        assert ("largest |Δ|" in side["facts"]) == (CHECKPOINTING in name or name != "none")
    copy, half = (measured["sides"][n]["seconds"]["update"] for n in (COPY, HALF))
    assert faster(measured, HALF) == [a / b for a, b in zip(copy, half, strict=True)]


def test_weights_are_counted_once_where_policy_and_reference_share_them(measured: dict) -> None:
    bytes_ = {name: side["memory"]["weights"] for name, side in measured["sides"].items()}
    layer = (WIDTH * 48 + 48) + (WIDTH * WIDTH + WIDTH) + (WIDTH * 32 + 32) + (32 * WIDTH + WIDTH)
    layer += 4 * WIDTH  # two norms
    embeddings = (VOCABULARY + 64) * WIDTH
    model = 4 * (LAYERS * layer + embeddings + 2 * WIDTH + VOCABULARY * WIDTH + WIDTH + 1)
    assert bytes_["none"] == model
    assert bytes_[COPY] == bytes_["offload"] == 2 * model
    for name, share in (("trunk 1/4", 1), (HALF, 2), ("trunk 3/4", 3)):
        assert bytes_[name] == 2 * model - 4 * (share * layer + embeddings)
    adapter = 4 * LAYERS * 8 * ((WIDTH + 48) + (WIDTH + WIDTH))
    assert bytes_["adapter"] == model + adapter


def test_an_update_needs_less_with_a_trunk_and_less_with_checkpointing(measured: dict) -> None:
    peaks = {name: side["memory"]["peak"] for name, side in measured["sides"].items()}
    assert peaks["trunk 3/4"] < peaks[HALF] < peaks["trunk 1/4"] < peaks[COPY]
    assert peaks[COPY + CHECKPOINTING] < peaks[COPY]
    assert peaks[HALF + CHECKPOINTING] < peaks[HALF]
    data = test_ref_model.samples(REF)
    tokens = sum(len(x) for x in (*data.queries, *data.responses))
    for name, side in measured["sides"].items():
        kept = side["memory"].get("trunk activations", 0)
        assert kept == (4 * tokens * WIDTH if name.startswith("trunk") else 0)


def test_activations_that_are_run_again_show_no_figures(monkeypatch) -> None:
    honest = test_ref_model.PPOConfig
    small = {"trunk_cache_gib": 0.0, "trunk_cache_host_gib": 0.0}
    monkeypatch.setattr(test_ref_model, "PPOConfig", lambda **k: honest(**k, **small))
    red = an_entry(test_ref_model, REF)["red"]
    assert red == "trunk 1/4: activations of 4 samples were not kept"


def _class_of(mode: str) -> type:
    """Of what keeps a reference so."""
    with own_accelerate():
        return type(test_ref_model.trainer(REF, MODES[mode], CPU).reference)


def _off(monkeypatch) -> None:
    kind = _class_of(COPY)
    honest = kind.score

    def score(self, inputs, request):
        scored = honest(self, inputs, request)
        return scored._replace(logprobs=scored.logprobs + 2e-5)

    monkeypatch.setattr(kind, "score", score)


def _policy_in_place_of_its_copy(monkeypatch) -> None:
    def score(self, inputs, request):
        with torch.no_grad():
            return self._policy(**inputs, scoring=request)

    monkeypatch.setattr(_class_of(COPY), "score", score)


def _adapter_left_on(monkeypatch) -> None:
    instead = lambda self: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(_class_of("adapter"), "_switched", instead)


def _there_is_one(monkeypatch) -> None:
    kind = _class_of("none")
    honest = kind.score

    def score(self, inputs, request):
        unknown = honest(self, inputs, request)
        return unknown._replace(logprobs=unknown.logprobs.nan_to_num())

    monkeypatch.setattr(kind, "score", score)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_off, "copy: reference log-probs are off by 2."),
        (_policy_in_place_of_its_copy, "copy: reference log-probs are off by"),
        (_adapter_left_on, "adapter: reference log-probs are off by"),
        (_there_is_one, "log-probs, though there is no reference"),
    ],
)
def test_a_reference_that_is_another_model_is_red(break_it, says: str, monkeypatch) -> None:
    pytest.importorskip("peft")
    break_it(monkeypatch)
    _, red = test_ref_model.judge(REF, CPU)
    assert says in red


def test_a_reference_that_is_kept_otherwise_is_red() -> None:
    with own_accelerate():
        made = test_ref_model.trainer(REF, MODES[HALF], CPU)
    another = test_ref_model.another_mode
    assert another(made, MODES[HALF], LAYERS) is None
    assert "it shares 2 layers, not 1" in another(made, MODES["trunk 1/4"], LAYERS)
    assert "the reference is kept as trunk" in another(made, MODES[COPY], LAYERS)


def test_the_gate_moves_all_that_is_trained_and_nothing_else() -> None:
    data = test_ref_model.samples(REF)
    plain = test_ref_model.copy_logprobs(REF, data, CPU)
    with own_accelerate():
        side = Stepping(test_ref_model.trainer(REF, MODES[HALF], CPU), data)
        torch.testing.assert_close(side.reference_logprobs(), plain, rtol=0, atol=1e-5)
        before = [p.detach().clone() for p in side.trainer.model.parameters()]
        test_ref_model.move(side.trainer.model)
        for parameter, was in zip(side.trainer.model.parameters(), before, strict=True):
            moved = (parameter - was).abs().max().item()
            assert (moved > 1e-3) == parameter.requires_grad
            assert moved == 0 or parameter.requires_grad
