"""Heads whose rows the processes of a group share, by real transports."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fastrl_kernels import (
    TeacherHead,
    TeacherTokens,
    VocabParallel,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    linear_nll_loss,
    linear_ppo_loss,
)
from fastrl_kernels.workspace import clear
from tests.processes.launch import keep

VOCABULARY, WIDTH = 53, 8
EXTRAS = ("log_sum_sq_probs", "mean_logit", "is_top1")
# A teacher's hidden states and head, and what it says of some tokens.
STATES, HEADS = (
    torch.linspace(-1.0, 2.0, 7 * 3).view(7, 3),
    torch.linspace(-2, 1, 53 * 3).view(53, 3),
)
TOKENS = TeacherTokens(torch.arange(0, VOCABULARY, 9).expand(7, -1), torch.full((7, 6), -2.5))


def head() -> dict[str, Tensor]:
    """Of seven tokens, one of which does not count."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (7,), generator=generator)
    labels[2] = -100
    hidden = torch.randn(7, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    bias = torch.randn(VOCABULARY, generator=generator)
    labels[3:5] = (hidden @ weight.t() + bias).argmax(-1)[3:5]
    return {"hidden": hidden, "weight": weight, "bias": bias, "labels": labels}


def losses(of: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Results of each op."""
    old = torch.linspace(-6.0, -1.0, 7)
    logprobs, entropies, extras = linear_logprobs(**of, entropy=True, extras=EXTRAS, **options)
    ppo, stats = linear_ppo_loss(
        **of, old_logprobs=old, advantages=old + 3.0, mask=old < -1.5, entropy=True, **options
    )
    split = options.get("vocab_parallel")
    rows = HEADS if split is None else HEADS[split.start : split.stop]
    divergence, _ = linear_kl_loss(
        **of, teacher=TeacherHead(STATES, rows), beta=0.3, workspace_bytes=4 * VOCABULARY * 4,
        **options,
    )  # fmt: skip
    of_tokens = linear_kl(**of, teacher=TOKENS, beta=1.0, **options)
    nll, _ = linear_nll_loss(**of, workspace_bytes=4 * VOCABULARY * 4, **options)
    found = {"logprobs": logprobs, "entropies": entropies, **extras._asdict(), "ppo": ppo}
    found["is_top1"] = extras.is_top1.float()
    found |= {"kl": divergence, "divergences": of_tokens.divergences}
    return {**found, "stats": stats.tensor, "nll": nll}


def learned(leaves: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results, and gradients of a sum of them by hidden states, weight and bias."""
    total = (found["logprobs"] - 0.3 * found["entropies"] + found["divergences"]).sum()
    total = total + found["ppo"] - found["nll"] + found["kl"]
    wanted = {name: leaves[name] for name in ("hidden", "weight", "bias")}
    gradients = torch.autograd.grad(total, list(wanted.values()))
    return {
        **{name: x.detach() for name, x in found.items()},
        **{f"d{name}": g for name, g in zip(wanted, gradients, strict=True)},
    }


def rows_of(index: int, count: int) -> tuple[int, int]:
    """Of the last process the first rows, and shares of different size."""
    order = count - 1 - index
    bounds = [0, 11, 30][:count] + [VOCABULARY]
    return bounds[order], bounds[order + 1]


def by_ranges() -> dict[str, Any]:
    start, stop = rows_of(dist.get_rank(), dist.get_world_size())
    of = head()
    of["weight"], of["bias"] = of["weight"][start:stop], of["bias"][start:stop]
    leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in of.items()}
    given = VocabParallel(start, stop)
    found = learned(leaves, losses(leaves, vocab_parallel=given))
    clear()
    again = learned(leaves, losses(leaves, vocab_parallel=given))
    return {"rows": [start, stop], "found": found, "again": again}


def of_a_dtensor() -> dict[str, Any]:
    """As tensor parallelism shares a head: the last process has fewer rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    of = head()
    sharded = {k: nn.Parameter(distribute_tensor(of[k], mesh, [Shard(0)])) for k in
               ("weight", "bias")}  # fmt: skip
    given = VocabParallel.of(sharded["weight"])
    try:
        VocabParallel.of(distribute_tensor(of["weight"], mesh, [Replicate()]))
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    local = {k: x.to_local() for k, x in sharded.items()}
    leaf = of["hidden"].requires_grad_()
    loss, _ = linear_nll_loss(leaf, local["weight"], of["labels"], bias=local["bias"],
                              vocab_parallel=given)  # fmt: skip
    loss.backward()
    assert leaf.grad is not None
    gradients = {k: x.grad for k, x in sharded.items()}
    assert all(x is not None and x.placements == (Shard(0),) for x in gradients.values())
    whole = {k: x.full_tensor() for k, x in gradients.items()}  # type: ignore[union-attr]
    return {
        "rows": [given.start, given.stop],
        "refusal": refusal,
        "found": {"nll": loss.detach(), "dhidden": leaf.grad,
                  **{f"d{k}": x for k, x in whole.items()}},
    }  # fmt: skip


def of_some_processes() -> dict[str, Any]:
    """A group that the first process is not in, on two or more of which each has a part."""
    count, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, count))
    group = dist.new_group(members)
    if rank not in members:
        try:
            VocabParallel(0, VOCABULARY, group)
        except RuntimeError as error:
            return {"refusal": str(error)}
        raise AssertionError("it is not refused")
    start, stop = rows_of(rank - 1, count - 1)
    of = head()
    of["weight"], of["bias"] = of["weight"][start:stop], of["bias"][start:stop]
    leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in of.items()}
    given = VocabParallel(start, stop, group)
    found = learned(leaves, losses(leaves, vocab_parallel=given))
    return {"rows": [start, stop], "found": found}


def compiled() -> dict[str, Any]:
    """As one graph, of one vocabulary and then of another."""
    of = head()
    rank, count = dist.get_rank(), dist.get_world_size()
    step = torch.compile(losses, backend="aot_eager", fullgraph=True)
    results = []
    for cut in ([0, 20, VOCABULARY], [0, 40, VOCABULARY]):
        assert count == len(cut) - 1
        start, stop = cut[rank], cut[rank + 1]
        own = {k: x[start:stop] if k in ("weight", "bias") else x for k, x in of.items()}
        leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in own.items()}
        given = VocabParallel(start, stop)
        found = learned(leaves, step(leaves, vocab_parallel=given))
        results.append({"rows": [start, stop], "found": found})
    return {"first": results[0], "second": results[1]}


JOBS = {
    "ranges": by_ranges, "dtensor": of_a_dtensor, "some processes": of_some_processes,
    "compiled": compiled,
}  # fmt: skip


def run(folder: Path, *names: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        keep(JOBS[name](), name, folder)
    dist.barrier()  # the first process serves the others' rendezvous
