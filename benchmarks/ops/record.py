"""The record of an op: how it is called, its least work, its cases and goals, its peers, and what
the ahead-of-time gate compiles of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.cases import Goal
from benchmarks.gate import Problem
from benchmarks.peers import MakePeer
from benchmarks.shapes import Shape

HOPPER = ("nvidia h",)  # H100 and H200
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Work:
    """The least bytes and flops of a shape, and in words what is counted."""

    bytes: float
    flops: float
    what: str


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs of checks; lengths are (odd, even)."""

    rows: int = 64
    vocabulary: tuple[int, int] = (50257, 151936)
    steps: tuple[int, int] = (507, 512)
    hidden: int = 256
    tokens: tuple[int, int] = (1023, 1024)  # of a cache's slot: read in several parts
    width: int = 64  # of its heads


@dataclasses.dataclass(frozen=True)
class Expect:
    """The widths that a call demands of each of its kernels' main loops, in bytes per thread.

    No access may stay below the demand where its tile holds enough elements per thread, and the
    widest must reach it, unless ``any_tile`` leaves the size of tiles to the kernel. Zero demands
    nothing. ``exempt`` names pointers, and helper functions, whose accesses are not judged; a loop
    must hold others. ``why`` explains whatever is let pass.
    """

    load_bytes: int = 16
    store_bytes: int = 0
    any_tile: bool = False
    exempt: frozenset[str] = frozenset()
    why: str = ""

    def stricter(self, other: Expect) -> Expect:
        """Both demands at once: one specialisation may serve several calls."""
        return Expect(
            max(self.load_bytes, other.load_bytes),
            max(self.store_bytes, other.store_bytes),
            self.any_tile and other.any_tile,
            self.exempt & other.exempt,
            self.why if self.load_bytes > other.load_bytes else other.why,
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A call that the ahead-of-time gate compiles, and what its kernels must look like.

    It is made on CPU tensors and never launched: contents do not matter, but what kernels
    specialise on does, which is dtypes, divisibility by 16, strides, and options.
    """

    label: str
    call: Callable[[], object]
    expect: Expect = Expect()
    kernels: Mapping[str, Expect] = dataclasses.field(default_factory=dict)  # by pattern, instead


Mains = Mapping[str, Sequence[tuple[Shape, tuple[Goal, ...]]]]


@dataclasses.dataclass(frozen=True)
class Op:
    """All that is known of an op; one that is not measured has `compiled` alone.

    Args:
        problem: (shape, generator, backend, pick_rows) → inputs and implementations.
        work: the least that any implementation of the op's algorithm must do.
        main: shapes with goals, for "cpu" and "cuda": what is shown.
        axes: fields of a shape and their other values; an axis named a_b sets a and b.
        checked: shapes of the checks, in every dtype, of odd and even lengths; the last one has
            masks where the op has any.
        compiled: calls for the ahead-of-time gate.
        peers: other libraries' implementations by name (`benchmarks.peers`).
        torch_compile: measured beside torch.compile of the eager formula too.
        export: the op's name in `fastrl_kernels`, if another.
        eager: a note on the eager formula.
    """

    problem: Callable[[Shape, torch.Generator, str, bool], Problem] | None = None
    work: Callable[[Shape], Work] | None = None
    main: Mains = dataclasses.field(default_factory=dict)
    axes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    checked: Callable[[Sizes], Iterator[Shape]] | None = None
    compiled: Callable[[], Iterator[Compiled]] | None = None
    peers: Mapping[str, MakePeer] = dataclasses.field(default_factory=dict)
    torch_compile: bool = True
    export: str = ""
    eager: str = ""
