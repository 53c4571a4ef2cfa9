"""A check of ``model.generate``: are log-probs the same in a batch, alone and in a forward?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from fastrl.data.batch import pad
from fastrl.models.layout import EncoderDecoder, Layout, layout_of
from fastrl.models.probes import narrowed, reach
from fastrl.models.utils import base_of, computes_in_tf32
from fastrl.rollout.self_check import why_sharded

_LENGTHS, _ALIKE = (7, 3, 5), (5, 5)  # least lengths of prompts with padding, and without
_STEPS = 4
# Allowed differences of log-probs: in fp32 the largest, in lower precision the mean.
_EXACT, _ROUNDED = 1e-3, 0.1
# The answers of by_itself for each model, by its argument ``padded``.
_answers: WeakKeyDictionary[Any, dict[bool, bool]] = WeakKeyDictionary()


def together(model: Any, prompts: Sequence[Any], most: int) -> int:
    """How many prompts may share a call of ``generate``: ``most``, or 1 where the other prompts of
    a batch, or padding, change what it draws, see :func:`by_itself`."""
    padded = most > 1 and len({len(prompt) for prompt in prompts}) > 1
    return 1 if by_itself(model, padded) else most


@torch.no_grad()
def by_itself(model: Any, padded: bool) -> bool:
    """Whether prompts are to be run one at a time, because ``generate`` has other log-probs for the
    next token in a batch than alone. Warns if so, and where ``generate`` has other log-probs than
    the model's forward, by which it is trained.

    A model is checked once with padding and once without, on random prompts. A model that is not of
    transformers, is sharded, has another ``generate`` or refuses the prompts is not checked.

    Args:
        padded: the prompts have several lengths.

    Raises:
        ValueError: transformers cannot generate with a model of this class.
    """
    inner, plain = getattr(model, "pretrained_model", model), base_of(model)
    # Processes that share weights would wait for one that has nothing to check.
    if not isinstance(plain, GenerationMixin) or why_sharded(model) is not None:
        return False
    if any("generate" in vars(each) for each in (model, inner, plain)):
        return False  # the user's own generate, which may count its calls
    answers = _answers.setdefault(model, {})
    if padded not in answers:
        assert isinstance(plain, nn.Module)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), narrowed(plain):
            answers[padded] = _differs(model, plain, layout_of(model), padded, first=not answers)
    return answers[padded]


def _differs(model: Any, plain: Any, layout: Layout, padded: bool, first: bool) -> bool:
    vocabulary = plain.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    longest, *others = _LENGTHS if padded else _ALIKE
    longest += reach(plain, longest + _STEPS)
    lengths = [longest, *(others if padded else [longest])]
    low = min(5, vocabulary - 1)  # behind most special tokens
    prompts = [torch.randint(low, vocabulary, (n,), generator=generator) for n in lengths]
    name, forward = type(plain).__name__, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run's own calls will warn
            alone = torch.cat([_log_probs(model, layout, [prompt]) for prompt in prompts])
            together = _log_probs(model, layout, prompts)
            if first and not isinstance(layout, EncoderDecoder):
                forward = torch.stack([_of_forward(plain, prompt) for prompt in prompts])
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"{name}: model.generate of transformers does not run ({type(error).__name__}: "
            f"{error}): train another model, or bring responses by a rollout_func"
        ) from error
    except Exception:
        return False
    off = None if forward is None else _off(plain, alone, forward)
    if off is not None:
        warnings.warn(
            f"{name}: model.generate computes other log-probs than the model's forward (off by "
            f"{off:.1e}), so that responses are drawn from another distribution than is learned: "
            "train another model, or bring responses by a rollout_func",
            stacklevel=4,
        )
    off = _off(plain, alone, together)
    if off is not None:
        cause = "padding changes" if padded else "the prompts of a batch change"
        warnings.warn(
            f"{name}: {cause} what model.generate draws (log-probs are off by {off:.1e}), so that "
            "rollouts run one prompt at a time",
            stacklevel=4,
        )
    return off is not None


def _off(plain: Any, expected: Tensor, drawn: Tensor) -> float | None:
    """The amount by which log-probs differ; None where it is no more than rounding."""
    same = torch.isfinite(expected) & torch.isfinite(drawn)
    if not same.any():
        return None
    off = (expected - drawn).abs()[same]
    device = next(plain.parameters()).device
    dtypes = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    exact = dtypes <= {torch.float32, torch.float64} and not computes_in_tf32(device)
    exact = exact and not torch.is_autocast_enabled(device.type)
    largest = float(off.max() if exact else off.mean())
    return largest if largest > (_EXACT if exact else _ROUNDED) else None


def _forced(step: int, vocabulary: int) -> int:
    """The token that every prompt goes on with at a step."""
    return (7 + 3 * step) % vocabulary


def _of_forward(plain: Any, prompt: Tensor) -> Tensor:
    """Log-probs [steps, V] of one prompt as in :func:`_log_probs`, from one forward."""
    vocabulary = plain.config.get_text_config().vocab_size
    further = torch.tensor([_forced(step, vocabulary) for step in range(_STEPS - 1)])
    ids = torch.cat([prompt, further])[None].to(plain.device)
    logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].float().log_softmax(-1).cpu()


def _log_probs(model: Any, layout: Layout, prompts: list[Tensor]) -> Tensor:
    """Log-probs [B, steps, V] of the next tokens, where each prompt goes on with the same ones."""
    padded = pad(prompts, 0, layout.prompts_padded)
    inputs = {name: x.to(model.device) for name, x in padded.items()}
    front = layout.in_front(inputs["input_ids"].shape[1])

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, _forced(ids.shape[1] - front, scores.shape[1])] = 0
        return chosen

    out = model.generate(
        **inputs,
        max_new_tokens=_STEPS,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[forced],
        return_dict_in_generate=True,
        output_logits=True,
    )
    if isinstance(out, Tensor):
        raise TypeError("generate is a program's own, which knows no return_dict_in_generate")
    return torch.stack(out.logits, dim=1).float().log_softmax(-1).cpu()
