"""PPO in plain eager PyTorch: a peer where TRL cannot be installed; in float64, the judge where two
libraries' statistics differ by more than rounding.

The algorithm is that of TRL 0.11.4's classic PPOTrainer, and so is the surface, as far as
`ppo.py` needs it: all logits of the policy and of a copy of it, log_softmax and gather, the KL
as a reward, a loop over steps for the advantages, clipped losses in mini-batches, Adam, and the
same statistics, mini-batches from NumPy's global generator. Generation is transformers'. It shares
no code with fastrl's trainer or with TRL's.
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks import eager, timing

Numbers = dict[str, Tensor]


@dataclass
class PPOConfig:
    """The settings that are used here, with TRL's defaults."""

    batch_size: int
    mini_batch_size: int
    ppo_epochs: int = 4
    seed: int = 0
    learning_rate: float = 1.41e-5
    init_kl_coef: float = 0.2
    target: float = 6.0
    horizon: float = 10_000.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    ratio_threshold: float = 10.0
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)  # of it mixed_precision


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model, perhaps with an adapter, and a linear value of each position."""

    precision = torch.float32  # of weights and of all that follows the logits

    def __init__(self, pretrained_model: Any) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        value = nn.Linear(pretrained_model.config.hidden_size, 1)
        self.v_head = nn.ModuleDict({"summary": value})

    @classmethod
    def from_pretrained(
        cls, model: Any, summary_dropout_prob: float = 0.0, peft_config: Any = None
    ) -> AutoModelForCausalLMWithValueHead:
        """Wraps a model."""
        assert not summary_dropout_prob
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        return cls(model).to(cls.precision)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and values [B, T]."""
        output = self.pretrained_model(
            input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
        )
        values = self.v_head["summary"](output.hidden_states[-1]).squeeze(-1)
        return output.logits.to(self.precision), values.to(self.precision)


