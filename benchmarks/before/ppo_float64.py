"""PPO in float64: what decides where two libraries' statistics differ by more than rounding.

The algorithm is that of `ppo_eager.py`, which shares no code with fastrl's trainer or with TRL's:
weights, scores, advantages, losses and gradients are float64 here, so that its own rounding is
nothing beside that of a library in fp32. (transformers computes rotary angles and RMSNorm in fp32
whatever the weights are: errors of 1e-7 once more, where the gate allows 1e-3.)

It keeps every reference that the benchmark knows: a copy, an adapter's base, a copy above frozen
layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.before import ppo_eager
from benchmarks.before.ppo_eager import Batch, Numbers, PPOConfig

__all__ = ["AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer"]


class AutoModelForCausalLMWithValueHead(ppo_eager.AutoModelForCausalLMWithValueHead):
    """A causal language model, perhaps with an adapter, and values, in float64."""

    @classmethod
    def from_pretrained(
        cls, model: Any, summary_dropout_prob: float = 0.0, peft_config: Any = None
    ) -> AutoModelForCausalLMWithValueHead:
        """Wraps a model, whose weights become float64."""
        assert not summary_dropout_prob
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        return cls(model).double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and values [B, T]."""
        output = self.pretrained_model(
            input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
        )
        return output.logits, self.v_head["summary"](output.hidden_states[-1]).squeeze(-1)


class PPOTrainer(ppo_eager.PPOTrainer):
    """The eager trainer with all references, without a rounding to fp32."""

    def __init__(
        self,
        config: PPOConfig,
        model: Any,
        tokenizer: Any,
        optimizer: Any,
        num_shared_layers: int | None = None,
    ) -> None:
        if num_shared_layers:
            freeze_below(model.pretrained_model, num_shared_layers)
        super().__init__(config, model, tokenizer, optimizer)

    def _scores(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The reference of an adapter is its base."""
        if model is self.reference and hasattr(model.pretrained_model, "disable_adapter"):
            with self.model.pretrained_model.disable_adapter():
                return super()._scores(self.model, batch)
        return super()._scores(model, batch)

    def _forward(self, model: Any, batch: Batch, entropy: bool = False) -> tuple[Numbers, Tensor]:
        logits, values = model(batch.input_ids, batch.attention_mask)
        logprobs = logits[:, :-1].log_softmax(-1)
        outputs = {"logprobs": logprobs.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)}
        if entropy:
            outputs["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
        return outputs, values[:, :-1]

    def _joined(self, queries: list[Tensor], responses: list[Tensor]) -> Batch:
        batch = super()._joined(queries, responses)
        return batch._replace(mask=batch.mask.double())


def freeze_below(model: Any, layers: int) -> None:
    """Freezes the embeddings and the lowest layers: what a model lists before the next layer."""
    for name, parameter in model.named_parameters():
        if f".{layers}." in name:
            return
        parameter.requires_grad_(False)
