"""Statistics of a step, fetched from the device in one transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl_kernels
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.experience import Experience
from fastrl.learn.memory import PositionCount
from fastrl.learn.update import UpdateRecord
from fastrl.run.processes import Processes


def fetch(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors of any shape as fp32 arrays, in one transfer."""
    flat = torch.cat([t.detach().float().flatten() for t in tensors.values()]).cpu().numpy()
    ends = np.cumsum([t.numel() for t in tensors.values()])[:-1]
    return {
        name: part.reshape(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), np.split(flat, ends), strict=True)
    }


def device_stats(
    batch: TokenBatch,
    scored: Experience,
    scores: Tensor,
    non_score_reward: Tensor,
    kls: Tensor,
    experience: Experience,
    record: UpdateRecord,
    vf_coef: float = 0.0,
) -> dict[str, Tensor]:
    """Statistics that are computed on the device, log-probs and distributions among them.

    Means are over samples of which a token counts, that of ``non_score_reward`` over such tokens,
    those of scores [B] over scores that are not NaN, the update's over mini-batches with a finite
    loss; NaN where there are none. ``scored`` has the log-probs of policy and reference,
    ``experience`` what the update read; ``kls`` and ``non_score_reward`` are [B, T-1].
    """
    kl_per_sequence = kls.sum(-1)
    samples = batch.mask.any(-1).sum()
    count = (~scores.isnan()).sum()
    mean_score = scores.nansum() / count
    squares = (scores - mean_score).square().nansum()
    stats = {
        "objective/kl": kl_per_sequence.sum() / samples,
        "objective/kl_dist": kl_per_sequence,
        "objective/logprobs": scored.logprobs,
        "objective/ref_logprobs": scored.ref_logprobs,
        "objective/entropy": -scored.logprobs.sum() / samples,
        "ppo/mean_non_score_reward": fastrl_kernels.masked_mean(non_score_reward, batch.mask),
        "ppo/mean_scores": mean_score,
        "ppo/std_scores": (squares / (count - 1).clamp(min=1)).sqrt(),
        "ppo/policy/advantages": torch.cat([scores[:0], *record.advantages]),
        "ppo/policy/ratio": torch.cat([scores[:0], *record.ratios]),
    }
    stats.update(record.means(scores.device))
    if record.critic is not None:
        stats.update(record.critic.means(scores.device))
        value_loss = vf_coef * stats["ppo/loss/value"]
        alone = not record.minibatches  # in the critic's warm-up, or where no policy loss is finite
        stats["ppo/loss/total"] = value_loss + (0 if alone else stats["ppo/loss/total"])
    if "ppo/val/error" in stats:
        variance = stats["ppo/returns/var"]
        stats["ppo/val/var_explained"] = torch.where(
            variance > 0, 1 - stats["ppo/val/error"] / variance, 0.0
        )
        stats["ppo/val/explained_variance"] = explained_variance(
            experience.values, experience.returns, batch.mask
        )
    return stats


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over the tokens under the mask, []; 0 where all R are equal."""
    residual, total = (
        fastrl_kernels.masked_var(x, mask, unbiased=False) for x in (returns - values, returns)
    )
    return torch.where(total > 0, 1 - residual / total, 0.0)


def host_stats(batch: TokenBatch, record: UpdateRecord) -> dict[str, Any]:
    """Statistics that are known on the host; lengths are of samples of which a token counts."""
    stats: dict[str, Any] = {}
    samples = batch.counting()
    for name, lengths in (("queries", batch.prompt_lengths), ("responses", batch.response_lengths)):
        values = np.asarray(lengths, dtype=np.float32)[samples]
        stats[f"tokens/{name}_len_mean"] = float(values.mean()) if len(values) else math.nan
        stats[f"tokens/{name}_len_std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        stats[f"tokens/{name}_dist"] = values
    stats["ppo/optimizer_steps"] = float(record.optimizer_steps)
    stats["ppo/skipped_minibatches"] = float(record.skipped)
    stats["ppo/nonfinite_minibatches"] = float(record.nonfinite)
    stats["ppo/nonfinite_steps"] = float(record.nonfinite_steps)
    stats["ppo/nonfinite_samples"] = float(len(record.left_out))
    stats["ppo/policy/ratio_max"] = record.max_ratio
    stats["ppo/grad_norm"] = _mean_norm(record)
    if record.critic is not None:
        stats["ppo/nonfinite_minibatches"] += record.critic.nonfinite
        stats["ppo/nonfinite_steps"] += record.critic.nonfinite_steps
        stats["ppo/critic/optimizer_steps"] = float(record.critic.optimizer_steps)
        stats["ppo/critic/grad_norm"] = _mean_norm(record.critic)
    stats["ppo/early_stopped"] = float(record.stopped_early)
    return stats


def _mean_norm(record: UpdateRecord) -> float:
    """The mean norm of the gradients; NaN where no norm is known."""
    norms = [norm for norm in record.norms if not math.isnan(norm)]
    return sum(norms) / len(norms) if norms else math.nan


def finish_stats(batch: TokenBatch, finish_reasons: Sequence[str] | None) -> dict[str, float]:
    """Shares of responses that ended by EOS or a stop, and that were cut by their length, of
    samples of which a token counts; nothing where the finish reasons are not known."""
    if finish_reasons is None:
        return {}
    reasons = [finish_reasons[i] for i in batch.counting()]
    ended = sum(reason in ("eos", "stop") for reason in reasons)
    cut = reasons.count("length")
    count = len(reasons) or math.nan
    return {"tokens/eos_share": ended / count, "tokens/cut_share": cut / count}


def position_stats(counts: Iterable[PositionCount], processes: Processes) -> dict[str, float]:
    """Positions that forwards of all processes ran per token of their samples: above 1 with
    padding, below it where samples share a prompt."""
    counted = [count.taken() for count in counts]
    numbers = [[count.positions, count.tokens] for count in counted]
    positions, tokens = processes.sums(torch.tensor(numbers).sum(0)).tolist()
    return {"perf/positions_per_token": positions / tokens if tokens else math.nan}


def timing_stats(seconds: Mapping[str, float], batch: TokenBatch) -> dict[str, float]:
    """``time/ppo/*`` in seconds, and throughput and peak memory under ``perf/``."""
    stats = {f"time/ppo/{phase}": value for phase, value in seconds.items()}
    stats["perf/step_tokens_per_second"] = sum(batch.response_lengths) / seconds["total"]
    if batch.mask.device.type == "cuda":
        stats["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return stats
