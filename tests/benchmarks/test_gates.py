"""What the benchmarks' gates let pass, and what they keep from having figures.

Workers are stand-ins that answer as they are told; rollouts and references run in this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

import fastrl
from benchmarks import (
    environments,
    test_grpo,
    test_ppo,
    test_ref_model,
    test_rollout,
    test_scripts,
    test_training,
    timing,
    worker,
)
from benchmarks.cases import OURS, Case
from benchmarks.environments import TRL, Uninstallable
from benchmarks.harness import Measurement, Red, Run, own_accelerate
from benchmarks.models import EXACT, Model
from benchmarks.sides import __main__ as script
from benchmarks.sides import eager_ppo, rollout
from benchmarks.sides.grpo import UpdateSide
from benchmarks.sides.ppo import PPOSide
from benchmarks.sides.rollout import Generated, RolloutSide, Workload, workload
from benchmarks.test_ref_model import COPY, MODES
from benchmarks.test_rollout import CONTINUOUS, GENERATE, STATIC, VLLM, RolloutJob
from benchmarks.worker import Absent
from tests.patience import PATIENCE

CPU = torch.device("cpu")
PEER = Path("python")
NAN = float("nan")
TOY, TOY_QWEN, RAGGED = test_ppo._TOYS
GRPO, UPDATE = (case.of for case in test_grpo.cases(Run(CPU, toy=True)))
SCRIPT, DISTILLED, _ = (case.of for case in test_scripts.cases(Run(CPU, toy=True)))
DATA = {case.benchmark: case.of for case in test_training.cases(Run(CPU, toy=True))}
((_, REF_CASE),) = enumerate(test_ref_model.cases(Run(CPU, toy=True)))
REF = REF_CASE.of


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as accelerate is concerned, which keeps a process to one precision, and NumPy's
    global generator, which a side draws its mini-batches from."""
    monkeypatch.setattr(np.random, "permutation", np.random.permutation)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class StandIn:
    """A worker's other end: says what it is told to; ours takes one second, a peer three."""

    told: Callable[[StandIn], dict]
    log: list = []  # noqa: RUF012

    def __init__(self, python: Path, library: str, kind: str, shape: dict, *_: Any, **options: Any):
        self.library, self.options, self.shape = library, options, shape
        self.ours, self.judge = library == "fastrl", library == "float64"
        self.log.append((library, options.get("optimizer", "adam"), shape.get("dtype")))

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        if command == "turn":
            taken = 1.0 if self.ours else 3.0
            return {"seconds": {"step": taken, "generation": taken / 2}, "peak": None}
        return {"peak": 1 if self.ours else 2} if command == "memory" else StandIn.told(self)


def entry_of(module: Any, of: Any, *arguments: object) -> dict:
    """What a module's measurement comes to; one that is red has no sides."""
    measurement = Measurement(Run(CPU, rounds=2), Case("toy", "toy", "x", of=of))
    measure = test_grpo.measure_update if of is UPDATE else module.measure
    try:
        measure(measurement, of, *arguments)
    except Red:
        assert not measurement.entry["sides"]
    return measurement.entry


@pytest.fixture
def measured(monkeypatch):
    """Runs a module's measurement with stand-ins; its entry, or why it was refused."""
    for module in (worker, test_ppo):
        monkeypatch.setattr(module, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "log", [])

    def measured(module, of: Any, check, *arguments: object) -> dict:
        monkeypatch.setattr(StandIn, "told", staticmethod(check), raising=False)
        return entry_of(module, of, *arguments)

    return measured


KL, CLIP = "objective/kl", "ppo/val/clipfrac"
UNKNOWN = test_ppo.UNKNOWN["none"]


