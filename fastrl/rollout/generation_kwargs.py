"""Keyword arguments of ``model.generate``: as SamplingParams, and those that change what tokens
are drawn from."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastrl.config import SAMPLED
from fastrl.models.utils import base_of
from fastrl.rollout.sampling_params import PROCESSORS, TRUNCATIONS, SamplingParams
from fastrl.settings import is_number

# Used where neither the caller nor the model's generation_config sets a value.
_DEFAULTS = {"max_new_tokens": 20, "do_sample": False, "top_k": 50}

# "stop" and "response_format" are ours, as in SamplingParams.
_SUPPORTED = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "repetition_penalty", "suppress_tokens", "bad_words_ids",
    "eos_token_id", "stop", "response_format",
)  # fmt: skip

# Arguments that change how tokens are computed or what is returned beside them, but no tokens.
_WITHOUT_EFFECT = (
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "cache_config",
    "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile",
    "continuous_batching_config", "synced_gpus", "low_memory", "renormalize_logits",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "early_stopping",
    "length_penalty", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight",
)  # fmt: skip

# Arguments that the engine does not implement, with the values that switch them off; so does None.
# Those that change what tokens are drawn from:
_UNSUPPORTED_CHANGES: dict[str, Any] = {
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "constraints": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "logits_processor": [],
    "prefix_allowed_tokens_fn": None,
    "custom_generate": None,
}
# The arguments above, and others that the engine does not implement, with such values:
_UNSUPPORTED: dict[str, Any] = {
    **_UNSUPPORTED_CHANGES,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "diversity_penalty": 0,
    "remove_invalid_values": False,
    "token_healing": False,
    "max_time": None,
    "stop_strings": None,
    "tokenizer": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "speculation_type": None,
    "use_mtp": False,
    "generation_config": None,
    "stopping_criteria": [],
    "assistant_model": None,
    "streamer": None,
    "negative_prompt_ids": None,
    "negative_prompt_attention_mask": None,
}

# More arguments that the engine does not implement, with such values; greedy decoding ignores them.
_UNSUPPORTED_SAMPLING: dict[str, Any] = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
}

# The types of arguments that have a single one.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "min_new_tokens", "min_length"), int),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), float),
    "do_sample": bool,
}
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}

# Defaults for responses that an update learns from.
_FROM_THE_POLICY = {"do_sample": True, "top_k": 0, "top_p": 1.0}
_NEW_TOKENS = 32

# Arguments that change what tokens are drawn from, with the values that do not; None does
# not, either. Greedy decoding ignores the truncations.
_TRUNCATIONS: dict[str, Any] = {**TRUNCATIONS, **_UNSUPPORTED_SAMPLING}
# Those that leave out tokens, and change nothing else: with policy_support="sampled" log-probs are
# over what is left.
CUTS = {
    *TRUNCATIONS,
    *("min_new_tokens", "suppress_tokens", "bad_words_ids", "response_format", "tool_choice"),
}
_CHANGES: dict[str, Any] = {
    **PROCESSORS,
    **{"bad_words_ids": [], "response_format": None},
    **_UNSUPPORTED_CHANGES,
}


def sampling_params(generation_kwargs: Mapping[str, Any], model: Any) -> SamplingParams | str:
    """SamplingParams that do the same as these arguments of ``model.generate``, or the name of the
    first argument that the engine does not implement.

    Missing arguments come from the model's generation_config, then from transformers' defaults:
    greedy, 20 new tokens, and when sampling top_k = 50.

    Args:
        model: a causal LM, or a value-head model around one.

    Raises:
        ValueError: max_new_tokens below 1, a NaN, a padding token below 0, a bad ``stop``, a top_k,
            top_p or min_p that leaves no token.
        TypeError: an argument of another type than it takes.
    """
    effective = _EffectiveKwargs(generation_kwargs, model)
    return effective.unsupported() or effective.unsupported_value() or effective.params()


def check_names(generation_kwargs: Mapping[str, Any], model: Any) -> None:
    """Raises ValueError for an argument that ``model.generate`` does not take, before it runs."""
    plain = base_of(model)
    names = {*_SUPPORTED, *_WITHOUT_EFFECT, *_UNSUPPORTED, *_UNSUPPORTED_SAMPLING}
    names |= {*vars(plain.generation_config)}
    for function in (plain.generate, plain.forward, plain.prepare_inputs_for_generation):
        names |= {*inspect.signature(function).parameters}
    if getattr(plain.config, "is_encoder_decoder", False):
        names |= {*inspect.signature(plain.get_encoder().forward).parameters}
    for name in generation_kwargs:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else "leave it out"
            raise ValueError(f"generation_kwargs: model.generate takes no {name!r}: {hint}")


def unpacked(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces a ``generation_config`` among arguments of ``model.generate`` by the fields that it
    sets; arguments beside it win, as in ``model.generate``."""
    kwargs = dict(generation_kwargs)
    config = kwargs.pop("generation_config", None)
    if config is None:
        return kwargs
    fields = {name: x for name, x in config.to_diff_dict().items() if x is not None}
    fields.pop("transformers_version", None)
    return {**fields, **kwargs}


