"""Generation: useful tokens per second of the engine and of transformers' own ways.

A gate comes first: greedy tokens equal to `model.generate`'s, log-probs equal to a plain forward's.
Useful are the tokens within each sample's limit, whatever a side generates beyond them. There is no
end-of-sequence token: each sample has a length, and every side generates the same number of tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import results, timing
from benchmarks.cases import OURS, Case, Goal
from benchmarks.harness import Measurement, Run
from benchmarks.models import (
    EXACT,
    GPT2,
    PAD,
    QWEN,
    SMALL,
    TOY,
    Model,
    build,
    plain_logprobs,
    wrong_logprobs,
)
from benchmarks.peers import Unsuitable, why_absent
from benchmarks.timing import DTYPES, Seconds, Side
from fastrl import RolloutEngine, RolloutOutput, SamplingParams

NO_GRAPHS = "fastrl, no graphs"
GENERATE, STATIC, CONTINUOUS = "generate", "generate, compiled", "continuous batching"
PAGE = 256  # tokens, transformers' default
AUDITED = 4  # samples whose log-probs are compared with a plain forward's


@dataclasses.dataclass(frozen=True)
class RolloutJob:
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

    @property
    def what(self) -> str:
        """The work in words."""
        low, high = self.prompt
        prompt = f"{low}" if low == high else f"{low} to {high}"
        spread = f"log-normal (σ {self.sigma:g}, median {self.median}, at most {self.most})"
        return (
            f"{self.prompts} prompts of {prompt} tokens on {self.slots} slots, responses "
            f"{spread if self.sigma else self.median}; sampling at temperature 1"
        )


class Workload(NamedTuple):
    """Prompts, on the host, and how many tokens are wanted after each."""

    prompts: list[Tensor]
    limits: list[int]

    def part(self, first: int, count: int) -> Workload:
        """Some of the samples."""
        return Workload(*(x[first : first + count] for x in self))


# Goals that are None: not a main case.
_H = ("nvidia h100", "nvidia h200")
_ON_CPU = (
    ("log-normal", RolloutJob(SMALL, 16, 16, (4, 32), 40, 200, 1.0),
     (Goal("speedup", 1.5, against=GENERATE),)),
    ("refilled", RolloutJob(SMALL, 64, 16, (4, 32), 40, 200, 1.0), ()),
    ("equal lengths", RolloutJob(SMALL, 16, 16, (4, 32), 48, 48), None),
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
        for n in (1, 16, 64, 256) for model in (GPT2, QWEN)
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
            seconds=1.0 if run.toy else 60.0,
        )
        for name, job, goals in found
        if goals is not None or run.full or run.device.type == "cuda"
    ]


def workload(job: RolloutJob) -> Workload:
    """The job's prompts and lengths: the same every time."""
    rng = np.random.RandomState(0)
    low, high = job.prompt
    prompts = [
        torch.from_numpy(rng.randint(0, job.model.vocabulary, rng.randint(low, high + 1)))
        for _ in range(job.prompts)
    ]
    lengths = rng.lognormal(math.log(job.median), job.sigma, job.prompts)
    return Workload(prompts, np.clip(np.rint(lengths), 1, job.most).astype(int).tolist())


