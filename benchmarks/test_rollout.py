"""Generation: useful tokens per second of the engine, of transformers' own ways and of vLLM.

Each side is a process of its own, so that its start-up and its memory are its own too. A gate comes
first: greedy tokens equal to `model.generate`'s, log-probs equal to a plain forward's. Useful are
the tokens within each sample's limit, whatever a side generates beyond them. There is no
end-of-sequence token: each sample has a length, and every side generates the same number of tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import environments, timing
from benchmarks.cases import OURS, Case, Goal
from benchmarks.harness import Measurement, Run
from benchmarks.models import (
    EXACT,
    GPT2,
    LLAMA,
    QWEN,
    QWEN35,
    SMALL,
    SMALL_QWEN35,
    TOY,
    Model,
    build,
    less_exact_than_plain,
    plain_logprobs,
    wrong_logprobs,
)
from benchmarks.products import fastest, of_model
from benchmarks.sides.rollout import Workload, in_batches, sampling, short_work, workload
from benchmarks.timing import DTYPES, Side
from benchmarks.worker import Worker, WorkerError, WorkerShape, asking

NO_GRAPHS = "fastrl, no graphs"
GENERATE, STATIC, CONTINUOUS = "generate", "generate, compiled", "continuous batching"
VLLM = "vllm"
# Of a peer's log-probs, in fp32: enough to know that it runs the same model.
PEERS_EXACT = 1e-3
AUDITED = 4  # samples whose log-probs are compared with a plain forward's


@dataclasses.dataclass(frozen=True)
class RolloutJob(WorkerShape):
    """Prompts with a length for each response, and the slots they share.

    Lengths of responses are log-normal (σ of the logarithm, median, at most), or all `median` where
    σ is 0. Lengths of prompts are uniform.
    """

    model: Model
    prompts: int
    slots: int
    prompt: tuple[int, int]  # tokens, from and to
    median: int
    most: int
    sigma: float = 0.0
    all_peers: bool = True  # or `generate` alone
    group: int = 1  # responses to each prompt, all of one length

    @property
    def what(self) -> str:
        """The work in words."""
        low, high = self.prompt
        prompt = f"{low}" if low == high else f"{low} to {high}"
        spread = f"log-normal (σ {self.sigma:g}, median {self.median}, at most {self.most})"
        each = f"{self.group} to each, " if self.group > 1 else ""
        return (
            f"{self.prompts} prompts of {prompt} tokens on {self.slots} slots, responses {each}"
            f"{spread if self.sigma else self.median}; sampling at temperature 1"
        )


# Goals that are None: not a main case.
_H = ("nvidia h100", "nvidia h200")
_ON_CPU = (
    ("equal lengths", RolloutJob(LLAMA, 32, 32, (64, 64), 64, 64),
     (Goal("speedup", 0.8, against=VLLM), Goal("memory share", 0.4, against=VLLM))),
    ("log-normal", RolloutJob(SMALL, 16, 16, (4, 32), 40, 200, 1.0),
     (Goal("speedup", 1.5, against=GENERATE),)),
    ("refilled", RolloutJob(SMALL, 64, 16, (4, 32), 40, 200, 1.0), ()),
    ("equal lengths", RolloutJob(SMALL, 16, 16, (4, 32), 48, 48), None),
    *(
        (f"groups, prompts of {n}",
         RolloutJob(SMALL_QWEN35, 4, 16, (n, n), 32, 256, 0.8, all_peers=False, group=8),
         (Goal("speedup", more, against=GENERATE),))
        for n, more in ((256, 3.0), (32, 1.0))
    ),
)  # fmt: skip
_ON_CUDA = (
    ("alone", RolloutJob(GPT2, 1, 1, (16, 16), 256, 256),
     (Goal("seconds", 0.6e-3, _H, phase="decode step"),)),
    # The middle of a response is at a context of 512.
    ("wide", RolloutJob(QWEN, 256, 256, (448, 448), 128, 128), (Goal("roofline", 0.5, _H[:1]),)),
    ("log-normal", RolloutJob(GPT2, 256, 16, (4, 64), 128, 640, 1.0),
     (Goal("slots used", 0.95, ("nvidia", "amd")),)),
    *(
        (f"batch of {n}", RolloutJob(model, n, n, (448, 448), 128, 128, all_peers=False), None)
        for n in (1, 16, 64, 256) for model in (GPT2, QWEN, QWEN35)
        if (n, model) != (256, QWEN)  # that is the wide one
    ),
)  # fmt: skip
_TOY = (("toy", RolloutJob(TOY, 5, 2, (1, 4), 4, 6, 1.0), ()),)


def cases(run: Run) -> list[Case]:
    """The cases of a kind of device."""
    found = _TOY if run.toy else _ON_CUDA if run.device.type == "cuda" else _ON_CPU
    return [
        Case(
            "rollout",
            name,
            f"{job.model.name}, {job.model.dtype}",
            job.what,
            job,
            goals or (),
            main=goals is not None,
            seconds=1.0 if run.toy else 120.0,
        )
        for name, job, goals in found
        if goals is not None or run.full or run.device.type == "cuda"
    ]


def kv_bytes(job: RolloutJob, work: Workload) -> int:
    """Bytes of live tokens' keys and values, summed over all steps of all samples.

    Before its t-th token, t = 0, 1, …, a sample with a prompt of p tokens reads those of p + t; and
    it reads and writes the states, in fp32, of layers that keep them instead.
    """
    model = job.model
    itemsize = DTYPES[model.dtype].itemsize
    per_token = 2 * model.attending * model.kv_heads * model.head * itemsize
    state = 2 * model.heads * (model.head // 2) ** 2 * 4
    states = 2 * (model.layers - model.attending) * state * sum(work.limits)
    tokens = sum(
        n * len(prompt) + n * (n - 1) // 2
        for prompt, n in zip(work.prompts, work.limits, strict=True)
    )
    return per_token * tokens + states


def weight_bytes(model: Any) -> int:
    """Bytes of all weights that a step reads whole; of embeddings it reads some rows only."""
    head = model.get_output_embeddings()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables -= {id(head.weight)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to generate: the library that runs it, its name in `sides/rollout.py`, and the
    interpreter that has it."""

    library: str
    generator: str
    python: Callable[[], Path] = lambda: Path(sys.executable)