@pytest.mark.parametrize(("ours", "theirs", "unknown", "exact", "passes"), [
    ({KL: 2.001}, {KL: 2.0}, (), None, True),
    ({KL: 9e-6}, {KL: 0.0}, (), None, True),
    ({KL: 2.003}, {KL: 2.0}, (), None, False),
    ({KL: NAN}, {KL: 2.0}, (), None, False),
    ({}, {KL: 2.0}, (), None, False),
    # a few tokens may fall on either side of the clip
    ({CLIP: 0.3404}, {CLIP: 0.34}, (), None, True),
    ({CLIP: 0.341}, {CLIP: 0.34}, (), None, False),
    # what cannot be known must be NaN
    ({KL: NAN}, {KL: 2.0}, UNKNOWN, None, True),
    ({KL: 0.0}, {KL: 2.0}, UNKNOWN, None, False),
    # float64 decides: within rounding, nearer than the peer, farther, and what it cannot judge
    ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.0005}, True),
    ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.4}, True),
    ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.6}, False),
    ({KL: NAN}, {KL: 2.0}, (), {KL: 1.0}, False),
    ({KL: 1.0}, {KL: 2.0}, (), {}, False),
    ({}, {KL: 2.0}, (), {KL: 2.0}, False),
])  # fmt: skip
def test_statistics_agree_or_float64_decides(ours, theirs, unknown, exact, passes) -> None:
    exact = None if exact is None else [exact]
    lines = list(test_ppo.disagreements([ours], [theirs], unknown, exact))
    assert (not lines) == passes
    assert passes or (KL in lines[0] or CLIP in lines[0])


@pytest.mark.parametrize(("ours", "theirs", "unknown", "said"), [
    (NAN, 1.0, (), "kl is nan"),
    (1.0, float("inf"), (), "kl is inf, the peer's"),
    (None, 1.0, (), "kl is missing"),
    (5.0, -1.0, (), ""),
    (NAN, 1.0, ("kl",), ""),
    (NAN, NAN, ("kl",), "the peer's"),
])  # fmt: skip
def test_in_bf16_a_statistic_that_is_no_number_is_named(ours, theirs, unknown, said) -> None:
    mine = {} if ours is None else {"kl": ours}
    lines = list(test_ppo.not_finite([mine], [{"kl": theirs}], unknown))
    assert (said in lines[0]) if said else not lines


def a_check(kl: float, trained: int = 7) -> dict:
    return {
        "statistics": [{KL: kl}], "trained": {"v_head": trained}, "at rest": None,
        "positions": {"scores": 1.0, "update": 2.0},
    }  # fmt: skip


def test_the_gate_takes_gradient_steps_in_fp32_and_adam_is_timed(measured) -> None:
    check = lambda side: a_check(1.25 if side.ours and side.shape["dtype"] == "bf16" else 1.0)  # noqa: E731
    entry = measured(test_ppo, TOY_QWEN, check, "trl==0.11.4", PEER)
    kinds = (("sgd", "fp32"), ("adam", "bf16"))
    assert StandIn.log == [(side, *kind) for kind in kinds for side in ("fastrl", "trl")]
    assert entry["sides"]["trl==0.11.4"]["seconds"]["step"] == [3.0, 3.0]
    assert entry["sides"][OURS]["facts"] == {"trained parameters": 7}
    assert "objective/kl 2.5e-01 (of 1)" in entry["remarks"][0]


def of_adam(side: StandIn) -> bool:
    return side.options.get("optimizer") != "sgd"


def judged_by(exact: float) -> Callable[[StandIn], dict]:
    """Both sides differ, and float64 has this."""
    return lambda side: a_check(exact if side.judge else 1.0 if side.ours or of_adam(side) else 2.0)


@pytest.mark.parametrize(("work", "check", "said"), [
    (TOY, judged_by(1.0), None),
    (TOY, judged_by(1.3), None),
    (TOY, judged_by(1.6), "the peer has 2, float64 1.6"),
    (TOY, judged_by(2.0), "the peer has 2, float64 2"),
    (TOY_QWEN, lambda side: a_check(NAN if of_adam(side) else 1.0), "kl is nan"),
    (TOY_QWEN, lambda side: a_check(1.0, 7 if side.ours else 6), "fastrl trains 7 numbers"),
])  # fmt: skip
def test_where_sides_differ_there_are_no_figures(measured, work, check, said) -> None:
    red = measured(test_ppo, work, check, "eager", PEER)["red"]
    assert said in red if said else not red


