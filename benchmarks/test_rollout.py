"""Generation: useful tokens per second of the engine and of transformers' own ways.

A gate comes first: greedy tokens equal to `model.generate`'s, log-probs equal to a plain forward's.
Useful are the tokens within each sample's limit, whatever a side makes beyond them. No sample ends
by itself, so that every side makes the same tokens: a length is a limit, and there is no
end-of-sequence token.
"""

from __future__ import annotations

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

from benchmarks import harness, worker
from benchmarks.harness import DTYPES, OURS, Case, Goal, Measurement, Run, Seconds, Side, described
from benchmarks.peers import Unsuitable
from benchmarks.worker import Model
from fastrl import RolloutEngine, RolloutOutput, SamplingParams

NO_GRAPHS = "fastrl, no graphs"
GENERATE, STATIC, CONTINUOUS = "generate", "generate, compiled", "continuous batching"
PAD = 0
PAGE = 256  # tokens, transformers' default


# --- cases ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
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


_H = ("nvidia h100", "nvidia h200")
_SMALL, _GPT2, _QWEN = worker.SMALL, worker.GPT2, worker.QWEN
_ON_CPU = (
    ("log-normal", Job(_SMALL, 16, 16, (4, 32), 40, 200, 1.0),
     (Goal("speedup", 1.5, against=GENERATE),)),
    ("refilled", Job(_SMALL, 64, 16, (4, 32), 40, 200, 1.0), ()),
    ("equal lengths", Job(_SMALL, 16, 16, (4, 32), 48, 48), None),
)  # fmt: skip
_ON_CUDA = (
    ("alone", Job(_GPT2, 1, 1, (16, 16), 256, 256),
     (Goal("seconds", 0.6e-3, _H, phase="decode step"),)),
    # The middle of a response is at a context of 512.
    ("wide", Job(_QWEN, 256, 256, (448, 448), 128, 128), (Goal("roofline", 0.5, _H[:1]),)),
    ("log-normal", Job(_GPT2, 256, 16, (4, 64), 128, 640, 1.0),
     (Goal("slots used", 0.95, ("nvidia", "amd")),)),
    *(
        (f"batch of {n}", Job(model, n, n, (448, 448), 128, 128, all_peers=False), None)
        for n in (1, 16, 64, 256) for model in (_GPT2, _QWEN)
        if (n, model) != (256, _QWEN)  # that is the wide one
    ),
)  # fmt: skip
_TOY = (("toy", Job(worker.TOY, 5, 2, (1, 4), 4, 6, 1.0), ()),)


def cases(run: Run) -> list[Case]:
    """Those of a kind of device; goals that are None: a case that is not a main one."""
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


def workload(job: Job) -> Workload:
    """The job's prompts and lengths: the same every time."""
    rng = np.random.RandomState(0)
    low, high = job.prompt
    prompts = [
        torch.from_numpy(rng.randint(0, job.model.vocabulary, rng.randint(low, high + 1)))
        for _ in range(job.prompts)
    ]
    lengths = rng.lognormal(math.log(job.median), job.sigma, job.prompts)
    return Workload(prompts, np.clip(np.rint(lengths), 1, job.most).astype(int).tolist())