def kv_bytes(job: RolloutJob, work: Workload) -> int:
    """Bytes of live tokens' keys and values, summed over all steps of all samples.

    Before its t-th token, t = 0, 1, …, a sample with a prompt of p tokens reads those of p + t.
    """
    model = job.model
    itemsize = DTYPES[model.dtype].itemsize
    per_token = 2 * model.layers * model.kv_heads * (model.width // model.heads) * itemsize
    tokens = sum(
        n * len(prompt) + n * (n - 1) // 2
        for prompt, n in zip(work.prompts, work.limits, strict=True)
    )
    return per_token * tokens


def weight_bytes(model: Any) -> int:
    """Bytes of all weights that a step reads whole; of embeddings it reads some rows only."""
    head = model.get_output_embeddings()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables -= {id(head.weight)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


Generate = Callable[[Workload], list[Tensor]]  # tokens in its order, without the prompts


class Engine:
    """fastrl's engine, with its last output."""

    def __init__(
        self, model: Any, slots: int, *, graphs: bool = True, greedy: bool = False
    ) -> None:
        no_end = types.SimpleNamespace(eos_token_id=None)
        self.engine = RolloutEngine(model, no_end, max_slots=slots, cuda_graphs=graphs)
        self.temperature = 0.0 if greedy else 1.0
        self.output: RolloutOutput

    def __call__(self, work: Workload) -> list[Tensor]:
        params = SamplingParams(
            max_new_tokens=work.limits, temperature=self.temperature, seed=0, eos_token_ids=()
        )
        self.output = self.engine.generate(work.prompts, params)
        return self.output.sequences

    def seconds(self) -> Seconds:
        """Of the phases of the last rollout, and of one of its decode steps."""
        stats = self.output.stats
        decode, steps = stats["time/rollout/decode"], max(stats["perf/decode_steps"], 1)
        found = {"prefill": stats["time/rollout/prefill"], "decode": decode}
        return found | {"decode step": decode / steps}


def dynamic(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """`model.generate`, as many prompts at a time as there are slots."""
    note = f"batches of {slots}, left-padded, each run to its longest limit"
    return lambda work: _in_batches(model, slots, work, _sampling(greedy)), note


def compiled(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """The same with a static cache, for which `generate` compiles the model."""
    if model.device.type != "cuda":
        raise Unsuitable("generate compiles for static caches on accelerators alone")
    options = {**_sampling(greedy), "cache_implementation": "static"}
    # The largest batch first: its cache's length is kept, and a longer one would compile anew.
    parts = [work.part(i, slots) for i in range(0, len(work.limits), slots)]
    largest = max(parts, key=lambda part: max(map(len, part.prompts)) + max(part.limits))
    _in_batches(model, slots, largest, options)
    note = "static cache and torch.compile; batches as above"
    return lambda work: _in_batches(model, slots, work, options), note


def continuous(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """transformers' continuous batching, by one manager."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = copy.deepcopy(model)  # a manager may change a model's attention
    generation = GenerationConfig(
        **_sampling(greedy), eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(work.limits)
    )
    longest = max(len(p) + n for p, n in zip(work.prompts, work.limits, strict=True))
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=(slots + 1) * (-(-longest // PAGE) + 1),
        max_batch_tokens=min(8192, max(256, slots * max(map(len, work.prompts)))),
        max_requests_per_batch=slots,
        allow_block_sharing=False,  # or only the first round would run the prompts
        auto_switch_to_flash=importlib.util.find_spec("flash_attn") is not None,
    )
    manager = model.init_continuous_batching(generation, config)
    manager.warmup()
    manager.start()

    def call(work: Workload) -> list[Tensor]:
        asked = [
            manager.add_request(prompt.tolist(), max_new_tokens=n)
            for prompt, n in zip(work.prompts, work.limits, strict=True)
        ]
        done: dict[str, Tensor] = {}
        while len(done) < len(asked):
            answer = manager.get_result(timeout=1)
            if answer is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread has ended")
            elif answer.error is not None:
                raise RuntimeError(answer.error)
            elif answer.is_finished():
                done[answer.request_id] = torch.tensor(answer.generated_tokens)
        return [done[name] for name in asked]

    call.close = lambda: manager.stop(timeout=10, hard_stop=True)
    return call, f"{slots} requests at a time, {model.config._attn_implementation}"


PEERS = {GENERATE: dynamic, STATIC: compiled, CONTINUOUS: continuous}


def _sampling(greedy: bool) -> dict[str, Any]:
    if greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _in_batches(model: Any, slots: int, work: Workload, options: dict[str, Any]) -> list[Tensor]:
    sequences = []
    for first in range(0, len(work.prompts), slots):
        prompts, limits = work.part(first, slots)
        width = max(map(len, prompts))
        tokens = torch.full((len(prompts), width), PAD)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        made = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(limits),
            pad_token_id=PAD,
            **options,
        ).cpu()
        sequences += [row[width : width + n] for row, n in zip(made, limits, strict=True)]
    return sequences


def short_work(vocabulary: int) -> Workload:
    """A few short prompts, of ragged length."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=drawn) for length in (1, 5, 3)]
    return Workload(prompts, [8] * len(prompts))


def greedy_tokens(model: Any, work: Workload) -> list[Tensor]:
    """What `model.generate` gives for each prompt alone, without padding."""
    return _in_batches(model, 1, work, _sampling(greedy=True))


def differing(
    model: Any, work: Workload, found: list[Tensor], expected: list[Tensor]
) -> str | None:
    """Which sequence differs, None where none does but after a tie: which of two tokens is more
    likely is a matter of rounding where their logits are equal."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
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


def wrong_lengths(sequences: list[Tensor], work: Workload) -> str | None:
    """Whether fewer or more tokens were generated than asked for."""
    for i, (sequence, limit) in enumerate(zip(sequences, work.limits, strict=True)):
        if len(sequence) != limit:
            return f"sample {i} has {len(sequence)} tokens, {limit} were asked for"
    return None


def audit(
    model: Any, dtype: str, work: Workload, output: RolloutOutput
) -> tuple[float, float, str | None]:
    """The mean and the largest |Δ| between log-probs at T = 1 of some samples and those of a plain
    forward in the model's dtype, and why that fails the gate."""
    last = len(work.prompts) - 1
    picked = sorted({round(i * last / (AUDITED - 1)) for i in range(AUDITED)})
    assert output.logprobs_t1 is not None
    expected = [plain_logprobs(model, work.prompts[i], output.sequences[i]) for i in picked]
    both = torch.cat([output.logprobs_t1[i] for i in picked]), torch.cat(expected)
    delta = (both[0] - both[1]).abs()
    return float(delta.mean()), float(delta.max()), wrong_logprobs(*both, dtype)


def test_rollout(measurement: Measurement, case: Case, run: Run) -> None:
    packages = ("torch", "triton", "transformers", "flash-attn")
    run.result("rollout")["versions"] = results.versions(*packages)
    measure(measurement, case.of)


def measure(measurement: Measurement, job: RolloutJob) -> None:
    """Gate, an uncounted rollout of each side, then turns."""
    device, peers = measurement.run.device, measurement.run.peers
    work, model = workload(job), build(job.model, device)
    measurement.entry["units"] = ["tokens", sum(work.limits)]
    _gate_tokens(measurement, model, peers and job.all_peers)
    engines = {OURS: Engine(model, job.slots)}
    if device.type == "cuda":
        engines[NO_GRAPHS] = Engine(model, job.slots, graphs=False)
    sides = {name: _our_side(measurement, name, engines[name], model, work) for name in engines}
    names = () if not peers else tuple(PEERS) if job.all_peers else (GENERATE,)
    with contextlib.ExitStack() as stack:
        for name in names:
            if name not in measurement.entry["absent"]:
                try:
                    sides[name] = _peer_side(stack, name, model, job.slots, work)
                except Exception as error:  # other libraries fail in any way
                    measurement.absent(name, why_absent(error))
        measurement.measure(sides, 7, _limit(sides[OURS], job, work, model))
    # what the last rollout says of CUDA graphs
    stats, prefix = engines[OURS].output.stats, "perf/graph_"
    found = {k.removeprefix(prefix): v for k, v in stats.items() if k.startswith(prefix)}
    measurement.entry["sides"][OURS]["facts"] |= {f"graph {k}": v for k, v in found.items()}


def _gate_tokens(measurement: Measurement, model: Any, peers: bool) -> None:
    """Greedy tokens of a few short prompts. Where the engine's differ, the gate fails; a peer that
    schedules by itself is absent then."""
    # In less than fp32, the most likely token is a matter of rounding.
    exact = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    short = short_work(model.config.vocab_size)
    expected = greedy_tokens(exact, short)
    if wrong := differing(exact, short, Engine(exact, slots=2, greedy=True)(short), expected):
        measurement.refuse(wrong)
    if not peers:
        return
    with contextlib.ExitStack() as stack:
        try:
            call, _ = continuous(exact, 2, short, greedy=True)
            stack.callback(call.close)
            wrong = differing(exact, short, call(short), expected)
        except Exception as error:  # other libraries fail in any way
            wrong = why_absent(error)
    if wrong:
        measurement.absent(CONTINUOUS, wrong)


def _our_side(
    measurement: Measurement, name: str, engine: Engine, model: Any, work: Workload
) -> Side:
    """A side of the engine, after an uncounted rollout whose log-probs pass the gate."""
    wrong = wrong_lengths(engine(work), work)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
    mean, largest, off = audit(model, dtype, work, engine.output)
    if wrong := wrong or off:
        measurement.refuse(f"{name}: {wrong}")
    stats, device = engine.output.stats, measurement.run.device

    def turn() -> Seconds:
        return _seconds(engine, work, device) | engine.seconds()

    facts = {
        "decode steps": stats["perf/decode_steps"],
        "slots used": stats["perf/slot_utilisation"],
        "mean |Δ log-prob|": mean,
        "largest |Δ log-prob|": largest,
    }
    return Side(turn, "also log-probs and entropies", facts=facts)


def _peer_side(
    stack: contextlib.ExitStack, name: str, model: Any, slots: int, work: Workload
) -> Side:
    """A peer's side, after an uncounted rollout; it lives as long as the stack."""
    call, note = PEERS[name](model, slots, work, greedy=False)
    stack.callback(getattr(call, "close", lambda: None))
    if wrong := wrong_lengths(call(work), work):
        raise Unsuitable(wrong)
    return Side(lambda: _seconds(call, work, model.device), note)


def _seconds(call: Generate, work: Workload, device: torch.device) -> Seconds:
    begin = timing.now(device)
    call(work)
    return {"rollout": timing.now(device) - begin}


def _limit(ours: Side, job: RolloutJob, work: Workload, model: Any) -> Side:
    """A copy of the bytes that decode steps must read: all weights, live keys and values."""
    live, weights = kv_bytes(job, work), weight_bytes(model)
    steps = ours.facts["decode steps"]
    ours.facts |= {"weight bytes": weights, "live bytes per step": live / steps}
    nbytes = weights * steps + live
    return Side(lambda: {"copy": nbytes / timing.copy_speed(model.device)}, limited="decode")