def neutral_kwargs(model: Any) -> dict[str, Any]:
    """Arguments that undo generation_config's effects, but those of eos_token_id and do_sample."""
    config = _settings(model)
    off = _UNSUPPORTED | _UNSUPPORTED_SAMPLING | dict.fromkeys(_SUPPORTED) | _NEUTRAL
    kept = ("eos_token_id", "do_sample")
    return {name: off[name] for name in config if name in off and name not in kept}


def policy_kwargs(
    generation_kwargs: Mapping[str, Any], model: Any, temperature: float
) -> dict[str, Any]:
    """Arguments of ``model.generate`` for responses that an update learns from: sampled from the
    policy itself, softmax(logits / temperature), unless the caller's arguments change that. Of the
    model's generation_config only the tokens that end a response are used.

    Raises:
        ValueError: another temperature among the arguments.
    """
    by_caller = {name: x for name, x in generation_kwargs.items() if x is not None}
    by_caller = unpacked(by_caller)
    other = by_caller.get("temperature", temperature)
    if other != temperature:
        raise ValueError(
            f"generation_kwargs has temperature={other}, the policy that is trained has "
            f"{temperature}: leave it out and set PPOConfig(temperature={other}), so that the "
            "ratio, the clip range and the KL are of the policy that is sampled"
        )
    kwargs = {**neutral_kwargs(model), **_FROM_THE_POLICY, "temperature": temperature}
    if not {"max_new_tokens", "max_length"} & by_caller.keys():
        kwargs["max_new_tokens"] = _NEW_TOKENS
    kwargs |= by_caller
    if not kwargs["do_sample"]:
        # Greedy decoding ignores these, and transformers warns of their values.
        kwargs |= dict.fromkeys(("temperature", *_TRUNCATIONS))
    return kwargs


class Change(NamedTuple):
    """A field of ``model.generate`` that changes what tokens are drawn from."""

    name: str
    value: Any
    neutral: Any  # the value that changes nothing
    origin: str  # where the value is set; empty: by the caller


def changes_of_the_draw(
    generation_kwargs: Mapping[str, Any], model: Any, temperature: float
) -> list[Change]:
    """Lists the fields because of which ``model.generate`` does not draw from softmax(logits /
    temperature). For a greedy call, which draws nothing, fields set by its caller are left out."""
    effective = _EffectiveKwargs(generation_kwargs, model)
    neutral = _CHANGES
    if effective.sampled:
        neutral = {"temperature": temperature, **_TRUNCATIONS, **_CHANGES}
    if effective["min_new_tokens"] is None:  # else it wins over min_length
        neutral = {**neutral, "min_length": 0}
    changes = []
    for name, off in neutral.items():
        value, origin = effective[name], effective.origin(name)
        changed = value is not None and value != off and not (name == "min_length" and value < 0)
        if changed and (effective.sampled or origin):
            changes.append(Change(name, value, off, origin))
    return changes


