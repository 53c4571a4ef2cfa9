"""Chooses between padded batches and batches without padding, by comparing their results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from fastrl.data.batch import pad
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import ModelPass, Padded, Padding, TokenBatch
from fastrl.models.adapters import virtual_tokens
from fastrl.models.asked_once import asked_once
from fastrl.models.attention import hidden_window, replaced, why_not_replaceable
from fastrl.models.packed_attention import PackedAttention
from fastrl.models.probes import narrowed, reach
from fastrl.models.reward_head import padding_of, rewards_at, rewards_of_padded
from fastrl.models.scoring import ScoringRequest
from fastrl.models.utils import base_of, computes_in_tf32, evaluating

# Samples of the comparison: the prompt's number, and the lengths of prompt and response. Prompt 0
# gets up to 64 more tokens where the model reads tokens in blocks, to be longer than a block.
_SAMPLES = ((0, 3, 4), (1, 5, 2), (0, 3, 2), (2, 1, 3))
_CHANGED = 1  # the sample whose tokens are replaced; it shares its prompt with no other
# Allowed differences, relative to the mean size of results, or to 1 if that is less: the largest in
# fp32, the mean in lower precision, and the mean after a change of another sample's tokens.
_EXACT, _ROUNDED, _MOVED = 1e-4, 5e-2, 2e-3
Scores = Callable[[nn.Module, TokenBatch], Tensor]


def choose_padding(
    padding_free: bool,
    device: torch.device,
    precision: torch.dtype,
    *models: nn.Module | None,
    anywhere: Callable[[bool], bool] = bool,
) -> Padding:
    """The layout of batches that all models run: packed, if ``padding_free`` and the models'
    results do not depend on packing, else padded. A warning says why a model cannot run packed, but
    not for encoder–decoders, which run padded.

    Args:
        device: the device of the inputs.
        precision: the dtype of the lowest precision in which forward passes compute.
        models: fastrl's wrappers, as accelerate has prepared them.
        anywhere: returns whether a truth value is True in any process, so that all choose alike.
    """
    present = [model for model in models if model is not None]
    if any(_language_model(model).config.is_encoder_decoder for model in present):
        return Padded()
    if runs_packed(present, device, precision, asked=padding_free, anywhere=anywhere, stacklevel=3):
        return PaddingFree()
    return Padded() if anywhere(_needs_a_mask(device, precision, present)) else Padded(masked=False)


def runs_packed(
    models: Iterable[nn.Module],
    device: torch.device,
    precision: torch.dtype,
    scores: Scores | None = None,
    *,
    asked: bool = True,
    anywhere: Callable[[bool], bool] = bool,
    stacklevel: int = 2,
) -> bool:
    """Whether all models run packed batches, in all processes. Warnings say why a model does not,
    and, where batches are padded, whose results padding changes. ``asked`` is ``padding_free`` of
    :func:`choose_padding`; see there, and :func:`why_not_packed`, for the other arguments.
    """
    models, some_padded = list(models), not asked
    for model in models if asked else ():
        cause = why_not_packed(model, device, precision, scores)
        if cause is not None and not some_padded:
            name = type(_language_model(model)).__name__
            warnings.warn(f"{name}: batches are padded, because {cause}", stacklevel=stacklevel + 1)
        some_padded = some_padded or cause is not None
    packs = not anywhere(some_padded)
    for model in () if packs else models:
        cause = why_not_padded(model, device, precision, scores)
        if cause is not None:
            name = type(_language_model(model)).__name__
            warnings.warn(
                f"{name}: padding changes what it computes of a text ({cause}), and batches are "
                "padded: what is learned depends on the texts that share a batch. Batches of one "
                "text, or texts of one length, have no padding",
                stacklevel=stacklevel + 1,
            )
            break
    return packs


class Packing:
    """Whether a trainer's model runs batches without padding: found by :func:`runs_packed` at the
    first use, when the model is on its device.

    Args:
        device, precision, anywhere, scores: arguments of :func:`runs_packed`.
        context: makes the context in which the model runs.
        asks: returns whether the settings ask for batches without padding.
    """

    def __init__(
        self,
        device: torch.device,
        precision: torch.dtype,
        context: Callable[[], AbstractContextManager[Any]],
        anywhere: Callable[[bool], bool],
        asks: Callable[[], bool],
        scores: Scores,
    ):
        self.device, self.precision, self.context = device, precision, context
        self.anywhere, self.asks, self.scores = anywhere, asks, scores
        self._packs: bool | None = None

    def __call__(self, model: nn.Module) -> bool:
        if self._packs is None:
            options, asked = (self.device, self.precision, self.scores), self.asks()
            with self.context():
                self._packs = runs_packed([model], *options, asked=asked, anywhere=self.anywhere)
        return self._packs

    def padding(self, model: nn.Module) -> Padding:
        """The layout of batches, packed or padded, which the processes choose together."""
        return PaddingFree() if self(model) else Padded()


@asked_once
@torch.no_grad()
def why_not_packed(
    model: nn.Module, device: torch.device, precision: torch.dtype, scores: Scores | None = None
) -> str | None:
    """Why a model cannot run packed batches; None if it can.

    Packed results must be those of each sample alone, and must not change with another sample's
    tokens.

    Args:
        scores: returns a model's results for a batch; by default log-probs and values of responses.
    """
    score = scores or logprobs_and_values
    language_model = _language_model(model)
    wrapper: Any = extract_model_from_parallel(model)
    cause = why_not_replaceable(getattr(wrapper, "pretrained_model", wrapper))
    if cause is not None:
        return cause
    batch = _batch(language_model, device)
    observed = _Observed()
    packed = replace(batch, padding=observed)
    with evaluating(model), narrowed(model):
        try:
            expected = _alone(score, model, batch)
            results = score(model, packed)
            after = score(model, replace(packed, input_ids=_with_other_tokens(batch)))
        # A model that fails in any way runs padded batches.
        except Exception as error:
            return f"it cannot run them packed ({type(error).__name__}: {error})"
    windows = {window for each in observed.attentions for window in each.windows}
    cause = hidden_window(language_model, windows)
    if cause is not None or not expected.isfinite().any():
        return cause  # NaN weights are not the packed row's fault
    # A mean, since rounding within a model may move a single number by more.
    moved = (results - after).abs().flatten()
    moved = moved[_of_others(batch, results)]
    if not moved.mean() <= _MOVED * expected.abs().mean().clamp(min=1):
        return f"results of a sample move by {moved.max():.1e} with another sample's tokens"
    off = _difference(model, precision, results, expected)
    return None if off is None else f"its results are off by {off} when packed"


@asked_once
@torch.no_grad()
def why_not_padded(
    model: nn.Module, device: torch.device, precision: torch.dtype, scores: Scores | None = None
) -> str | None:
    """How much a model's results for padded batches differ from those for each sample alone, in
    words; None where they do not, or cannot be compared. Arguments are those of
    :func:`why_not_packed`."""
    score, batch = scores or logprobs_and_values, _batch(_language_model(model), device)
    with evaluating(model), narrowed(model):
        try:
            if virtual_tokens(model):
                return None  # rows with virtual tokens are longer than those of the comparison
            expected, padded = _alone(score, model, batch), score(model, batch)
        except Exception:
            return None  # the run's first batch gives the same error
    off = _difference(model, precision, padded, expected)
    return None if off is None else f"by {off}, for samples of several lengths"


def _alone(score: Scores, model: nn.Module, batch: TokenBatch) -> Tensor:
    """A model's results for each sample of a batch, computed for one sample at a time."""
    return torch.cat([score(model, batch.select([i])) for i in range(len(batch))], dim=-1)


