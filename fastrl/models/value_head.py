"""Policies: language models with a value head, and causal ones without values."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from fastrl.models import quantised
from fastrl.models.adapter_base import settle_adapters
from fastrl.models.adapters import NOT_TRAINED, RewardAdapter
from fastrl.models.attention import Attention, replaced
from fastrl.models.lm_head import last_hidden
from fastrl.models.load import check_causal, load_language_model, load_weights, with_adapter
from fastrl.models.model_files import find_file, model_folder, weights_in
from fastrl.models.routing import Routing
from fastrl.models.scorer import TokenScorer
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.sharding import is_spread, layers_to_spread
from fastrl.models.trunk import TRUNK_NAME, Trunk, verify_record
from fastrl.models.utils import cache_argument, cache_of, hidden_width, is_empty
from fastrl.run import hub
from fastrl.run.model_card import write_model_card
from fastrl.run.processor_files import write_processor
from fastrl.run.value_head_file import (
    HEAD_NAME,
    HEAD_PREFIX,
    INDEX_NAME,
    WEIGHTS_NAME,
    forget_index,
    write_value_head,
)

REWARD_PREFIX = "reward."  # begins the names of the reward adapter's score head, which is not saved
LANGUAGE_MODEL = "pretrained_model."

Wrapper = TypeVar("Wrapper", bound="PreTrainedModelWrapper")


class ValueHead(nn.Module):
    """V(h) = w·dropout(h) + b in fp32, also under autocast: [..., H] -> [..., 1].

    Args:
        config: the language model's configuration, for the width and perhaps summary_dropout_prob.
        summary_dropout_prob: dropout in front of the projection, where the config has none.
    """

    def __init__(self, config: Any, summary_dropout_prob: float = 0.1):
        super().__init__()
        p = getattr(config, "summary_dropout_prob", summary_dropout_prob)
        self.dropout = nn.Dropout(p) if p else nn.Identity()
        self.summary = nn.Linear(hidden_width(config), 1, dtype=torch.float32)

    @property
    def device(self) -> torch.device:
        return self.summary.weight.device

    def forward(self, hidden_states: Tensor) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return self.summary(self.dropout(hidden_states).to(self.summary.weight.dtype))


class PreTrainedModelWrapper(nn.Module):
    """A Hugging Face language model (``.pretrained_model``) with a value head (``.v_head``, None in
    classes without one).

    A checkpoint is that of the language model, with the value head beside it in another file;
    TRL 0.11's checkpoints, with ``v_head.summary.*`` among the weights, load too. The names in
    ``state_dict()`` are TRL's; ``load_state_dict()`` also takes those of ``named_parameters()``
    (``pretrained_model.*``).

    Args:
        pretrained_model: a language model of the class's kind, or a PEFT model around one.
        summary_dropout_prob: dropout of the value head, where the model's config has none.
        v_head_init_strategy: None keeps torch's initialisation; "normal" draws weights from
            N(0, v_head_initializer_range²) and sets the bias to 0.
        v_head_initializer_range: standard deviation of "normal".

    Raises:
        TypeError: not a Hugging Face model.
        ValueError: a model without a language-model head, with bidirectional attention, that does
            not read token ids, or of the other kind (with an encoder, or without one); prompt
            learning; an unknown strategy.
    """

    transformers_parent_class: Any
    is_encoder_decoder: bool
    has_values = True  # whether the class puts a value head on its models
    for_the_other_kind: str  # a remedy where a model has an encoder and should not, or vice versa
    # Usual names of an LM head, as TRL lists them; here heads are found by get_output_embeddings().
    lm_head_namings: tuple[str, ...] = ("lm_head", "embed_out", "output_layer")
    supported_args = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")

    def __init__(
        self,
        pretrained_model: Any,
        *,
        summary_dropout_prob: float = 0.1,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
    ):
        super().__init__()
        self._check(pretrained_model)
        quantised.settle(pretrained_model)
        settle_adapters(pretrained_model)
        self.pretrained_model: Any = pretrained_model
        self.config = pretrained_model.config
        self.is_peft_model = hasattr(pretrained_model, "peft_config")
        self.v_head: ValueHead | None = None
        if self.has_values:
            self.v_head = ValueHead(self.config, summary_dropout_prob).to(pretrained_model.device)
            _initialise(self.v_head, v_head_init_strategy, v_head_initializer_range)
        self.reward: RewardAdapter | None = None
        self.names_by_path = False  # whether the state dict has module names, pretrained_model.*
        self.scorer = TokenScorer()
        self.trunk: Trunk | None = None  # bottom layers that are shared with a reference
        # Functions, not methods: a copy of the module takes them along for itself.
        self.register_state_dict_post_hook(_shorten)
        self.register_load_state_dict_pre_hook(_lengthen)
        self.register_load_state_dict_post_hook(_shorten_missing)

    @classmethod
    def from_pretrained(
        cls: type[Wrapper],
        pretrained_model_name_or_path: str | os.PathLike | PreTrainedModel,
        *model_args: Any,
        peft_config: Any = None,
        reward_adapter: str | None = None,
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> Wrapper:
        """Loads a language model, or wraps one; a saved value head is loaded with it.

        Args:
            pretrained_model_name_or_path: a directory, a Hub id, or a model. A directory or id that
                holds a PEFT adapter loads its base model and the adapter; the folder of a run
                loads the ``model/`` in it.
            peft_config: puts a new adapter on the model; a quantised model is prepared for it.
            reward_adapter: a directory (a run's too) or Hub id of a sequence-classification adapter
                on the same base, for :meth:`compute_reward_score`. It is neither trained nor saved.
            is_trainable: whether a loaded adapter is trained further; else PPOTrainer refuses it.
            kwargs: arguments of the value head (see the class), and of transformers'
                ``from_pretrained``, such as ``quantization_config`` for a base in four bits.
                Weights load in fp32 unless ``dtype`` says otherwise, and from safetensors only.

        Raises:
            TypeError: neither a path, a Hub id nor a model; see the class.
            FileNotFoundError: a folder without a model, or an adapter's base that is not there.
            ValueError: layers that were shared with a reference differ from what was saved; see
                the class, ``load_language_model`` and ``with_adapter`` in fastrl.models.load, and
                :class:`fastrl.models.adapters.RewardAdapter`.
        """
        head_kwargs = {k: kwargs.pop(k) for k in cls.supported_args if k in kwargs}
        if isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            path = model_folder(pretrained_model_name_or_path, kwargs.get("subfolder"))
            base = load_language_model(
                path,
                cls.transformers_parent_class,
                *model_args,
                trainable=is_trainable,
                whole=peft_config is not None or reward_adapter is not None,
                **kwargs,
            )
            if not is_empty(base):
                verify_record(base, find_file(path, TRUNK_NAME, kwargs))
            saved_head = read_value_head(path, kwargs)
        elif isinstance(pretrained_model_name_or_path, nn.Module):
            base, saved_head = pretrained_model_name_or_path, {}
        else:
            raise TypeError(
                "pretrained_model_name_or_path must be a path, a Hub id or a model, got "
                f"{type(pretrained_model_name_or_path).__name__}"
            )
        base = with_adapter(base, peft_config)
        model = cls(base, **head_kwargs)
        if saved_head and model.v_head is not None:
            model.v_head.load_state_dict(saved_head)
        if reward_adapter is not None:
            hub = {k: v for k, v in kwargs.items() if k in ("token", "cache_dir")}
            model.reward = RewardAdapter(base, model_folder(reward_adapter), hub)
        return model

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        scoring: ScoringRequest | None = None,
        boundary: Tensor | None = None,
        attention: Attention | None = None,
        routing: Routing | None = None,
        **kwargs: Any,
    ) -> tuple | TokenScores:
        """(logits, loss, values) of all tokens, and the cache with ``return_past_key_values``; with
        ``scoring``, scores of the requested tokens. Raises ValueError for a ``boundary`` where the
        model shares no layers.

        Args:
            boundary: [B, T, H], the trunk's output for these tokens; its layers then do not run.
            attention: the attention to use in place of the model's own, such as a packed row's.
            routing: the routing of a mixture's experts, with ``scoring``.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        if scoring is not None:
            # Before layers are skipped: the first call runs them all.
            self.scorer.choose(self.pretrained_model, inputs)
            inputs |= {"attention": attention, "routing": routing}
            with self._starting_at(boundary):
                scored = self.scorer(self.pretrained_model, inputs, scoring)
            values = self._values(scored.hidden) if scoring.values else None
            return scored.scores._replace(values=values)

        inputs["output_hidden_states"] = True
        if past_key_values is not None:
            inputs[cache_argument(self.pretrained_model)] = past_key_values
        with self._starting_at(boundary), replaced(self.pretrained_model, attention):
            out = self.pretrained_model(**inputs)
        classic = (out.logits.float(), out.loss, self._values(last_hidden(out)))
        return (*classic, cache_of(out)) if return_past_key_values else classic

    def _values(self, hidden: Tensor) -> Tensor:
        """Values [...] of hidden states [..., H]; 0 without a value head."""
        if self.v_head is None:
            return hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32)
        return self.v_head(hidden).squeeze(-1)

    def _starting_at(self, boundary: Tensor | None) -> contextlib.AbstractContextManager:
        if boundary is None:
            return contextlib.nullcontext()
        if self.trunk is None:
            raise ValueError("boundary was given, but the model shares no layers: leave it out")
        return self.trunk.skipped(boundary)

    @classmethod
    def _check(cls, model: Any) -> None:
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
            raise TypeError(f"pretrained_model must be a Hugging Face model, got {name}")
        has_encoder = getattr(model.config, "is_encoder_decoder", False)
        if has_encoder != cls.is_encoder_decoder:
            kind = "an encoder–decoder" if has_encoder else "not an encoder–decoder"
            raise ValueError(f"{name} is {kind}: {cls.for_the_other_kind}")
        main_input = getattr(model, "main_input_name", "input_ids")
        if has_encoder and main_input != "input_ids":
            raise ValueError(
                f"{name} reads {main_input}, not token ids, which PPO does not support: use an "
                "encoder–decoder of texts"
            )
        check_causal(model)
        if model.get_output_embeddings() is None:
            raise ValueError(
                f"{name} has no language-model head: load it with "
                f"{cls.transformers_parent_class.__name__}, or choose a model that has one"
            )
        for adapter in getattr(model, "peft_config", {}).values():
            if getattr(adapter, "is_prompt_learning", False):
                raise ValueError(
                    f"{adapter.peft_type} is prompt learning, which PPO does not support: use LoRA "
                    "or another adapter on the weights"
                )

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoints the language model's activations. Trainers call it by one of two names."""
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        name = next(name for name in names if hasattr(self.pretrained_model, name))
        getattr(self.pretrained_model, name)(*args, **kwargs)

    gradient_checkpointing_enable = activation_checkpointing_enable

    def activation_checkpointing_disable(self) -> None:
        """Ends what :meth:`activation_checkpointing_enable` has begun."""
        names = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
        name = next(name for name in names if hasattr(self.pretrained_model, name))
        getattr(self.pretrained_model, name)()

    gradient_checkpointing_disable = activation_checkpointing_disable

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``generate`` of the language model."""
        return self.pretrained_model.generate(*args, **kwargs)

    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Scores every token with the reward adapter, [B, T, labels], without gradients; a sample's
        score is that of its last token.

        Raises:
            ValueError: there is no reward adapter.
        """
        if self.reward is None:
            raise ValueError("there is no reward adapter: pass reward_adapter to from_pretrained")
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        return self.reward(self.pretrained_model, inputs)

    @property
    def saved_adapters(self) -> list[str]:
        """Names of the adapters that are saved: all but a reference model's and a reward's."""
        held = getattr(self.pretrained_model, "peft_config", {})
        return [name for name in held if not name.startswith(NOT_TRAINED)]

    @property
    def _no_split_modules(self) -> Any:
        """Classes of the language model's layers, by which accelerate finds them for FSDP."""
        return layers_to_spread(self.pretrained_model)

    @property
    def device(self) -> torch.device:
        return self.pretrained_model.device if self.v_head is None else self.v_head.device

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Ties the language model's weights again, after they were replaced."""
        self.pretrained_model.tie_weights(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.pretrained_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.pretrained_model.get_output_embeddings()

    def disable_adapter(self) -> contextlib.AbstractContextManager:
        """Context in which a PEFT model's adapters are off; without any, nothing changes."""
        if self.is_peft_model:
            return self.pretrained_model.disable_adapter()
        return contextlib.nullcontext()

    def save_pretrained(
        self, save_directory: str | os.PathLike, state_dict: dict | None = None, **kwargs: Any
    ) -> None:
        """Saves a checkpoint. transformers, PEFT and vLLM load the language model or the adapter
        from it, this class also the value head, from ``value_head.safetensors``.

        TRL 0.11 does not read that file, and starts with a new value head without a warning: in
        TRL, pass the file's weights to the loaded model by
        ``model.post_init(safetensors.torch.load_file("folder/value_head.safetensors"))``.

        Args:
            state_dict: this model's state, where it had to be gathered from several devices; names
                are those of ``state_dict()`` or of ``named_parameters()``.
            kwargs: arguments of transformers' or PEFT's ``save_pretrained``, and with
                ``push_to_hub=True`` of :meth:`push_to_hub`, which is called at the end.
        """
        folder, is_main = Path(save_directory), kwargs.get("is_main_process", True)
        push = kwargs.pop("push_to_hub", False) and {
            "repo_id": kwargs.pop("repo_id", folder.absolute().name),
            **{name: kwargs.pop(name) for name in hub.OPTIONS if name in kwargs},
        }
        state = self.state_dict() if state_dict is None else state_dict
        base, heads = _split_state(state, (HEAD_PREFIX, REWARD_PREFIX))
        head = {k: v.contiguous() for k, v in heads.items() if k.startswith(HEAD_PREFIX)}
        if self.is_peft_model:
            # PEFT picks its own entries out of a whole state dict.
            kwargs.setdefault("selected_adapters", self.saved_adapters)
        elif is_main:
            forget_index(folder)
        self.pretrained_model.save_pretrained(save_directory, state_dict={**base}, **kwargs)
        if not is_main:
            return
        if self.is_peft_model:
            quantised.save_beside_adapter(self.pretrained_model, save_directory)
        write_value_head(folder, head, of_adapter=self.is_peft_model)
        write_processor(self.pretrained_model, folder)
        if self.trunk is not None:
            (folder / TRUNK_NAME).write_text(self.trunk.record(base))
        if push:
            self.push_to_hub(state_dict=state, **push)

    def load_weights(self, folder: str | os.PathLike) -> None:
        """Loads into this model the weights that :meth:`save_pretrained` wrote to ``folder``."""
        load_weights(self.pretrained_model, folder)
        if self.v_head is not None:
            self.v_head.load_state_dict(read_value_head(os.fspath(folder), {}))

    def push_to_hub(self, repo_id: str, state_dict: dict | None = None, **kwargs: Any) -> Any:
        """Uploads the files of :meth:`save_pretrained` and a model card; returns the commit.

        Args:
            state_dict: see :meth:`save_pretrained`.
            kwargs: see :func:`fastrl.run.hub.upload`, such as ``private``, ``token`` and
                ``commit_message``.
        """
        hub.check_options(kwargs)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, state_dict)
            write_model_card(folder, repo_id, self)
            return hub.upload(folder, repo_id, **kwargs)