def unknown_changes(changes: Iterable[Change], policy_support: str) -> list[Change]:
    """The changes of a draw that log-probs have no part in: all, or with sets those that do more
    than leave out tokens."""
    known = CUTS if policy_support == SAMPLED else ()
    return [change for change in changes if change.name not in known]


def refuse_unknown(changes: Iterable[Change], policy_support: str) -> None:
    """Raises ValueError for changes that no set can say, where log-probs are over sets."""
    unknown = unknown_changes(changes, policy_support)
    if unknown and policy_support == SAMPLED:
        raise ValueError(
            f"policy_support='sampled': {', '.join(map(_shown, unknown))} changes what tokens are "
            "drawn from by more than leaving some out: leave out "
            f"{', '.join(change.name for change in unknown)}, or set policy_support='full'"
        )


def warning_of(changes: Sequence[Change], temperature: float) -> str:
    """Says that log-probs are not those of what tokens are drawn from, and what to do."""
    remedy = ", ".join(f"{change.name}={change.neutral!r}" for change in changes)
    if any(change.name == "temperature" for change in changes):
        remedy += " (or set the trainer's temperature)"
    if all(change.name in CUTS for change in changes):
        remedy += " (or set policy_support='sampled')"
    return (
        f"{', '.join(map(_shown, changes))} changes what tokens are drawn from. Log-probs, and "
        "with them the ratio, the clip range and the KL, are those of softmax(logits / "
        f"{temperature:g}) without that, and only approximate for such responses: pass {remedy} "
        "for those that are learned from"
    )


def _shown(change: Change) -> str:
    value = repr(change.value)
    value = value if len(value) <= 40 else value[:39] + "…"
    return f"{change.name}={value}" + (f" ({change.origin})" if change.origin else "")


def is_sampled(generation_kwargs: Mapping[str, Any], model: Any) -> bool:
    """Whether ``model.generate`` would sample with these arguments."""
    return _EffectiveKwargs(generation_kwargs, model).sampled