class _Observed(PaddingFree):
    """The layout without padding, which keeps each pass's attention for :func:`why_not_packed`."""

    def __init__(self) -> None:
        self.attentions: list[PackedAttention] = []

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        model_pass = super().model_pass(batch)
        self.attentions.append(model_pass.inputs["attention"])
        return model_pass


def _with_other_tokens(batch: TokenBatch) -> Tensor:
    """The batch's token ids, with other tokens in sample :data:`_CHANGED`."""
    ids = batch.input_ids.clone()
    first = ids[_CHANGED, : batch.lengths[_CHANGED]]
    ids[_CHANGED, : len(first)] = first.roll(1)
    return ids


def _of_others(batch: TokenBatch, results: Tensor) -> Tensor:
    """A mask of flat results, False for sample :data:`_CHANGED`. The last dimension of ``results``
    is samples, or their response tokens."""
    counts = batch.response_lengths if results.shape[-1] != len(batch) else [1] * len(batch)
    others = torch.ones(sum(counts), dtype=torch.bool, device=results.device)
    begin = sum(counts[:_CHANGED])
    others[begin : begin + counts[_CHANGED]] = False
    return others.expand_as(results).flatten()


def _needs_a_mask(device: torch.device, precision: torch.dtype, models: list[nn.Module]) -> bool:
    """Whether one of the models needs the attention mask of a right-padded batch."""
    for model in models:
        batch = _batch(_language_model(model), device)
        with torch.no_grad(), evaluating(model):
            expected = logprobs_and_values(model, batch)
            try:
                unmasked = logprobs_and_values(model, replace(batch, padding=Padded(masked=False)))
            except Exception:  # the model needs a mask
                return True
        if _difference(model, precision, unmasked, expected) is not None:
            return True
    return False


