"""The order in which DDP adds gradients up over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def settle_buckets(model: Any) -> None:
    """Has DDP lay out the buckets in which gradients are sent as it would after its first backward
    pass, so that a resumed run, whose first pass is a later one, adds up in the same order.

    Where in a bucket a gradient lies decides in which order the processes' parts are added, and
    with it the last bits. Two processes, whose sum has one order, and models without DDP need no
    order. The gradients must be None, and are left so.

    Args:
        model: as accelerate has prepared it.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        return
    trained = [p for p in ddp.module.parameters() if p.requires_grad]
    # Some optimizers step within the backward pass.
    steps = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in trained)
    if torch.distributed.get_world_size(ddp.process_group) < 3 or steps:
        return
    module, ddp.module = ddp.module, _NoLoss(trained)
    sends_buffers, ddp.broadcast_buffers = ddp.broadcast_buffers, False
    try:
        ddp().backward()
    finally:
        ddp.module, ddp.broadcast_buffers = module, sends_buffers
    for p in trained:
        p.grad = None


class _NoLoss(nn.Module):
    """A loss of 0 whose backward pass has the last parameter's gradient ready first."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        self.trained = parameters

    def forward(self) -> Tensor:
        total = torch.zeros((), device=self.trained[0].device)
        for p in self.trained:
            total = total + p.sum().float() * 0
        return total
