"""Who generates in `python -m benchmarks rollout`: the engine, and transformers' own ways.

Each samples at temperature 1 from the whole softmax, or takes the likeliest token. A peer that
cannot take part is listed with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from benchmarks.before.peers import Unsuitable, described
from benchmarks.before.rollout_cases import Workload
from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import RolloutOutput

OURS, EAGER = "fastrl", "fastrl, no graphs"
GENERATE, STATIC, CONTINUOUS = "generate", "generate, compiled", "continuous batching"
PAD = 0
PAGE = 256  # tokens, transformers' default


@dataclasses.dataclass
class Side:
    """Generates the responses of a workload: their tokens, in its order, without the prompts."""

    call: Callable[[Workload], list[Tensor]]
    note: str = ""
    close: Callable[[], None] = lambda: None


class Engine:
    """The engine as a side; keeps what it said last."""

    def __init__(self, model: Any, slots: int, *, graphs: bool = True, greedy: bool = False):
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


def engines(model: Any, slots: int) -> dict[str, Side]:
    """The engine; where it captures graphs, also without them."""
    note = "also log-probs and entropies"
    found = {OURS: Side(Engine(model, slots), note)}
    if model.device.type == "cuda":
        found[EAGER] = Side(Engine(model, slots, graphs=False), note)
    return found


def peers(
    model: Any, slots: int, work: Workload, names: Collection[str] | None = None
) -> tuple[dict[str, Side], dict[str, str]]:
    """The peers of these names, or all, that can take part; for the others why they cannot."""
    found, absent = {}, {}
    for name in names or _PEERS:
        make = _PEERS[name]
        try:
            found[name] = make(model, slots, work, greedy=False)
        except Unsuitable as reason:
            absent[name] = str(reason)
        except ImportError as error:
            absent[name] = f"not in this version of transformers ({error})"
        except Exception as error:  # whatever it is, it is the peer's affair
            absent[name] = described(error)
    return found, absent


def dynamic(model: Any, slots: int, work: Workload, *, greedy: bool) -> Side:
    """`model.generate`, as many prompts at a time as there are slots."""
    return Side(
        lambda work: _in_batches(model, slots, work, _how(greedy)),
        f"batches of {slots}, left-padded, each run to its longest limit",
    )


def compiled(model: Any, slots: int, work: Workload, *, greedy: bool) -> Side:
    """The same with a static cache, for which `generate` compiles the model."""
    if model.device.type != "cuda":
        raise Unsuitable("generate compiles for static caches on accelerators alone")
    options = {**_how(greedy), "cache_implementation": "static"}
    # The largest batch first: its cache's length is kept, and a longer one would compile anew.
    parts = [Workload(*(x[i : i + slots] for x in work)) for i in range(0, len(work.limits), slots)]
    largest = max(parts, key=lambda part: max(map(len, part.prompts)) + max(part.limits))
    _in_batches(model, slots, largest, options)
    return Side(
        lambda work: _in_batches(model, slots, work, options),
        "static cache and torch.compile; batches as above",
    )


def continuous(model: Any, slots: int, work: Workload, *, greedy: bool) -> Side:
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

    note = f"{slots} requests at a time, {model.config._attn_implementation}"
    return Side(call, note, lambda: manager.stop(timeout=10, hard_stop=True))


_PEERS = {GENERATE: dynamic, STATIC: compiled, CONTINUOUS: continuous}


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