def vllms_python() -> Path:
    """An interpreter that has vLLM: its build for CPUs where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    return environments.peer_python(environments.VLLM if on_gpu else environments.VLLM_CPU)


WAYS = {
    OURS: Way("fastrl", "engine"),
    NO_GRAPHS: Way("fastrl", "engine without graphs"),
    GENERATE: Way("transformers", "generate"),
    STATIC: Way("transformers", "generate, compiled"),
    CONTINUOUS: Way("transformers", "continuous batching"),
    VLLM: Way("vllm", "vllm", vllms_python),
}


def ways(run: Run, job: RolloutJob) -> list[str]:
    """The sides of a job: fastrl's, and the peers."""
    found = [OURS, *([NO_GRAPHS] if run.device.type == "cuda" else [])]
    if not run.peers:
        return found
    peers = [VLLM, GENERATE, STATIC, CONTINUOUS] if job.all_peers else [GENERATE]
    return [*found, *(name for name in peers if name != VLLM or not run.toy)]


def greedy_tokens(model: Any, work: Workload) -> list[Tensor]:
    """What `model.generate` gives for each prompt alone, without padding."""
    return in_batches(model, 1, work, sampling(greedy=True))


def differing(
    model: Any, work: Workload, found: list[list[int]], expected: list[Tensor]
) -> str | None:
    """Which sequence differs, None where none does but after a tie: which of two tokens is more
    likely is a matter of rounding where their logits are equal."""
    for i, (tokens, theirs) in enumerate(zip(found, expected, strict=True)):
        ours = torch.tensor(tokens)
        if not (torch.equal(ours, theirs) or _parts_at_a_tie(model, work.prompts[i], ours, theirs)):
            return f"greedy tokens of prompt {i} are {ours.tolist()}, generate's {theirs.tolist()}"
    return None