class _EffectiveKwargs:
    """Arguments of one call, by their effective values."""

    def __init__(self, kwargs: Mapping[str, Any], model: Any):
        self.kwargs = kwargs
        _check_given(kwargs)
        self.vocabulary = model.config.get_text_config().vocab_size
        self.settings = _settings(model)
        self.sampled = bool(self["do_sample"])

    def __getitem__(self, name: str) -> Any:
        """The effective value; a None of the caller's replaces that of generation_config."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.settings.get(name, _DEFAULTS.get(name))

    def origin(self, name: str) -> str:
        """Where a value is set; empty: by the caller."""
        if name in self.kwargs:
            return ""
        return "the model's generation_config" if name in self.settings else "transformers' default"

    def unsupported(self) -> str | None:
        """The first argument that the engine does not implement."""
        unsupported = _UNSUPPORTED | (_UNSUPPORTED_SAMPLING if self.sampled else {})
        names = {*_SUPPORTED, *_WITHOUT_EFFECT, *_UNSUPPORTED, *_UNSUPPORTED_SAMPLING}
        for name in self.kwargs:
            if name not in names and name != "cache_implementation":
                return name
        for name in {**self.kwargs, **self.settings}:
            value = self[name]
            if name in unsupported and value is not None and value != unsupported[name]:
                return name
            if name == "cache_implementation" and value == "quantized":
                return name
        return None

    def unsupported_value(self) -> str | None:
        """The first argument with a value that the engine does not implement."""
        checks = {
            # max_length and min_length count the prompt; limits of new tokens win over them.
            "max_length": self["max_length"] is None or self._most_new() is not None,
            "min_length": self["min_new_tokens"] is not None or (self["min_length"] or 0) <= 0,
            "bad_words_ids": self._bad_words() is not None,
            "repetition_penalty": self._number("repetition_penalty", 1) > 0,
        }
        if self.sampled:
            self._check_cuts()
            checks["temperature"] = self._number("temperature", 1) > 0
        wrong = [name for name, holds in checks.items() if not holds]
        return next((name for name in self.kwargs if name in wrong), wrong[0] if wrong else None)

    def _check_cuts(self) -> None:
        """Raises ValueError for values with which nothing could be drawn."""
        top_k, top_p, min_p = (self._number(x, off) for x, off in TRUNCATIONS.items())
        rules = {
            "top_k": (top_k, "an integer, 0 (off) or positive", top_k >= 0 and top_k == int(top_k)),
            "top_p": (top_p, "in (0, 1]", top_p > 0),
            "min_p": (min_p, "in [0, 1]", 0 <= min_p <= 1),
        }
        for name, (value, rule, holds) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {value:g}")

    def params(self) -> SamplingParams:
        most = self._most_new()
        ends = None
        if self.kwargs.get("eos_token_id") is not None:
            ends = self._in_vocabulary(self["eos_token_id"])
            end_ids = [i for i in _ids(self["eos_token_id"]) if i >= 0]
            if end_ids and not ends:
                warnings.warn(
                    f"eos_token_id={end_ids[0]} is not in the model's vocabulary of "
                    f"{self.vocabulary} tokens, so that it ends no response: -1 says so "
                    "without this warning",
                    stacklevel=3,
                )
        suppressed = self._in_vocabulary(self["suppress_tokens"])
        truncation: dict[str, Any] = {"temperature": 0.0}
        if self.sampled:
            truncation = {
                "temperature": float(self._number("temperature", 1)),
                "top_k": int(self._number("top_k", 0)),
                "top_p": min(float(self._number("top_p", 1)), 1.0),
                "min_p": float(self._number("min_p", 0)),
            }
        return SamplingParams(
            max_new_tokens=_DEFAULTS["max_new_tokens"] if most is None else most,
            min_new_tokens=max(0, int(self._number("min_new_tokens", 0))),
            repetition_penalty=float(self._number("repetition_penalty", 1)),
            suppress_tokens=tuple(sorted({*suppressed, *(self._bad_words() or ())})),
            eos_token_ids=ends,
            stop=self["stop"] or (),
            response_format=self["response_format"],
            **truncation,
        )

    def _most_new(self) -> Any:
        """max_new_tokens as the caller or generation_config sets it; None where neither does."""
        if "max_new_tokens" in self.kwargs:
            return self.kwargs["max_new_tokens"]
        return self.settings.get("max_new_tokens")

    def _number(self, name: str, otherwise: float) -> float:
        return otherwise if self[name] is None else self[name]

    def _bad_words(self) -> list[int] | None:
        """Barred tokens that end no response; None where a longer or unknown word is barred."""
        words = self["bad_words_ids"] or []
        if not all(len(word) == 1 and 0 <= word[0] < self.vocabulary for word in words):
            return None
        return [int(word[0]) for word in words if word[0] not in _ids(self["eos_token_id"])]

    def _in_vocabulary(self, ids: Any) -> tuple[int, ...]:
        return tuple(i for i in _ids(ids) if 0 <= i < self.vocabulary)


def _check_given(kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument of ``model.generate`` of another type than it has, and
    ValueError for a NaN or a padding token below 0."""
    for name, kind in _KINDS.items():
        value = kwargs.get(name)
        if value is None:
            continue
        if not (isinstance(value, bool) if kind is bool else is_number(value)):
            expected = "True or False" if kind is bool else "a number"
            raise TypeError(f"generation_kwargs has {name}={value!r}: it must be {expected}")
        if value != value:
            raise ValueError(f"generation_kwargs has {name}=nan: it must be a number")
    pad = kwargs.get("pad_token_id")
    if pad is not None and (not is_number(pad) or pad < 0):
        raise ValueError(
            f"generation_kwargs has pad_token_id={pad!r}: pass the id of a token, such as "
            "tokenizer.eos_token_id, or leave it out"
        )


def _settings(model: Any) -> dict[str, Any]:
    """Fields that the model's generation_config sets."""
    config = getattr(model, "pretrained_model", model).generation_config
    return {name: value for name, value in config.to_dict().items() if value is not None}


def _ids(ids: Any) -> list[int]:
    """Ids as a list, from a number, a list, a set or a tensor; [] for None."""
    if ids is None:
        return []
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    return [int(i) for i in (ids if isinstance(ids, (list, tuple, set)) else [ids])]