def _difference(
    model: nn.Module, precision: torch.dtype, results: Tensor, expected: Tensor
) -> str | None:
    """The distance of a model's results from the expected ones, as text; None where it is allowed,
    or no expected number is finite."""
    single = torch.float32, torch.float64
    exact = precision in single and all(p.dtype in single for p in model.parameters())
    exact = exact and not computes_in_tf32(expected.device)
    sound = expected.isfinite()
    if not sound.any():
        return None
    difference = (results - expected).abs()[sound]
    size = expected[sound].abs().mean().clamp(min=1)
    off = difference.max() if exact else difference.mean()
    if off <= size * (_EXACT if exact else _ROUNDED):
        return None
    return f"{off:.1e}"


def _batch(language_model: Any, device: torch.device) -> TokenBatch:
    """A right-padded batch of random tokens, in which two samples share a prompt."""
    vocabulary = language_model.config.get_text_config().vocab_size
    padding = padding_of(language_model) or 0
    generator = torch.Generator().manual_seed(0)
    prompts: dict[int, Tensor] = {}
    sequences = []
    longer = reach(language_model, max(p + r for _, p, r in _SAMPLES))
    samples = [(n, p if n else p + longer, r) for n, p, r in _SAMPLES]
    for number, prompt, response in samples:
        ids = torch.randint(vocabulary, (prompt + response,), generator=generator)
        # Classifiers find the last token by the padding behind it.
        ids = torch.where(ids == padding, (ids + 1) % vocabulary, ids)
        ids[:prompt] = prompts.setdefault(number, ids[:prompt].clone())
        sequences.append(ids)
    padded = pad(sequences, padding, "right")
    queries, responses = [n for _, n, _ in samples], [n for _, _, n in samples]
    return TokenBatch.from_padded(
        padded["input_ids"], padded["attention_mask"], queries, responses
    ).to(device)


