"""Self-check of ``model.generate``: does a prompt beside padding go on as it does alone?"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from fastrl.data.batch import pad
from fastrl.models.layout import Layout
from fastrl.models.probes import narrowed, reach
from fastrl.models.utils import computes_in_tf32
from fastrl.rollout.self_check import why_sharded

_LENGTHS, _STEPS = (7, 3, 5), 4
_EXACT, _ROUNDED = 1e-3, 0.1  # of log-probs: the largest difference in fp32, the mean one in less
_answers: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@torch.no_grad()
def by_itself(model: Any, layout: Layout) -> bool:
    """Whether prompts of several lengths are to be run one at a time, with a warning that says so:
    where the log-probs of what ``generate`` draws next are others beside padding than alone.

    Found once for each model, on random prompts; not where another object than a model of
    transformers generates, nor where the model fails, which then says so itself.
    """
    inner = getattr(model, "pretrained_model", model)
    plain = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    # Processes that share weights would wait for one that has nothing to check.
    if not isinstance(plain, GenerationMixin) or why_sharded(model) is not None:
        return False
    if model not in _answers:
        assert isinstance(plain, nn.Module)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), narrowed(plain):
            _answers[model] = _differs(model, plain, layout)
    return _answers[model]


def _differs(model: Any, plain: Any, layout: Layout) -> bool:
    vocabulary = plain.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    longest, *others = _LENGTHS
    lengths = [longest + reach(plain, longest + _STEPS), *others]
    low = min(5, vocabulary - 1)  # behind most special tokens
    prompts = [torch.randint(low, vocabulary, (n,), generator=generator) for n in lengths]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the calls of the run say the same
            alone = torch.cat([_log_probs(model, layout, [prompt]) for prompt in prompts])
            together = _log_probs(model, layout, prompts)
    except Exception:
        return False
    same = torch.isfinite(alone) & torch.isfinite(together)
    off = (alone - together).abs()[same]
    single = {p.dtype for p in plain.parameters() if p.is_floating_point()}
    exact = single <= {torch.float32, torch.float64} and not computes_in_tf32(model.device)
    exact = exact and not torch.is_autocast_enabled(model.device.type)
    found = 0.0 if not len(off) else float(off.max() if exact else off.mean())
    if found <= (_EXACT if exact else _ROUNDED):
        return False
    warnings.warn(
        f"{type(plain).__name__}: padding changes what model.generate draws (log-probs are off by "
        f"{found:.1e}), so that rollouts run one prompt at a time",
        stacklevel=5,
    )
    return True


def _log_probs(model: Any, layout: Layout, prompts: list[Tensor]) -> Tensor:
    """Of every next token [B, steps, V], where each prompt goes on with the same tokens."""
    padded = pad(prompts, 0, layout.prompts_padded)
    inputs = {name: x.to(model.device) for name, x in padded.items()}
    front = layout.in_front(inputs["input_ids"].shape[1])

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, (7 + 3 * (ids.shape[1] - front)) % scores.shape[1]] = 0
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
    return torch.stack(out.logits, dim=1).float().log_softmax(-1).cpu()