def build(model: Model, device: torch.device) -> Any:
    """The model, with random weights, without dropout and without an end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(worker.config_of(vars(model), end=None))
    return made.to(DTYPES[model.dtype]).eval()


def kv_bytes(job: Job, work: Workload) -> int:
    """Of keys and values that live tokens have, summed over all steps of all samples.

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
    """Of all weights that a step reads whole: of a table that is looked up it reads some rows."""
    head = model.get_output_embeddings()
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables -= {id(head.weight)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


# --- sides ---------------------------------------------------------------------------------------

Generate = Callable[[Workload], list[Tensor]]  # tokens in its order, without the prompts


class Engine:
    """The engine; keeps what it said last."""

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
        decode = stats["time/rollout/decode"]
        steps = max(stats["perf/decode_steps"], 1)
        return {
            "prefill": stats["time/rollout/prefill"],
            "decode": decode,
            "decode step": decode / steps,
        }


def dynamic(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """`model.generate`, as many prompts at a time as there are slots."""
    note = f"batches of {slots}, left-padded, each run to its longest limit"
    return lambda work: _in_batches(model, slots, work, _how(greedy)), note


def compiled(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """The same with a static cache, for which `generate` compiles the model."""
    if model.device.type != "cuda":
        raise Unsuitable("generate compiles for static caches on accelerators alone")
    options = {**_how(greedy), "cache_implementation": "static"}
    # The largest batch first: its cache's length is kept, and a longer one would compile anew.
    parts = [Workload(*(x[i : i + slots] for x in work)) for i in range(0, len(work.limits), slots)]
    largest = max(parts, key=lambda part: max(map(len, part.prompts)) + max(part.limits))
    _in_batches(model, slots, largest, options)
    note = "static cache and torch.compile; batches as above"
    return lambda work: _in_batches(model, slots, work, options), note


def continuous(model: Any, slots: int, work: Workload, *, greedy: bool) -> tuple[Generate, str]:
    """transformers' continuous batching, by a manager that lives as long as the side."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    # Of its own, for a manager may change a model's attention; and weights are never updated here.
    model = copy.deepcopy(model)
    generation = GenerationConfig(
        **_how(greedy), eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(work.limits)
    )
    longest = max(len(p) + n for p, n in zip(work.prompts, work.limits, strict=True))
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=(slots + 1) * (-(-longest // PAGE) + 1),
        max_batch_tokens=min(8192, max(256, slots * max(map(len, work.prompts)))),
        max_requests_per_batch=slots,
        allow_block_sharing=False,  # or no round but the first would run the prompts
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


def _how(greedy: bool) -> dict[str, Any]:
    if greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _in_batches(model: Any, slots: int, work: Workload, options: dict[str, Any]) -> list[Tensor]:
    sequences = []
    for first in range(0, len(work.prompts), slots):
        prompts, limits = (x[first : first + slots] for x in work)
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


# --- the gate ------------------------------------------------------------------------------------

AUDITED = 4  # samples
# Of |Δ log-prob|: the largest in fp32, the mean in less, where a single logit may be off by more.
EXACT, ROUNDED = 1e-5, 5e-3


class Audit(NamedTuple):
    """|Δ| between the engine's log-probs at T = 1 and a plain forward's, over some samples."""

    mean: float
    largest: float
    tokens: int
    wrong: str | None


def short_work(vocabulary: int) -> Workload:
    """A few short prompts, of ragged length."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=drawn) for length in (1, 5, 3)]
    return Workload(prompts, [8] * len(prompts))


def in_fp32(model: Any) -> Any:
    """The model, or a copy of it in fp32: in less, the likeliest token is a matter of rounding."""
    return model if model.dtype == torch.float32 else copy.deepcopy(model).float()


def greedy_tokens(model: Any, work: Workload) -> list[Tensor]:
    """What `model.generate` gives for each prompt alone, without padding."""
    parts = [Workload([p], [n]) for p, n in zip(work.prompts, work.limits, strict=True)]
    return [_in_batches(model, 1, part, _how(greedy=True))[0] for part in parts]


def differing(
    model: Any, work: Workload, found: list[Tensor], expected: list[Tensor]
) -> str | None:
    """Which sequence is not as it should be; None where all are, but for what follows a tie: which
    of two tokens is the likelier is a matter of rounding where their logits are."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not (torch.equal(ours, theirs) or _parts_at_a_tie(model, work.prompts[i], ours, theirs)):
            return f"greedy tokens of prompt {i} are {ours.tolist()}, generate's {theirs.tolist()}"
    return None


@torch.no_grad()
def _parts_at_a_tie(model: Any, prompt: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether the first tokens that differ are both the likeliest, as far as fp32 can tell."""
    if len(ours) != len(theirs):
        return False
    first = int((ours != theirs).nonzero()[0])
    read = torch.cat([prompt, theirs[:first]]).to(model.device)
    logits = model(read.unsqueeze(0)).logits[0, -1].float()
    both = logits[torch.stack([ours[first], theirs[first]]).to(model.device)]
    return bool(logits.max() - both.min() <= 2 * EXACT)


def wrong_lengths(sequences: list[Tensor], work: Workload) -> str | None:
    """Whether less or more was made than was asked for."""
    for i, (sequence, limit) in enumerate(zip(sequences, work.limits, strict=True)):
        if len(sequence) != limit:
            return f"sample {i} has {len(sequence)} tokens, {limit} were asked for"
    return None


@torch.no_grad()
def audit(model: Any, work: Workload, output: RolloutOutput) -> Audit:
    """Of samples from first to last, each in a forward of its own, in the model's dtype."""
    last = len(work.prompts) - 1
    picked = sorted({round(i * last / (AUDITED - 1)) for i in range(AUDITED)})
    assert output.logprobs_t1 is not None
    deltas = []
    for i in picked:
        prompt, sequence = work.prompts[i], output.sequences[i]
        tokens = torch.cat([prompt, sequence]).to(model.device)
        logits = model(tokens.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, tokens[len(prompt) :, None])
        deltas.append((expected.squeeze(1).cpu() - output.logprobs_t1[i]).abs())
    delta = torch.cat(deltas)
    mean, largest = float(delta.mean()), float(delta.max())
    exact = model.dtype == torch.float32
    name, error, allowed = ("largest", largest, EXACT) if exact else ("mean", mean, ROUNDED)
    wrong = None
    if not error <= allowed:  # NaN is wrong
        wrong = f"log-probs are off by {error:.2g} ({name} |Δ|), {allowed:g} is allowed"
    return Audit(mean, largest, len(delta), wrong)


# --- the measurement -----------------------------------------------------------------------------


def test_rollout(measurement: Measurement, case: Case, run: Run) -> None:
    packages = ("torch", "triton", "transformers", "flash-attn")
    run.result("rollout")["versions"] = harness.versions(*packages)
    measure(measurement, case.of)


def measure(measurement: Measurement, job: Job) -> None:
    """Gate, a first rollout of each side and what it shows, then turns."""
    device, peers = measurement.run.device, measurement.run.peers
    work, model = workload(job), build(job.model, device)
    measurement.entry["units"] = ["tokens", sum(work.limits)]
    _gate_tokens(measurement, model, peers and job.all_peers)
    generators: dict[str, tuple[Generate, str]] = {}
    try:
        note = "also log-probs and entropies"
        generators[OURS] = Engine(model, job.slots), note
        if device.type == "cuda":
            generators[NO_GRAPHS] = Engine(model, job.slots, graphs=False), note
        names = () if not peers else tuple(PEERS) if job.all_peers else (GENERATE,)
        for name in names:
            if name not in measurement.entry["absent"]:
                _make(measurement, generators, name, model, job.slots, work)
        sides = {}
        for name, (call, note) in generators.items():
            if side := _first(measurement, name, call, model, work):
                side.note = note
                sides[name] = side
        measurement.measure(sides, 7, _limit(sides[OURS], job, work, model))
        _say_graphs(measurement, generators)
    finally:
        for call, _ in generators.values():
            getattr(call, "close", lambda: None)()


def _gate_tokens(measurement: Measurement, model: Any, peers: bool) -> None:
    """Greedy tokens: the engine's, whose difference is red, and those of a peer that schedules by
    itself, which is then absent."""
    exact = in_fp32(model)
    short = short_work(model.config.vocab_size)
    expected = greedy_tokens(exact, short)
    found = Engine(exact, slots=2, greedy=True)(short)
    if wrong := differing(exact, short, found, expected):
        measurement.refuse(wrong)
    if not peers:
        return
    try:
        call, _ = continuous(exact, 2, short, greedy=True)
    except Exception:  # it will be said where the side is made for the case
        return
    try:
        wrong = differing(exact, short, call(short), expected)
    except Exception as error:  # whatever it is, it is the peer's affair
        wrong = described(error)
    finally:
        call.close()
    if wrong:
        measurement.absent(CONTINUOUS, wrong)


def _make(
    measurement: Measurement,
    generators: dict[str, tuple[Generate, str]],
    name: str,
    model: Any,
    slots: int,
    work: Workload,
) -> None:
    try:
        generators[name] = PEERS[name](model, slots, work, greedy=False)
    except Unsuitable as reason:
        measurement.absent(name, str(reason))
    except ImportError as error:
        measurement.absent(name, f"not in this version of transformers ({error})")
    except Exception as error:  # whatever it is, it is the peer's affair
        measurement.absent(name, described(error))


def _first(
    measurement: Measurement, name: str, call: Generate, model: Any, work: Workload
) -> Side | None:
    """A side, after an uncounted rollout: log-probs that are off are red, a peer that fails is
    absent."""
    device = measurement.run.device

    def turn() -> Seconds:
        begin = harness.now(device)
        call(work)
        seconds = {"rollout": harness.now(device) - begin}
        return seconds | (call.seconds() if isinstance(call, Engine) else {})

    if not isinstance(call, Engine):
        try:
            wrong = wrong_lengths(call(work), work)
        except Exception as error:
            wrong = described(error)
        if wrong:
            measurement.absent(name, wrong)
            return None
        return Side(turn)
    wrong = wrong_lengths(call(work), work)
    audited = audit(model, work, call.output)
    if wrong or audited.wrong:
        measurement.refuse(f"{name}: {wrong or audited.wrong}")
    stats = call.output.stats
    facts = {
        "decode steps": stats["perf/decode_steps"],
        "slots used": stats["perf/slot_utilisation"],
        "mean |Δ log-prob|": audited.mean,
        "largest |Δ log-prob|": audited.largest,
    }
    return Side(turn, facts=facts)


def _limit(ours: Side, job: Job, work: Workload, model: Any) -> Side:
    """A copy of what decode steps cannot but read: all weights in each, live keys and values."""
    live, weights = kv_bytes(job, work), weight_bytes(model)
    steps = ours.facts["decode steps"]
    ours.facts |= {"weight bytes": weights, "live bytes per step": live / steps}
    nbytes = weights * steps + live
    return Side(lambda: {"copy": nbytes / harness.copy_speed(model.device)}, limited="decode")


def _say_graphs(measurement: Measurement, generators: dict[str, tuple[Generate, str]]) -> None:
    """What the last rollout says of CUDA graphs."""
    stats = generators[OURS][0].output.stats
    prefix = "perf/graph_"
    found = {k.removeprefix(prefix): v for k, v in stats.items() if k.startswith(prefix)}
    measurement.entry["sides"][OURS]["facts"] |= {f"graph {k}": v for k, v in found.items()}