def _initialise(head: ValueHead, strategy: str | None, spread: float) -> None:
    if strategy == "normal":
        nn.init.normal_(head.summary.weight, std=spread)
        nn.init.zeros_(head.summary.bias)
    elif strategy is not None:
        raise ValueError(f"unknown v_head_init_strategy {strategy!r}: choose None or 'normal'")


def read_value_head(path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """The value head's weights in a checkpoint; {} where it has none.

    They are read from ``value_head.safetensors``, else from among the language model's weights,
    where TRL 0.11 and earlier versions of fastrl wrote them.
    """
    weights = weights_in(_head_files(path, options))
    return {k.removeprefix(HEAD_PREFIX): x[:] for k, x in weights if k.startswith(HEAD_PREFIX)}


def with_value_head(model: Any, head: dict[str, Tensor]) -> PreTrainedModelWrapper:
    """A language model with a value head of the weights that :func:`read_value_head` returned."""
    decodes = not getattr(model.config, "is_encoder_decoder", False)
    kind = AutoModelForCausalLMWithValueHead if decodes else AutoModelForSeq2SeqLMWithValueHead
    wrapped = kind(model)
    assert wrapped.v_head is not None
    wrapped.v_head.load_state_dict(head)
    return wrapped


def _head_files(path: str, options: dict[str, Any]) -> Iterator[str]:
    """The files that hold a value head, or may hold one."""
    whole = find_file(path, HEAD_NAME, options) or find_file(path, WEIGHTS_NAME, options)
    if whole is not None:
        yield whole
        return
    index = find_file(path, INDEX_NAME, options)
    if index is None:
        return
    weight_map = json.loads(Path(index).read_text())["weight_map"]
    for shard in sorted({f for k, f in weight_map.items() if k.startswith(HEAD_PREFIX)}):
        file = find_file(path, shard, options)
        if file is not None:
            yield file


# A state dict's names are the language model's, as in TRL 0.11 (transformer.wte.weight), beside
# v_head.* and reward.*; load_state_dict() also takes module names
# (pretrained_model.transformer.wte.weight). Within another module, such as FSDP, DDP or a user's,
# a state dict's names are module names: sharded weights are gathered by their path.


def _split_state(state: dict[str, Any], prefixes: tuple[str, ...]) -> tuple[dict, dict]:
    """The language model's entries of a state dict, by the model's names, and the wrapper's, which
    begin with ``prefixes``; the state dict may use either naming."""
    of_wrapper = {name: x for name, x in state.items() if name.startswith(prefixes)}
    of_model = {
        name.removeprefix(LANGUAGE_MODEL): x for name, x in state.items() if name not in of_wrapper
    }
    return of_model, of_wrapper


def _shorten(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if prefix or module.names_by_path or is_spread(module):
        return
    entries = list(state.items())
    state.clear()  # the dict stays, and its order
    state.update((name.removeprefix(LANGUAGE_MODEL), x) for name, x in entries)


def _lengthen(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    children = tuple(f"{prefix}{name}." for name, _child in module.named_children())
    for name in list(state):
        if name.startswith(prefix) and not name.startswith(children):
            state[f"{prefix}{LANGUAGE_MODEL}{name.removeprefix(prefix)}"] = state.pop(name)


def _shorten_missing(module: nn.Module, incompatible: Any) -> None:
    """Renames missing and unexpected weights as :func:`_shorten` renames a state dict's."""
    if is_spread(module):
        return
    for names in incompatible:
        names[:] = [name.removeprefix(LANGUAGE_MODEL) for name in names]


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """Any Hugging Face causal LM (``.pretrained_model``) with a value head (``.v_head``).

    ``forward(input_ids, …)`` returns (logits in fp32 [B, T, V], the LM loss or None, values
    [B, T][, past_key_values]). Arguments, checkpoints and errors are those of
    :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForCausalLM
    is_encoder_decoder = False
    for_the_other_kind = "wrap it with AutoModelForSeq2SeqLMWithValueHead"


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """Any Hugging Face encoder–decoder, such as T5 or BART, with a value head on its decoder.

    ``forward(input_ids, attention_mask=…, decoder_input_ids=…, …)`` returns (logits in fp32
    [B, T, V], the LM loss or None, values [B, T][, past_key_values]) of the decoder's tokens.
    Arguments, checkpoints and errors are those of :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForSeq2SeqLM
    is_encoder_decoder = True
    for_the_other_kind = "wrap it with AutoModelForCausalLMWithValueHead"


class CausalLMPolicy(PreTrainedModelWrapper):
    """Any Hugging Face causal LM (``.pretrained_model``) as a policy that learns no values: where
    the method needs none, or a critic beside the policy learns them.

    Every value is 0. Checkpoints are the language model's own; arguments and errors are those of
    :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForCausalLM
    is_encoder_decoder = False
    has_values = False
    for_the_other_kind = "a policy without values is for causal language models"
