"""The choice between padded and packed batches, by a comparison of the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from fastrl.data.batch import TokenBatch, pad
from fastrl.data.packing import Packing, Padded, PaddingFree
from fastrl.models.attention import replaced, why_not_replaceable
from fastrl.models.reward_head import rewards_at
from fastrl.models.scoring import ScoringRequest
from fastrl.models.utils import evaluating

# Samples of the comparison: the number of the prompt, its tokens and those of the response.
_SAMPLES = ((0, 3, 4), (1, 5, 2), (0, 3, 2), (2, 1, 3))
_EXACT, _ROUNDED = 1e-4, 5e-2  # the largest difference in fp32, the mean one in less


def choose_packing(
    padding_free: bool, device: torch.device, precision: torch.dtype, *models: nn.Module | None
) -> Packing:
    """The packing of batches that all these models run: packed, where their log-probs and values
    are those of padded batches; else padded, and a warning says why.

    Args:
        padding_free: False for padded batches.
        device: of the inputs.
        precision: the lowest in which forwards compute.
        models: fastrl's wrappers, as accelerate has prepared them.
    """
    given = [model for model in models if model is not None]
    if any(_language_model(model).config.is_encoder_decoder for model in given):
        return Padded()
    if not padding_free:
        return _padded(device, precision, given)
    for model in given:
        cause = why_not_packed(model, device, precision)
        if cause is not None:
            warnings.warn(
                f"{type(_language_model(model)).__name__}: batches are padded, and each response "
                f"runs its prompt for itself, because {cause}",
                stacklevel=3,
            )
            return _padded(device, precision, given)
    return PaddingFree()


@torch.no_grad()
def why_not_packed(
    model: nn.Module,
    device: torch.device,
    precision: torch.dtype,
    scores: Callable[[nn.Module, TokenBatch], Tensor] | None = None,
) -> str | None:
    """Why a model cannot run packed batches; None if it can.

    Args:
        scores: what a model says of a batch; by default log-probs and values of the responses.
    """
    score = scores or logprobs_and_values
    language_model = _language_model(model)
    cause = why_not_replaceable(language_model)
    if cause is not None:
        return cause
    batch = _batch(language_model, device)
    with evaluating(model):
        expected = score(model, batch)
        try:
            found = score(model, replace(batch, packing=PaddingFree()))
        # Any other failure: such a model runs padded batches.
        except Exception as error:
            return f"it cannot run them packed ({type(error).__name__}: {error})"
    return _difference(model, precision, found, expected)


def _padded(device: torch.device, precision: torch.dtype, models: list[nn.Module]) -> Padded:
    """Without attention masks where no model needs them."""
    masked, bare = Padded(), Padded(masked=False)
    for model in models:
        batch = _batch(_language_model(model), device)
        with torch.no_grad(), evaluating(model):
            expected = logprobs_and_values(model, replace(batch, packing=masked))
            try:
                found = logprobs_and_values(model, replace(batch, packing=bare))
            except Exception:  # it wants a mask
                return masked
        if _difference(model, precision, found, expected) is not None:
            return masked
    return bare


def _difference(
    model: nn.Module, precision: torch.dtype, found: Tensor, expected: Tensor
) -> str | None:
    sound = expected.isfinite()  # NaN weights are not the packing's fault
    if not sound.any():
        return None
    difference = (found - expected).abs()[sound]
    single = torch.float32, torch.float64
    exact = precision in single and all(p.dtype in single for p in model.parameters())
    if expected.is_cuda and torch.get_float32_matmul_precision() != "highest":
        exact = False  # TF32
    off = difference.max() if exact else difference.mean()
    if off <= (_EXACT if exact else _ROUNDED):
        return None
    return f"its results are off by {off:.1e} when packed"


def _batch(language_model: Any, device: torch.device) -> TokenBatch:
    """A right-padded batch of random tokens, in which two samples share a prompt."""
    vocabulary = language_model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts: dict[int, Tensor] = {}
    sequences = []
    for number, prompt, response in _SAMPLES:
        ids = torch.randint(vocabulary, (prompt + response,), generator=generator)
        ids[:prompt] = prompts.setdefault(number, ids[:prompt].clone())
        sequences.append(ids)
    padded = pad(sequences, 0, "right")
    queries, responses = [n for _, n, _ in _SAMPLES], [n for _, _, n in _SAMPLES]
    return TokenBatch.from_padded(
        padded["input_ids"], padded["attention_mask"], queries, responses
    ).to(device)


def logprobs_and_values(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Of the responses, [2, N], by one of fastrl's wrappers."""
    model_pass = batch.model_pass
    labels = batch.input_ids.flatten()[batch.rows() + 1]
    scores = model(**model_pass.inputs, scoring=ScoringRequest(model_pass.rows, labels))
    return torch.stack([scores.logprobs.float(), scores.values.float()])


def logits_of_labels(model: Any, batch: TokenBatch) -> Tensor:
    """A language model's logits of the responses' tokens, [N]."""
    model_pass, labels = batch.model_pass, batch.input_ids.flatten()[batch.rows() + 1]
    inputs = dict(model_pass.inputs)
    with replaced(_language_model(model), inputs.pop("attention", None)):
        logits = model(**inputs, use_cache=False).logits
    return logits.flatten(0, 1)[model_pass.rows].gather(1, labels[:, None]).float()


def rewards_of_tokens(model: Any, batch: TokenBatch) -> Tensor:
    """Scores of the places that predict the responses' tokens, [N, labels], by a decoder with a
    score head."""
    model_pass = batch.model_pass
    plain = extract_model_from_parallel(model)
    return rewards_at(model, plain, model_pass.rows, **model_pass.inputs).float()


def _language_model(model: nn.Module) -> Any:
    """The transformers model under accelerate's wrapper, ours and PEFT's."""
    wrapper: Any = extract_model_from_parallel(model)
    inner = getattr(wrapper, "pretrained_model", wrapper)
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner
