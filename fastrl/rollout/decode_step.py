"""The decode step: one function of static buffers, eager on a CPU, captured on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.rollout.kv_cache import Arena, DecodeAttention
from fastrl.rollout.model_runner import Policy
from fastrl.rollout.rules import Rules
from fastrl.rollout.slots import EOS, FIELDS, LENGTH, NAN, RUNNING, STOP, Rows, Slots


class DecodeStep:
    """Runs the first ``bucket`` slots on by one token.

    Args:
        span: bounds the tokens per slot, the new one included.
    """

    def __init__(self, policy: Policy, arena: Arena, slots: Slots, rules: Rules):
        self.policy, self.arena, self.slots, self.rules = policy, arena, slots, rules

    def __call__(self, bucket: int, span: int) -> None:
        rows = self.slots.rows.first(bucket)
        seen, tail = (None if x is None else x[:bucket] for x in (self.slots.seen, self.slots.tail))
        attention = DecodeAttention(self.arena, rows.position, span)
        logits, values = self.policy.decode(rows.token, rows.position, attention)
        draw = self._draw(logits, rows, seen)

        running = rows.reason == RUNNING
        lost = draw.tokens < 0  # no distribution: a NaN among its logits, or nothing left to draw
        goes_on = running & ~lost
        token = torch.where(goes_on, draw.tokens, rows.token)
        self._record(bucket, rows.made, token, draw, values)
        if seen is not None:
            seen.scatter_(1, token.unsqueeze(1), True)
        if tail is not None:
            longer = torch.cat([tail[:, 1:], token[:, None]], dim=1)
            tail.copy_(torch.where(goes_on[:, None], longer, tail))

        count = rows.made + goes_on
        reason = torch.where(count >= rows.limit, LENGTH, RUNNING)
        if tail is not None:
            reason = torch.where(self.rules.stopped(tail), STOP, reason)
        reason = torch.where((token.unsqueeze(1) == self.rules.ends).any(1), EOS, reason)
        reason = torch.where(lost, NAN, reason)
        rows.reason.copy_(torch.where(running, reason, rows.reason))
        rows.made.copy_(count)
        rows.position.add_(goes_on)
        rows.token.copy_(token)

    def _draw(
        self, logits: Tensor, rows: Rows, seen: Tensor | None
    ) -> fastrl_kernels.SampledTokens:
        rules = self.rules
        keys = fastrl_kernels.sample_keys(self.slots.seed, rows.sample, rows.made)
        draw = fastrl_kernels.sample_tokens(
            rules.bend(logits, rows.made, seen), keys, temperature=rules.temperature,
            top_k=rules.top_k, top_p=rules.top_p, min_p=rules.min_p,
        )  # fmt: skip
        if not rules.bends:
            return draw
        # The model's own distribution is that of the logits as they came.
        at = draw.tokens.clamp(min=0).unsqueeze(1)
        at_one = logits.float().log_softmax(-1)
        tempered = at_one
        if rules.temperature not in (0.0, 1.0):
            tempered = (logits.float() / rules.temperature).log_softmax(-1)
        information = torch.where(tempered == -torch.inf, 0.0, tempered)
        return draw._replace(
            logprobs=tempered.gather(1, at).squeeze(1),
            logprobs_t1=at_one.gather(1, at).squeeze(1),
            entropies=-(tempered.exp() * information).sum(-1),
        )

    def _record(
        self,
        bucket: int,
        column: Tensor,
        token: Tensor,
        draw: fastrl_kernels.SampledTokens,
        values: Tensor | None,
    ) -> None:
        """Rows that have ended write behind their last token."""
        at = column.unsqueeze(1)
        self.slots.tokens[:bucket].scatter_(1, at, token.unsqueeze(1))
        by_name = draw._asdict() | {"values": values}
        for field, figures in zip(FIELDS, self.slots.figures, strict=True):
            if by_name[field] is not None:
                figures[:bucket].scatter_(1, at, by_name[field].float().unsqueeze(1))
