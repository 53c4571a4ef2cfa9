"""Self-check of the rollout engine: does it run a model as the model's own forward does?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.models.attention import hidden_window, why_not_replaceable
from fastrl.models.probes import narrowed, reach
from fastrl.models.quantised import compute_dtypes
from fastrl.models.sharding import is_spread_unit
from fastrl.models.utils import base_of, computes_in_tf32, evaluating
from fastrl.rollout.sampling_params import SamplingParams
from fastrl.samples import Samples

_LENGTHS, _NEW_TOKENS = (1, 5, 3), 3
# Allowed differences of log-probs and entropies: the largest in fp32, the mean in less precision,
# where a single logit may be off by more.
_EXACT, _ROUNDED = 1e-4, 5e-2

_FSDP = "FullyShardedDataParallel"  # a class of torch, which may be built without it


class UnsupportedModel(ValueError):
    """The rollout engine cannot run a model.

    Attributes:
        cause: why, in words.
    """

    def __init__(self, model: Any, cause: str):
        self.cause = cause
        super().__init__(
            f"RolloutEngine cannot run {type(base_of(model)).__name__}, because {cause}: use "
            "GenerateEngine, or choose_engine, which takes that where it has to"
        )


def check_weights_and_kind(model: Any) -> None:
    """Refuses models that the engine cannot run, by their weights and configuration.

    Raises:
        UnsupportedModel: sharded weights, an encoder–decoder, attention or positions of its own.
    """
    cause = why_sharded(model) or why_not_replaceable(base_of(model))
    if cause is not None:
        raise UnsupportedModel(model, cause)


def check_numbers(trial: Any) -> None:
    """Generates a few tokens from random prompts, three in two slots, and compares their log-probs
    and entropies with plain forwards. Neither the model nor torch's generators are changed.

    Args:
        trial: a :class:`fastrl.RolloutEngine` of two slots.

    Raises:
        UnsupportedModel: the numbers differ, or the engine cannot run the model.
    """
    model, device = trial.model_runner.language_model, trial.model_runner.device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    longest = max(_LENGTHS) + _NEW_TOKENS
    lengths = [n + reach(model, longest) if n == max(_LENGTHS) else n for n in _LENGTHS]
    prompts = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]
    params = SamplingParams(
        max_new_tokens=_NEW_TOKENS,
        min_new_tokens=_NEW_TOKENS,
        temperature=0,
        seed=0,
        eos_token_ids=[] if trial.tokenizer is None else None,  # required without a tokenizer
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), narrowed(model):
        try:
            worst, mean = _differences(trial, prompts, trial.generate(prompts, params))
            windows = [] if trial._kv_cache is None else trial._kv_cache.windows
            cause = hidden_window(model, windows)
        # Whatever fails here, model.generate may still run the model.
        except Exception as error:
            cause = f"the rollout engine cannot run it ({type(error).__name__}: {error})"
            raise UnsupportedModel(trial.model, cause) from error
        finally:
            trial.sleep()
    if cause is not None:
        raise UnsupportedModel(trial.model, cause)
    off, tolerance = (worst, _EXACT) if _is_exact(trial) else (mean, _ROUNDED)
    if not off <= tolerance:  # also where it is NaN
        raise UnsupportedModel(
            trial.model,
            f"the rollout engine's log-probs or entropies are off by {off:.1e} from a plain "
            f"forward (more than {tolerance:.0e})",
        )


def why_sharded(model: Any) -> str | None:
    """How a model's weights are sharded, in words: by torch's FSDP or tensor parallelism, or by
    DeepSpeed's ZeRO-3. None if they are whole. Only the model's own forward can gather them."""
    for name, weight in model.named_parameters():
        if type(weight).__name__ == "DTensor":
            return f"its weights are sharded ({name} is a DTensor)"
        if hasattr(weight, "ds_id") or hasattr(weight, "ds_status"):
            return f"its weights are sharded ({name} is one of DeepSpeed's ZeRO-3)"
    for module in model.modules():  # FSDP leaves the last forward's weights whole
        if any(kind.__name__ == _FSDP for kind in type(module).__mro__) or is_spread_unit(module):
            return f"its weights are sharded (by FSDP: {type(module).__name__})"
    return None


@torch.no_grad()
def _differences(engine: Any, prompts: list[Tensor], output: Samples) -> tuple[float, float]:
    """The largest and the mean difference from forwards of one sample each, over tokens for which
    that forward has a distribution: NaN weights are not the engine's fault."""
    model, device = engine.model_runner.language_model, engine.model_runner.device
    assert output.logprobs is not None
    assert output.entropies is not None
    differences = [torch.zeros(1)]
    for i, (prompt, sequence) in enumerate(zip(prompts, output.sequences, strict=True)):
        ids = torch.cat([prompt, sequence]).unsqueeze(0).to(device)
        with evaluating(engine.model), engine.model_runner.autocast():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        full = logits.float().log_softmax(-1).cpu()
        sound = ~full.isnan().any(-1)
        if len(sequence) < _NEW_TOKENS and sound[-1]:  # the sample ended early by itself
            return torch.nan, torch.nan
        full, sound = full[:-1], sound[:-1]
        entropies = torch.special.entr(full.exp()).sum(-1)
        logprobs = full.gather(1, sequence.unsqueeze(1)).squeeze(1)
        differences += [(logprobs - output.logprobs[i])[sound]]
        differences += [(entropies - output.entropies[i])[sound]]
    off = torch.cat(differences).abs()
    return off.max().item(), off.mean().item()


def _is_exact(engine: Any) -> bool:
    """Whether the model computes in fp32 throughout."""
    device = engine.model_runner.device
    with engine.model_runner.autocast():
        rounded = torch.is_autocast_enabled(device.type)
    dtypes = {p.dtype for p in engine.model.parameters() if p.is_floating_point()}
    single = dtypes | compute_dtypes(engine.model) <= {torch.float32, torch.float64}
    return single and not rounded and not computes_in_tf32(device)