def a_side(library: Any, work: test_ppo.Iteration, reference: str = "copy") -> PPOSide:
    return PPOSide(library, work.shape, reference, "sgd")


@pytest.mark.parametrize("work", [TOY, TOY_QWEN, RAGGED], ids=["gpt2", "qwen2", "ragged"])
def test_the_eager_peer_passes_the_gate_with_all_of_trls_statistics(work) -> None:
    ours, theirs = (a_side(library, work.exact).check() for library in (fastrl, eager_ppo))
    assert len(theirs["statistics"][0]) == 27, "all of TRL 0.11.4's"
    assert not list(test_ppo.disagreements(ours["statistics"], theirs["statistics"]))
    assert not list(test_ppo.trained_otherwise(ours["trained"], theirs["trained"]))


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", ["copy", "adapter", "trunk", "none"])
def test_gradient_descent_stays_within_rounding_of_float64(monkeypatch, reference: str) -> None:
    """A hundred times nearer than what the gate lets pass, though tokens of a copy are clipped."""
    sides = [a_side(library, TOY, reference) for library in (fastrl, eager_ppo.FLOAT64)]
    assert sides[0].trainer.reference.mode == reference
    assert {p.dtype for p in sides[1].trainer.model.parameters()} == {torch.float64}
    found = []
    for side in sides:
        monkeypatch.setattr(np.random, "permutation", np.random.RandomState(0).permutation)
        found.append(side.check())
    ours, exact = found
    assert not list(test_ppo.trained_otherwise(ours["trained"], exact["trained"]))
    monkeypatch.setattr(test_ppo, "RELATIVE", 1e-5)
    unknown = test_ppo.UNKNOWN.get(reference, set())
    assert not list(test_ppo.disagreements(ours["statistics"], exact["statistics"], unknown))
    if reference == "copy":
        assert min(stats["ppo/policy/clipfrac"] for stats in exact["statistics"]) > 0
    assert exact["statistics"][1][KL] != pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(
    ("losses", "red"),
    [([5.0004, 4.0], False), ([5.0006, 4.0], True), ([5.0, NAN], True), ([5.0], True)],
    ids=str,
)
def test_losses_must_agree(measured, kind: str, losses: list[float], red: bool) -> None:
    check = lambda side: {"losses": losses if side.ours else [5.0, 4.0]}  # noqa: E731
    entry = measured(test_training, DATA[kind], check, PEER)
    assert bool(entry["red"]) == red
    assert red or entry["sides"][TRL]["memory"] == {"peak": 2}


@pytest.mark.parametrize("change", [{}, {"a": 1.0005}, {"a": 1.01}, {"a": NAN}, {"a": None}])
def test_parameters_must_move_as_far(measured, change: dict) -> None:
    theirs = {"a": 1.0, "b": 2.0}
    ours = {k: x for k, x in (theirs | change).items() if x is not None}
    check = lambda side: {"moved": ours if side.ours else theirs}  # noqa: E731
    red = change.get("a", 1.0) not in (1.0, 1.0005)
    assert bool(measured(test_grpo, GRPO, check, PEER)["red"]) == red
    assert [side[1] for side in StandIn.log] == ["sgd", "sgd"] + ["adam", "adam"] * (not red)
    assert list(test_grpo.moved_otherwise({"a": 0.0}, {"a": 0.0})), "nothing moved"


def test_each_side_of_a_script_must_move_as_trls_trainer_does(measured) -> None:
    entry = measured(test_scripts, SCRIPT, lambda side: {"moved": {"a": 1.0}}, PEER)
    assert list(entry["sides"]) == [OURS, test_scripts.MIXED, TRL]
    rates = [side["facts"]["generated tokens/s"] for side in entry["sides"].values()]
    assert rates == [4 * 5 / 0.5, 4 * 5 / 1.5, 4 * 5 / 1.5]
    for library, named in (("fastrl", OURS), ("trl+fastrl", test_scripts.MIXED)):
        check = lambda side, off=library: {"moved": {"a": 1.0 + 0.1 * (side.library == off)}}  # noqa: E731
        assert f"{named}: a" in measured(test_scripts, SCRIPT, check, PEER)["red"]