def logprobs_and_values(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Log-probs and values of the responses' tokens, [2, N], by one of fastrl's wrappers."""
    model_pass = batch.model_pass
    labels = batch.input_ids.flatten()[batch.rows() + 1]
    scores = model(**model_pass.inputs, scoring=ScoringRequest(model_pass.rows, labels))
    return torch.stack([scores.logprobs.float(), scores.values.float()])


def logprobs_of_labels(model: Any, batch: TokenBatch) -> Tensor:
    """A language model's log-probs of the responses' tokens, [N]."""
    model_pass, labels = batch.model_pass, batch.input_ids.flatten()[batch.rows() + 1]
    inputs = dict(model_pass.inputs)
    with replaced(_language_model(model), inputs.pop("attention", None)):
        logits = model(**inputs, use_cache=False).logits
    logprobs = logits.flatten(0, 1)[model_pass.rows].float().log_softmax(-1)
    return logprobs.gather(1, labels[:, None]).squeeze(1)


def rewards_of_samples(model: Any, batch: TokenBatch) -> Tensor:
    """A classifier's rewards, [labels, B]: by its forward for a padded batch, and by
    :func:`fastrl.models.reward_head.rewards_at` for a packed one."""
    if not isinstance(batch.padding, PaddingFree):
        inputs = batch.padded_inputs
        return model(**inputs, use_cache=False).logits.float().flatten(1).t()
    plain = extract_model_from_parallel(model)
    model_pass = batch.model_pass
    ends = model_pass.places.to(batch.input_ids.device).split(batch.lengths)
    rows = torch.stack([places[-1] for places in ends])
    return rewards_at(model, plain, rows, **model_pass.inputs).float().t()


@torch.no_grad()
def classifier_side(
    model: nn.Module,
    device: torch.device,
    precision: torch.dtype,
    *,
    anywhere: Callable[[bool], bool] | None = None,
    stacklevel: int = 2,
) -> str | None:
    """The side of padding on which a classifier gives each text the reward that it gets alone;
    "right" where that cannot be compared; None, with a warning, where neither side does.

    A comparison decides: most architectures want padding on the right, XLNet, which reads the last
    place, on the left; some (FNet) mix padding into the text.

    Args:
        device, precision, anywhere: see :func:`choose_padding`; ``anywhere`` is None for a single
            process.

    Raises:
        ValueError: padding is wrong on both sides, and there are several processes, which cannot
            run without it.
    """
    plain = _language_model(model)
    try:
        batch = {name: x.to(device) for name, x in _closed_texts(plain.config).items()}
    except (AttributeError, TypeError):  # no vocabulary: characters, or images
        return "right"
    padding = padding_of(plain)
    with evaluating(model):
        try:
            alone = rewards_of_padded(model, batch, None, padding).float()
        except Exception:  # the user's texts will give the same error
            return "right"
        size = alone.abs().mean()
        for side in ("right", "left"):
            padded = rewards_of_padded(model, batch, side, padding).float()
            off = _difference(model, precision, padded / size, alone / size)
            if not (anywhere or bool)(off is not None):
                return side
    if anywhere is not None:
        raise ValueError(
            f"{type(plain).__name__}: what it says of a text depends on the padding beside it, and "
            "several processes cannot do without padding: run it in one process"
        )
    warnings.warn(
        f"{type(plain).__name__}: what it says of a text depends on the padding beside it, so that "
        "texts are run without padding, those of one length at a time",
        stacklevel=stacklevel + 1,
    )
    return None


def _closed_texts(config: Any) -> dict[str, Tensor]:
    """Random texts of several lengths, padded on the right. They end with EOS, by which
    encoder–decoders find the end."""
    text = config.get_text_config()
    vocabulary, padding = text.vocab_size, text.pad_token_id
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, list) else end
    words = [i for i in range(min(vocabulary, 1000)) if i not in (padding, end)]
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in (7, 3, 5, 2):
        chosen = torch.randint(len(words), (length,), generator=generator).tolist()
        ends = [] if end is None else [end]
        texts.append(torch.tensor([*(words[i] for i in chosen), *ends]))
    return pad(texts, padding, "right")


def _language_model(model: nn.Module) -> Any:
    """The transformers model under accelerate's, fastrl's and PEFT's wrappers."""
    return base_of(extract_model_from_parallel(model))