@torch.no_grad()
def _parts_at_a_tie(model: Any, prompt: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether the first tokens that differ are both the most likely, as far as fp32 can tell."""
    if len(ours) != len(theirs):
        return False
    first = int((ours != theirs).nonzero()[0])
    read = torch.cat([prompt, theirs[:first]]).to(model.device)
    logits = model(read.unsqueeze(0)).logits[0, -1].float()
    both = logits[torch.stack([ours[first], theirs[first]]).to(model.device)]
    return bool(logits.max() - both.min() <= 2 * EXACT)


def wrong_lengths(sequences: list[list[int]], work: Workload) -> str | None:
    """Whether fewer or more tokens were generated than asked for."""
    for i, (sequence, limit) in enumerate(zip(sequences, work.limits, strict=True)):
        if len(sequence) != limit:
            return f"sample {i} has {len(sequence)} tokens, {limit} were asked for"
    return None


def audit(
    model: Any, truth: Any, dtype: str, work: Workload, found: dict[str, Any], exact: float = EXACT
) -> tuple[dict[str, float], str | None]:
    """The mean and the largest |Δ| between log-probs at T = 1 of some samples and those of a plain
    forward in the model's dtype, and why that, or their |Δ| to those of fp32, fails the gate.

    Args:
        truth: the model in fp32.
    """
    last = len(work.prompts) - 1
    picked = sorted({round(i * last / (AUDITED - 1)) for i in range(AUDITED)})
    sequences = [torch.tensor(found["sequences"][i]) for i in picked]
    expected = [
        plain_logprobs(model, work.prompts[i], x) for i, x in zip(picked, sequences, strict=True)
    ]
    ours = [logprob for i in picked for logprob in found["logprobs"][i]]
    both = torch.tensor(ours), torch.cat(expected)
    delta = (both[0] - both[1]).abs()
    facts = {
        "mean |Δ log-prob|": float(delta.mean()),
        "largest |Δ log-prob|": float(delta.max()),
    }
    if truth is model:
        return facts, wrong_logprobs(*both, dtype, exact)
    pairs = zip(picked, sequences, strict=True)
    of_truth = torch.cat([plain_logprobs(truth, work.prompts[i], x) for i, x in pairs])
    return facts, less_exact_than_plain(*both, of_truth)


class Wrong(Exception):
    """A side generates something else than was asked for, or than its model says."""


class Gate(NamedTuple):
    """What a side has to generate before it is timed: a model, its work and greedy tokens.

    Args:
        model: as it is timed.
        exact: the same in fp32: in less, the most likely token is a matter of rounding.
        folders: of both.
        short: a few prompts.
        expected: the greedy tokens after them.
    """

    model: Any
    exact: Any
    folders: tuple[str, str]
    work: Workload
    short: Workload
    expected: list[Tensor]

    @classmethod
    def of(cls, job: RolloutJob, device: torch.device, folder: Path) -> Gate:
        """The gate of a job; its models are written below the folder."""
        model = build(job.model, device)
        exact = model if job.model.dtype == "fp32" else copy.deepcopy(model).float()
        folders = str(folder / "model"), str(folder / ("model" if exact is model else "exact"))
        for one, place in ((model, folders[0]), (exact, folders[1])):
            one.save_pretrained(place)
        short = short_work(job.model.vocabulary)
        expected = greedy_tokens(exact, short)
        return cls(model, exact, folders, workload(job.shape), short, expected)


def start(name: str, job: RolloutJob, folder: str, device: torch.device) -> Worker:
    """A side's process, which begins to load the model."""
    way = WAYS[name]
    options = {"folder": folder, "generator": way.generator}
    return Worker(way.python(), way.library, "rollout", job.shape, device.type, **options)


def side_of(stack: contextlib.ExitStack, name: str, job: RolloutJob, gate: Gate, run: Run) -> Side:
    """A side that has passed the gate; its process lives as long as the stack.

    Raises:
        Wrong: it has not.
    """
    if gate.exact is not gate.model:
        fp32 = dataclasses.replace(job, model=dataclasses.replace(job.model, dtype="fp32"))
        with start(name, fp32, gate.folders[1], run.device) as worker:
            worker.ready()
            found = worker.ask("greedy")["sequences"]
    began = time.perf_counter()
    worker = stack.enter_context(start(name, job, gate.folders[0], run.device))
    versions = worker.ready()
    facts = {"start-up [s]": time.perf_counter() - began}
    if gate.exact is gate.model:
        found = worker.ask("greedy")["sequences"]
    wrong = differing(gate.exact, gate.short, found, gate.expected)
    made = worker.ask("check")
    wrong = wrong or wrong_lengths(made["sequences"], gate.work)
    if not wrong and made["logprobs"]:
        allowed = EXACT if WAYS[name].library == "fastrl" else PEERS_EXACT
        off, wrong = audit(gate.model, gate.exact, job.model.dtype, gate.work, made, allowed)
        facts |= off
    if wrong:
        raise Wrong(wrong)
    run.result("rollout")["versions"][name] = versions
    side = asking(worker)
    side.note, side.facts = made["note"], facts | worker.ask("facts")
    return side


def test_rollout(measurement: Measurement, case: Case) -> None:
    measure(measurement, case.of)


def measure(measurement: Measurement, job: RolloutJob) -> None:
    """Gate, an uncounted rollout of each side, then turns."""
    run, entry = measurement.run, measurement.entry
    entry["shape"] = job.shape
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gate = Gate.of(job, run.device, folder)
        entry["units"] = ["tokens", sum(gate.work.limits)]
        sides = {}
        for name in ways(run, job):
            try:
                sides[name] = side_of(stack, name, job, gate, run)
            except Exception as error:  # other libraries fail in any way
                if WAYS[name].library != "fastrl":
                    measurement.absent(name, why_absent(error))
                elif isinstance(error, Wrong):
                    measurement.refuse(f"{name}: {error}")
                else:
                    raise
        measurement.measure(sides, 7, _limit(measurement, sides[OURS], job, gate))


def why_absent(error: Exception) -> str:
    """Why a side that raised this is absent, in a line; of a process that ended, its last words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if isinstance(error, WorkerError) else 0][:300]


def _limit(measurement: Measurement, ours: Side, job: RolloutJob, gate: Gate) -> Side:
    """The least that decode steps need: a copy of the bytes that they must read (all weights, live
    keys and values) or, on a CPU, where that takes longer, their matrix products, each by the
    fastest library."""
    device = measurement.run.device
    live, weights = kv_bytes(job, gate.work), weight_bytes(gate.model)
    steps = ours.facts["decode steps"]
    ours.facts |= {"weight bytes": weights, "live bytes per step": live / steps}
    nbytes = weights * steps + live
    if device.type == "cuda":
        return Side(lambda: {"copy": nbytes / timing.copy_speed(device)}, limited="decode")
    products = of_model(job.model, job.slots)
    step, measurement.entry["roofs"] = fastest(products, job.model.dtype, device)

    one_step = timing.timed(step, device)

    def turn() -> timing.Seconds:
        computed = one_step.turn()["call"] * steps * ours.facts["slots used"]
        return {"least": max(nbytes / timing.copy_speed(device), computed)}

    return Side(turn, limited="decode")