class Batch(NamedTuple):
    """Queries with their responses, padded on the right; a token's scores stand one before it."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    mask: Tensor  # [B, T-1], 1.0 where a response's token counts

    def part(self, indices: Any) -> Batch:
        """Some of the samples."""
        return Batch(*(tensor[indices] for tensor in self))


class Experience(NamedTuple):
    """What an update learns from, each [B, T-1]."""

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class PPOTrainer:
    """Trains the model, on a GPU where there is one. The reference is a frozen copy, above frozen
    layers where some are shared, or an adapter's base."""

    def __init__(
        self,
        config: PPOConfig,
        model: Any,
        tokenizer: Any,
        optimizer: torch.optim.Optimizer | None = None,
        num_shared_layers: int | None = None,
    ) -> None:
        if num_shared_layers:
            freeze_below(model.pretrained_model, num_shared_layers)
        torch.manual_seed(config.seed)
        self.config, self.tokenizer = config, tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=config.learning_rate)
        self.kl_coef = config.init_kl_coef

    @torch.no_grad()
    def generate(
        self, queries: list[Tensor], batch_size: int = 4, return_prompt: bool = True, **kwargs: Any
    ) -> list[Tensor]:
        """Responses, cut after their EOS, of `model.generate` on left-padded batches."""
        self.model.eval()
        found: list[Tensor] = []
        for start in range(0, len(queries), batch_size):
            part = queries[start : start + batch_size]
            ids, attention_mask = self._padded(part, side="left")
            output = self.model.pretrained_model.generate(
                input_ids=ids, attention_mask=attention_mask, **kwargs
            )
            for query, row in zip(part, output, strict=True):
                response = row[ids.shape[1] :]
                ends = (response == self.tokenizer.eos_token_id).nonzero()
                response = response[: int(ends[0]) + 1] if len(ends) else response
                found.append(torch.cat([query, response]) if return_prompt else response)
        return found

    def step(
        self, queries: list[Tensor], responses: list[Tensor], scores: list[Tensor]
    ) -> dict[str, float]:
        """One iteration on scored responses; its statistics and its phases' seconds."""
        final = torch.stack(scores).float().to(self.device)
        batch = self._joined(queries, responses)
        clock = Clock(self.device)
        self.model.eval()
        with torch.no_grad():
            logprobs, values = self._scores(self.model, batch)
            ref_logprobs, _ = self._scores(self.reference, batch)
            clock("forward_pass")
            found = eager.kl_rewards(logprobs, ref_logprobs, final, batch.mask, self.kl_coef)
            clock("compute_rewards")
            values = values * batch.mask
            estimated = eager.gae(
                found["rewards"], values, batch.mask, self.config.gamma, self.config.lam, True
            )
            clock("compute_advantages")
        experience = Experience(logprobs, values, estimated["advantages"], estimated["returns"])
        updates = self._update(batch, experience)
        clock("optimize_step")
        kl = found["sequence_kl"].mean()
        numbers = {
            "objective/kl": kl,
            "objective/entropy": -(logprobs * batch.mask).sum(-1).mean(),
            "ppo/mean_non_score_reward": mean(-self.kl_coef * found["kls"], batch.mask),
            "ppo/mean_scores": final.mean(),
            "ppo/std_scores": final.std(),
            **{key: torch.stack([one[key] for one in updates]).mean() for key in updates[0]},
        }
        numbers["ppo/val/var_explained"] = 1 - numbers["ppo/val/error"] / numbers["ppo/returns/var"]
        stats = {key: float(value) for key, value in numbers.items()}
        rate = self.optimizer.param_groups[0]["lr"]
        stats |= {"objective/kl_coef": self.kl_coef, "ppo/learning_rate": rate}
        for name, tensors in (("queries", queries), ("responses", responses)):
            lengths = torch.tensor([float(len(tensor)) for tensor in tensors])
            stats[f"tokens/{name}_len_mean"] = float(lengths.mean())
            stats[f"tokens/{name}_len_std"] = float(lengths.std())
        self._adapt(stats["objective/kl"])
        clock("calc_stats")
        return stats | clock.seconds

    def _update(self, batch: Batch, experience: Experience) -> list[Numbers]:
        """Epochs of mini-batches in a random order; the statistics of each."""
        found = []
        for _ in range(self.config.ppo_epochs):
            order = np.random.permutation(self.config.batch_size)
            for start in range(0, len(order), self.config.mini_batch_size):
                chosen = torch.from_numpy(order[start : start + self.config.mini_batch_size])
                indices = chosen.to(self.device)
                old = Experience(*(tensor[indices] for tensor in experience))
                loss, stats = self._loss(batch.part(indices), old)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                found.append(stats)
        return found

    def _loss(self, batch: Batch, old: Experience) -> tuple[Tensor, Numbers]:
        """The clipped losses of a mini-batch, and its statistics."""
        config, mask = self.config, batch.mask
        outputs, values = self._forward(self.model, batch, entropy=True)
        logprobs, entropies = outputs["logprobs"], outputs["entropies"]
        # Within the range it is the value itself: `val/clipfrac` counts no rounding.
        near = values.clamp(
            old.values - config.cliprange_value, old.values + config.cliprange_value
        )
        errors, near_errors = (values - old.returns).square(), (near - old.returns).square()
        value_loss = 0.5 * mean(torch.maximum(errors, near_errors), mask)
        ratio = (logprobs - old.logprobs).exp()
        losses = -old.advantages * ratio
        near_losses = -old.advantages * ratio.clamp(1 - config.cliprange, 1 + config.cliprange)
        policy_loss = mean(torch.maximum(losses, near_losses), mask)
        if (
            float(mean(ratio.detach(), mask)) > config.ratio_threshold
        ):  # it has run away: learn nothing
            policy_loss, value_loss = policy_loss * 0.0, value_loss * 0.0
        loss = policy_loss + config.vf_coef * value_loss
        stats = {
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "loss/total": loss,
            "policy/entropy": mean(entropies, mask),
            "policy/approxkl": 0.5 * mean((logprobs - old.logprobs).square(), mask),
            "policy/policykl": mean(old.logprobs - logprobs, mask),
            "policy/clipfrac": mean((near_losses > losses).float(), mask),
            "policy/advantages_mean": mean(old.advantages, mask),
            "returns/mean": mean(old.returns, mask),
            "returns/var": variance(old.returns, mask),
            "val/vpred": mean(values, mask),
            "val/error": mean(errors, mask),
            "val/clipfrac": mean((near_errors > errors).float(), mask),
            "val/mean": mean(old.values, mask),
            "val/var": variance(old.values, mask),
        }
        return loss, {f"ppo/{key}": value.detach() for key, value in stats.items()}

    def _scores(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs and values of all samples, a mini-batch at a time."""
        if model is self.reference and hasattr(model.pretrained_model, "disable_adapter"):
            with self.model.pretrained_model.disable_adapter():
                return self._scores(self.model, batch)
        parts = []
        for start in range(0, len(batch.mask), self.config.mini_batch_size):
            part = batch.part(slice(start, start + self.config.mini_batch_size))
            outputs, values = self._forward(model, part)
            parts.append((outputs["logprobs"], values))
        logprobs, values = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(values)

    def _forward(self, model: Any, batch: Batch, entropy: bool = False) -> tuple[Numbers, Tensor]:
        """Log-probs and entropies, by a softmax over all logits, and values."""
        half = self.config.accelerator_kwargs.get("mixed_precision") == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            logits, values = model(batch.input_ids, batch.attention_mask)
        logprobs = logits[:, :-1].log_softmax(-1)
        outputs = {"logprobs": logprobs.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)}
        if entropy:
            outputs["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
        return outputs, values[:, :-1]

    def _adapt(self, kl: float) -> None:
        """Moves the KL's coefficient, by a fifth of the way over `horizon` samples at most."""
        config = self.config
        error = min(max(kl / config.target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * config.batch_size / config.horizon

    def _joined(self, queries: list[Tensor], responses: list[Tensor]) -> Batch:
        pairs = list(zip(queries, responses, strict=True))
        ids, attention_mask = self._padded([torch.cat(pair) for pair in pairs], side="right")
        shape = ids.shape[0], ids.shape[1] - 1
        mask = torch.zeros(shape, dtype=self.model.precision, device=self.device)
        for row, (query, response) in enumerate(pairs):
            mask[row, len(query) - 1 : len(query) - 1 + len(response)] = 1.0
        return Batch(ids, attention_mask, mask)

    def _padded(self, tensors: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
        """Token ids and which of them are none of the padding, each [B, T]."""
        pad = self.tokenizer.pad_token_id
        ones = [torch.ones_like(tensor) for tensor in tensors]
        ids = pad_sequence(tensors, batch_first=True, padding_value=pad, padding_side=side)
        return ids.to(self.device), pad_sequence(ones, True, 0, side).to(self.device)


class Clock:
    """Seconds of consecutive phases, each until the device has finished it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, {}
        self.last = timing.now(device)

    def __call__(self, phase: str) -> None:
        """Ends a phase."""
        now = timing.now(self.device)
        self.seconds[f"time/ppo/{phase}"], self.last = now - self.last, now


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Over what counts."""
    return (values * mask).sum() / mask.sum()


def variance(values: Tensor, mask: Tensor) -> Tensor:
    """With Bessel's correction."""
    count = mask.sum()
    return mean((values - mean(values, mask)).square(), mask) * count / (count - 1)


def freeze_below(model: Any, layers: int) -> None:
    """Freezes the embeddings and the lowest layers: what a model lists before the next layer."""
    for name, parameter in model.named_parameters():
        if f".{layers}." in name:
            return
        parameter.requires_grad_(False)


class Float64Model(AutoModelForCausalLMWithValueHead):
    """The same in float64, whose rounding is nothing beside that of a library in fp32.
    (transformers computes rotary angles and RMSNorm in fp32 whatever the weights are: errors of
    1e-7, where 1e-3 is allowed.)"""

    precision = torch.float64


FLOAT64 = types.SimpleNamespace(
    __name__="float64",
    AutoModelForCausalLMWithValueHead=Float64Model,
    PPOConfig=PPOConfig,
    PPOTrainer=PPOTrainer,
)