def test_updates_of_other_gradients_have_no_figures(monkeypatch) -> None:
    entry = entry_of(test_grpo, UPDATE)
    assert set(entry["sides"]) == {OURS, test_grpo.PADDED}
    packed, padded = (side["memory"]["peak"] for side in entry["sides"].values())
    assert 0 < packed < padded
    honest = UpdateSide.gradients_of_step

    def moved(self: UpdateSide) -> dict[str, torch.Tensor]:
        found = honest(self)
        first = next(iter(found))
        return found | {first: found[first] * (1.0 if self.padding_free else 1.00002)}

    monkeypatch.setattr(UpdateSide, "gradients_of_step", moved)
    assert "gradients differ by 2.0e-05" in entry_of(test_grpo, UPDATE)["red"]
    one = torch.ones(2)
    for mine, theirs, wrong in (
        ({"a": one}, {"a": one * (1 + 5e-6)}, False),
        ({"a": one * NAN}, {"a": one}, True),
        ({"a": one}, {"a": one, "b": one}, True),
        ({}, {}, True),
    ):
        assert bool(list(test_grpo.other_gradients(mine, theirs))) == wrong


TINY = Model("tiny", "gpt2", 1, 16, 2, 2, 32, 101, 32, "fp32")
JOB = RolloutJob(TINY, 5, 2, (1, 4), 4, 6, 1.0)


class InThisProcess:
    """A worker whose side runs here, on the library of this environment."""

    def __init__(self, python: Path, library: str, kind: str, shape: dict, *_: str, **options: str):
        self.implementation, self.options, self.side = library, options, None
        if not script.why_absent(options):
            self.side = RolloutSide(importlib.import_module(library), shape, **options)

    def ready(self) -> dict[str, str]:
        if why := script.why_absent(self.options):
            raise Absent(why)
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        return json.loads(json.dumps(getattr(self.side, command)()))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if manager := getattr(self.side, "generator", None):
            stop = getattr(manager, "manager", SimpleNamespace(stop=lambda **_: None)).stop
            stop(timeout=PATIENCE, hard_stop=True)


