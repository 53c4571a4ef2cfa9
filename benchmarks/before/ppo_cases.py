"""What `python -m benchmarks ppo` measures: models and batches by kind of device, ways of keeping
the reference, and goals."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from benchmarks.before import rollout_cases

# What both sides do for each `--reference`, in words.
REFERENCES = {
    "copy": "a frozen copy of the policy, on both sides",
    "adapter": "a LoRA of rank 8 on c_attn is trained, the reference is its base, on both sides",
    "trunk": "embeddings, the head that is tied to them and the bottom half of the layers are "
    "frozen, on both sides; fastrl stores them once and step() runs them once per sample, the peer "
    "stores them twice and runs them in every forward",
    "offload": "fastrl's copy is in host memory; the peer keeps one as ever",
    "none": "the KL coefficient is 0; fastrl has no reference, the peer keeps a copy",
}
UNKNOWN = {"none": {"objective/kl"}}  # to fastrl, without a reference

EAGER = "eager"
PEERS = {  # what is not said by a name and a version
    "trl==0.11.4": "",
    EAGER: "the same algorithm on eager torch and model.generate",
}
FAMILIES = {"gpt2": "GPT-2", "qwen2": "Qwen2"}
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16 by autocast over fp32 weights, which both sides' generate is run under too",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a batch: lengths in tokens. Its weights are fp32; in bf16 it runs under autocast.

    `ppo_worker.model_config` makes the model of it.
    """

    name: str
    family: str  # gpt2 or qwen2
    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int  # positions, at least; as many as a sample has where that is more
    dtype: str
    batch: int
    query: int
    response: int
    mini_batch: int
    epochs: int = 4
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Goal:
    """Of an iteration, where the device's name begins with one of these."""

    devices: tuple[str, ...]
    speedup: float  # over the peer
    reference: str = "copy"


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, its goal, and a guess at the seconds that one way of keeping the reference takes."""

    shape: Shape
    goal: Goal | None = None
    seconds: float = 60.0


def _of(model: rollout_cases.Shape, dtype: str, **batch: int) -> Shape:
    """A model of the rollouts' with a batch."""
    names = {field.name for field in dataclasses.fields(Shape)} & vars(model).keys()
    return Shape(**{name: getattr(model, name) for name in names} | {"dtype": dtype} | batch)


_SMALL = dataclasses.replace(rollout_cases.SMALL, context=128)
_LARGE = {"batch": 64, "query": 128, "response": 256, "mini_batch": 8}
_ON_GPU = Goal(("nvidia", "amd"), 5.0)
_CASES = {
    "cpu": (
        Case(
            _of(_SMALL, "fp32", batch=16, query=16, response=48, mini_batch=4),
            Goal(("cpu",), 3.0),
            seconds=200,
        ),
    ),
    "cuda": (
        Case(_of(rollout_cases.GPT2, "bf16", **_LARGE), _ON_GPU, seconds=180),
        Case(_of(rollout_cases.QWEN, "bf16", **_LARGE), _ON_GPU, seconds=420),
    ),
}
_TOY_BATCH = {"batch": 4, "query": 8, "response": 8, "mini_batch": 2}
# On every device, so that what is meant for a GPU can be tried without one.
QUICK = (
    Case(Shape("toy GPT-2", "gpt2", 2, 32, 4, 4, 128, 503, 128, "fp32", **_TOY_BATCH)),
    Case(Shape("toy Qwen2", "qwen2", 2, 32, 4, 2, 96, 503, 128, "bf16", **_TOY_BATCH)),
)


def cases(device_type: str, *, quick: bool = False, threads: int | None = None) -> list[Case]:
    """Those of a kind of device, the quickest first, with a number of threads if one is given."""
    chosen = QUICK if quick else _CASES[device_type]
    if not threads:
        return list(chosen)
    return [
        dataclasses.replace(case, shape=dataclasses.replace(case.shape, threads=threads))
        for case in chosen
    ]


def exact(shape: Shape) -> Shape:
    """What is compared number by number before a shape is timed: a smaller batch of it, in fp32."""
    batch, mini_batch = min(shape.batch, 8), min(shape.mini_batch, 4)
    return dataclasses.replace(shape, dtype="fp32", batch=batch, mini_batch=mini_batch)


def what(reference: str, shape: dict[str, Any]) -> str:
    """A way of keeping the reference in words."""
    words = REFERENCES[reference]
    return words.replace("c_attn", "q_proj and v_proj") if _family(shape) == "qwen2" else words


def describe(shape: dict[str, Any]) -> str:
    """One sentence on what an iteration is."""
    grouped = shape.get("kv_heads", shape["heads"]) != shape["heads"]
    keys = f" ({shape['kv_heads']} of keys and values)" if grouped else ""
    return (
        f"{FAMILIES[_family(shape)]} of {shape['layers']} layers, width {shape['width']}, "
        f"{shape['heads']} heads{keys}, vocabulary {shape['vocabulary']}, "
        f"{PRECISIONS[shape.get('dtype', 'fp32')]}: {shape['batch']} samples of {shape['query']} + "
        f"{shape['response']} tokens, mini-batches of {shape['mini_batch']}, "
        f"{shape['epochs']} epochs"
    )


def described(peer: str) -> str:
    """A peer's name, and what it is where the name does not say it."""
    return f"{peer} ({PEERS[peer]})" if PEERS.get(peer) else peer


def _family(shape: dict[str, Any]) -> str:
    return shape.get("family", "gpt2")  # older files have none
