"""A decode step's head and draw, counted: what each way of drawing a token asks of a GPU.

Today's way writes the logits, reads them once for the statistics of the race's groups, and reads
the group that won. Three others never write all of them:

- *race*: the product's kernel gives every logit a variate and keeps the winner of each tile
  (`linear_sample`);
- *recompute*: it keeps statistics only, and the group that won is multiplied again;
- *store*: each of its programs keeps the logits of the best group that it has walked.

Seconds are arithmetic on bytes, flops, instructions and launches; no GPU has measured them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import fastrl_kernels as kernels
from fastrl_kernels.race import part_size

LAUNCH = 2e-6  # seconds, in a captured step: its first bytes' latency, and its last program's end


class Gpu(NamedTuple):
    """What a GPU does in practice."""

    name: str
    bandwidth: float  # bytes per second
    flops: float  # per second, of library products in half precision
    processors: int
    clock: float  # cycles per second
    l2: float  # bytes per second that processors read from the second cache

    @property
    def issue(self) -> float:
        """Instructions of a warp per second."""
        return 4 * self.processors * self.clock


H100 = Gpu("H100", 3.0e12, 7e14, 132, 1.755e9, 5.5e12)
H200 = Gpu("H200", 4.3e12, 7e14, 132, 1.755e9, 5.5e12)
GPUS = (H100, H200)


class Head(NamedTuple):
    """A decode step's rows, and the head that they meet, in half precision."""

    rows: int
    hidden: int
    vocabulary: int

    @property
    def logits(self) -> int:
        return self.rows * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        return 2 * self.hidden * self.vocabulary

    @property
    def group(self) -> int:
        """Columns of a group of the race."""
        return part_size(self.vocabulary)

    @property
    def groups(self) -> int:
        return -(-self.vocabulary // self.group)


MODELS = {
    "GPT-2 124M": (768, 50257),
    "Qwen2.5-0.5B": (896, 151936),
    "Qwen2.5-1.5B": (1536, 151936),
    "Qwen2.5-7B": (3584, 152064),
}
ROWS = (1, 16, 32, 64, 128, 256)

# Instructions per logit, of sm_90's machine code: of the pass over logits for the groups'
# statistics, of the same in a product's epilogue, and there with a variate and the race.
READ, STATISTICS, RACE = 14.3, 24.0, 119.0
# Of a library's rate, what products of so few rows reach by the older instruction for tensor cores:
# Hopper's own wants 64 rows of a tile.
PRODUCT = 0.6
LATENCY = 0.8e-6  # seconds from a load to its bytes


class Tile(NamedTuple):
    """The fused kernel's, by its machine code for sm_90."""

    rows: int
    columns: int
    resident: int  # blocks of a multiprocessor, by registers and shared memory
    in_flight: int  # bytes of weights that a block has asked for


# No 64 rows: with four warps their epilogue spills registers, with eight it takes 161, which leaves
# one block with nothing to hide it.
TILES = (Tile(16, 128, 4, 3 << 14), Tile(32, 128, 3, 3 << 14))
_RECORD = 32  # bytes that a tile leaves of a row


def today(head: Head, gpu: Gpu) -> float:
    """Seconds of a library's product, a pass over the logits and the draw."""
    product = max(
        (head.weight_bytes + 2 * head.rows * head.hidden + 2 * head.logits) / gpu.bandwidth,
        2 * head.logits * head.hidden / gpu.flops,
    )
    statistics = 12 * head.rows * head.groups
    passes = max((2 * head.logits + statistics) / gpu.bandwidth, _issue(head.logits, READ, gpu))
    return product + passes + statistics / gpu.bandwidth + 3 * LAUNCH


def race(head: Head, gpu: Gpu) -> float:
    """Seconds of `linear_sample`."""
    return _fused(head, gpu, RACE) + 2 * LAUNCH


def recompute(head: Head, gpu: Gpu) -> float:
    """Seconds where the groups that won are multiplied again, each row's for itself."""
    again = 2 * head.rows * head.group * head.hidden
    return _fused(head, gpu, STATISTICS) + again / gpu.bandwidth + 3 * LAUNCH


def store(head: Head, gpu: Gpu) -> float:
    """Seconds where each multiprocessor's program stores the logits of its best group."""
    kept = min(head.groups, gpu.processors) * head.group * head.rows
    return _fused(head, gpu, STATISTICS) + 2 * kept / gpu.bandwidth + 2 * LAUNCH


def _issue(logits: float, instructions: float, gpu: Gpu) -> float:
    return logits * instructions / 32 / gpu.issue


def _fused(head: Head, gpu: Gpu, instructions: float) -> float:
    """Seconds of a product whose epilogue takes so many instructions per logit, and of reading what
    it leaves; of the best tile."""
    return min(_of_tile(head, gpu, instructions, tile) for tile in TILES)


def _of_tile(head: Head, gpu: Gpu, instructions: float, tile: Tile) -> float:
    blocks, tiles = -(-head.rows // tile.rows), -(-head.vocabulary // tile.columns)
    programs, logits = blocks * tiles, tile.rows * tile.columns  # rows past the last one, too
    records = _RECORD * head.rows * tiles
    memory = (head.weight_bytes + 2 * head.rows * head.hidden + records) / gpu.bandwidth
    issue = _issue(programs * logits, instructions, gpu)
    flops = 2 * programs * logits * head.hidden / (PRODUCT * gpu.flops)
    # A program multiplies as fast as its weights arrive, and then computes alone; as many programs
    # as a multiprocessor holds do so at the same time.
    loads = 2 * tile.columns * head.hidden / tile.in_flight * LATENCY
    product = max(loads, 2 * logits * head.hidden * gpu.processors / (PRODUCT * gpu.flops))
    alone = product + _issue(logits, instructions, gpu) * gpu.processors
    in_turns = programs / gpu.processors * alone / tile.resident
    # Each program reads its rows' hidden states, each block of rows the weights.
    cached = 2 * programs * (tile.rows + tile.columns) * head.hidden / gpu.l2
    return max(memory, cached, issue + flops, in_turns) + records / gpu.bandwidth


WAYS: dict[str, Callable[[Head, Gpu], float]] = {
    "today": today,
    "race": race,
    "recompute": recompute,
    "store": store,
}


def counted() -> Iterator[tuple[str, Head, Gpu, dict[str, float]]]:
    """(model, head, GPU, seconds by way) of all models and rows."""
    for model, (hidden, vocabulary) in MODELS.items():
        for rows in ROWS:
            head = Head(rows, hidden, vocabulary)
            for gpu in GPUS:
                yield model, head, gpu, {name: way(head, gpu) for name, way in WAYS.items()}


def table() -> str:
    """What docs/kernels.md shows: microseconds on each GPU, and where `linear_sample` pays."""
    names = "".join(f" {gpu.name}: {' / '.join(WAYS)} |" for gpu in GPUS)
    lines = [f"| bf16 | rows |{names} |", f"| {'--- | ' * (len(GPUS) + 3)}".rstrip()]
    for model, (hidden, vocabulary) in MODELS.items():
        for rows in ROWS:
            head = Head(rows, hidden, vocabulary)
            seconds = [[way(head, gpu) for way in WAYS.values()] for gpu in GPUS]
            shown = (" / ".join(f"{1e6 * x:.0f}" for x in found) for found in seconds)
            pays = kernels.linear_sample_pays(rows, hidden, vocabulary, torch.bfloat16)
            lines.append(f"| {model} | {rows} | {' | '.join(shown)} | {'fused' if pays else ''} |")
    return "\n".join(lines)


def gain(head: Head, gpu: Gpu) -> float:
    """The share of today's time that the race saves."""
    return 1 - race(head, gpu) / today(head, gpu)