@pytest.fixture
def rolled_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Measures rollouts here; by ``change`` one way of generating gives something else."""
    monkeypatch.setattr(timing, "copy_speed", lambda device: 1e9)
    monkeypatch.setattr(test_rollout, "Worker", InThisProcess)

    def no_room(peer: str) -> Path:
        raise Uninstallable("no room for it")

    monkeypatch.setattr(environments, "peer_python", no_room)

    def rolled_out(way: Any = None, change: Any = None) -> dict:
        if way is not None:
            honest = way.__call__
            monkeypatch.setattr(
                way, "__call__",
                lambda self, work, greedy=False: change(honest(self, work, greedy), greedy),
            )  # fmt: skip
        return entry_of(test_rollout, JOB)

    return rolled_out


def test_every_side_of_a_rollout_is_measured(rolled_out) -> None:
    entry = rolled_out()
    assert not entry["red"]
    assert set(entry["sides"]) == {OURS, GENERATE, CONTINUOUS}
    assert STATIC in entry["absent"]
    assert entry["absent"][VLLM] == "no room for it"
    assert entry["units"] == ["tokens", sum(workload(JOB.shape).limits)]
    for name in (OURS, CONTINUOUS):
        assert entry["sides"][name]["facts"]["largest |Δ log-prob|"] <= EXACT


def _tokens(made: Generated, _: bool) -> Generated:
    return made._replace(sequences=[[(x + 1) % TINY.vocabulary for x in y] for y in made.sequences])


def _logprobs(delta: float) -> Callable[[Generated, bool], Generated]:
    return lambda made, _: made._replace(logprobs=[[x + delta for x in y] for y in made.logprobs])


def _fewer(made: Generated, greedy: bool) -> Generated:
    return made if greedy else made._replace(sequences=[x[:-1] for x in made.sequences])


@pytest.mark.parametrize(("way", "change", "side", "says"), [
    (rollout.Engine, _tokens, OURS, "greedy tokens of prompt 0"),
    (rollout.Engine, _logprobs(2e-5), OURS, "log-probs are off"),
    (rollout.Engine, _logprobs(NAN), OURS, "log-probs are off by nan"),
    (rollout.Engine, _fewer, OURS, "sample 0 has"),
    (rollout.Transformers, _fewer, GENERATE, "sample 0 has"),
    (rollout.Continuous, _tokens, CONTINUOUS, "greedy tokens of prompt 0"),
    (rollout.Continuous, _logprobs(2e-3), CONTINUOUS, "log-probs are off"),
    (rollout.Continuous, _logprobs(2e-5), CONTINUOUS, None),  # a peer may be less exact
])  # fmt: skip
def test_wrong_rollouts_have_no_figures(rolled_out, way, change, side, says) -> None:
    entry = rolled_out(way, change)
    if says is None:
        facts = entry["sides"][side]["facts"]
        assert facts["mean |Δ log-prob|"] == pytest.approx(2e-5, rel=0.1)
    else:
        assert says in (entry["red"] if side == OURS else entry["absent"][side])


@pytest.mark.parametrize(("gap", "tied"), [(0.0, True), (1e-5, True), (1e-3, False)])
def test_what_follows_two_likeliest_tokens_is_not_compared(gap: float, tied: bool) -> None:
    class Likely:
        device = CPU

        def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
            assert ids.tolist() == [[7, 1]], "the prompt, and what both have"
            return SimpleNamespace(logits=torch.tensor([[[0.0, 0.0, 3.0, 3.0 - gap]]]))

    work, expected = Workload([torch.tensor([7])], [3]), [torch.tensor([1, 2, 0])]
    for found in ([1, 3, 1], [1, 3, 2]):
        assert (test_rollout.differing(Likely(), work, [found], expected) is None) == tied
    for found in ([1, 1, 0], [1, 2]):
        assert test_rollout.differing(Likely(), work, [found], expected)


def _scored(kind: type, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Log-probs of a reference are others."""
    honest = kind.score

    def score(self, inputs, request):
        scored = honest(self, inputs, request)
        return scored._replace(logprobs=change(scored.logprobs))

    return lambda patch: patch.setattr(kind, "score", score)


def _class_of(mode: str) -> type:
    """Of what keeps a reference so."""
    with own_accelerate():
        return type(test_ref_model.trainer(REF, MODES[mode], CPU).reference)


def _policy_in_place_of_its_copy(monkeypatch) -> None:
    def score(self, inputs, request):
        with torch.no_grad():
            return self._policy(**inputs, scoring=request)

    monkeypatch.setattr(_class_of(COPY), "score", score)


def _adapter_left_on(monkeypatch) -> None:
    monkeypatch.setattr(_class_of("adapter"), "_switched", lambda self: contextlib.nullcontext())


@pytest.mark.parametrize(("break_it", "says"), [
    (lambda patch: _scored(_class_of(COPY), lambda x: x + 2e-5)(patch),
     "copy: reference log-probs are off by 2."),
    (_policy_in_place_of_its_copy, "copy: reference log-probs are off by"),
    (_adapter_left_on, "adapter: reference log-probs are off by"),
    (lambda patch: _scored(_class_of("none"), lambda x: x.nan_to_num())(patch),
     "log-probs, though there is no reference"),
])  # fmt: skip
def test_a_reference_that_is_another_model_is_red(break_it, says: str, monkeypatch) -> None:
    pytest.importorskip("peft")
    break_it(monkeypatch)
    assert says in test_ref_model.judge(REF, CPU)[1]
