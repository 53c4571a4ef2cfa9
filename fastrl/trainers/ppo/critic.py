"""A critic that is a separate model beside the policy: the model, its optimizer and gradient."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.learn.engine import Engine
from fastrl.learn.loss import UpdateLoss, ValueLoss
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.models.critic import Critic
from fastrl.models.optimizer_state import (
    copy_weights,
    load_optimizer_state,
    optimizer_state,
    trained_weights,
)
from fastrl.models.optimizers import (
    keep_state,
    learning_rate_of,
    make_optimizer,
    set_learning_rate,
)
from fastrl.models.reward_head import give_padding
from fastrl.models.sharding import gathered_state_dict, spread
from fastrl.models.utils import model_identity, warn_of_lost_updates
from fastrl.run.checkpoints import BadCheckpoint, check_weights, describe_weights
from fastrl.run.contexts import attributes_set
from fastrl.run.processes import Processes
from fastrl.trainers.ppo.method import gradient_of, value_term_of
from fastrl.trainers.ppo.setup import loads_once, prepared

FOLDER = "critic"  # in a saved model's folder


def checked_critic(config: PPOConfig, critic: Any, policy: Any, tokenizer: Any) -> Critic | None:
    """The critic that was passed to a trainer, or that its configuration names, loaded; None
    without one.

    Args:
        critic: the argument ``critic`` of ``PPOTrainer``.

    Raises:
        TypeError: neither a path nor a model of transformers or PEFT.
        FileNotFoundError: a path without a model.
        ValueError: two critics; an advantage that needs no values; an encoder–decoder as policy; a
            model that shares trained weights with the policy, that :class:`Critic` refuses, or with
            fewer tokens than the tokenizer has.
    """
    if critic is not None and config.critic is not None:
        raise ValueError(
            f"critic is given, and PPOConfig.critic={config.critic!r} names another: leave one out"
        )
    critic = config.critic if critic is None else critic
    if critic is None:
        if config.critic_learning_rate is not None:
            warnings.warn(
                f"critic_learning_rate={config.critic_learning_rate} is of a critic of its own, "
                "and there is none: set critic, or leave critic_learning_rate out",
                stacklevel=3,
            )
        return None
    if not config.needs_values:
        raise ValueError(
            f"critic is for values, and advantage={config.advantage!r} learns none: leave it out, "
            "or choose advantage='gae'"
        )
    if getattr(policy, "is_encoder_decoder", False):
        raise ValueError(
            "a critic of its own reads a prompt and its response as one text, and the policy is an "
            "encoder–decoder: leave critic out, and the policy's value head learns the values"
        )
    if isinstance(critic, (str, os.PathLike)):
        weights = getattr(policy, "pretrained_model", policy)
        critic = Critic.from_pretrained(critic, dtype=weights.dtype)
    elif not isinstance(critic, Critic):
        critic = Critic(critic)
    shared = {id(p) for p in policy.parameters()} & {id(p) for p in critic.parameters()}
    trained = [p for m in (policy, critic) for p in m.parameters() if p.requires_grad]
    if any(id(p) in shared for p in trained):
        raise ValueError(
            "the critic has trained weights in common with the policy, and each would move the "
            "other's: pass a copy of the model (copy.deepcopy), or let the policy's value head "
            "learn the values"
        )
    vocabulary = critic.pretrained_model.get_input_embeddings().weight.shape[0]
    of_texts = len(tokenizer) - (tokenizer.pad_token_id == len(tokenizer) - 1)
    if vocabulary < of_texts:
        raise ValueError(
            f"the critic knows {vocabulary} tokens, and the tokenizer has {len(tokenizer)}: choose "
            "a critic of the policy's family, which reads the same token ids, or give both models "
            "the new tokens by resize_token_embeddings"
        )
    give_padding(critic, tokenizer)
    return critic


class CriticLearner:
    """Trains a critic, which learns the values in place of the policy's value head.

    Args:
        critic: the critic, not wrapped by accelerate.
        loss: the policy's loss, whose settings and denominators the critic's loss has.

    Attributes:
        model, unwrapped: the critic as accelerate has wrapped it, and as it is.
        gradient: the gradient of the value loss, which the optimizer steps along.
    """

    def __init__(
        self,
        config: PPOConfig,
        critic: Critic,
        accelerator: Accelerator,
        loss: UpdateLoss,
        nonfinite: NonFiniteNumbers,
        processes: Processes,
    ):
        rate = config.learning_rate
        rate = rate if config.critic_learning_rate is None else config.critic_learning_rate
        fused = not loads_once(accelerator)
        optimizer = make_optimizer(critic, config.optim, rate, config.optim_args, fused)
        if not config.master_weights:
            warn_of_lost_updates(critic, "set master_weights, or load the critic in float32")
        optimizer = keep_state(
            optimizer,
            master_weights=config.master_weights,
            on_host=config.offload_optimizer,
            device=accelerator.device,
            spread=accelerator.is_fsdp2,
        )
        self.config, self.unwrapped = config, critic
        with _own_layers(accelerator, critic):
            self.model, self.optimizer = prepared(accelerator, critic, optimizer)
        norm = config.max_grad_norm
        engine = Engine(accelerator, self.model, self.optimizer, norm, processes)
        self.gradient = gradient_of(
            config, engine, ValueLoss(loss, value_term_of(config)), nonfinite
        )

    def identity(self) -> str:
        """The critic's class and a checksum of frozen weights, which a resumed run must have."""
        identity = model_identity(self.unwrapped, None)
        return f"{identity['model']} {identity['frozen weights']}"

    def state_dict(self) -> dict[str, Any]:
        """The state after the last complete step; tensors are the critic's own, not copies, and
        spread over processes where the critic is."""
        spread(self.unwrapped)
        return {
            "weights": trained_weights(self.unwrapped),
            "optimizer": optimizer_state(self.optimizer, self.unwrapped),
            "optimizer_steps": self.gradient.engine.steps,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint for the state of another critic."""
        spread(self.unwrapped)
        trained = trained_weights(self.unwrapped)
        check_weights(describe_weights(state["weights"]), describe_weights(trained), "critic")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a :meth:`state_dict` that :meth:`check` has accepted."""
        copy_weights(trained_weights(self.unwrapped), state["weights"])
        load_optimizer_state(self.optimizer, self.unwrapped, state["optimizer"])
        self.gradient.engine.steps = state["optimizer_steps"]

    def follow_settings(self) -> None:
        """Sets the configuration's learning rate in place of the one that a checkpoint restored."""
        rate = self.config.critic_learning_rate
        set_learning_rate(self.optimizer, self.config.learning_rate if rate is None else rate)

    def statistics(self) -> dict[str, float]:
        return {"ppo/critic/learning_rate": learning_rate_of(self.optimizer)}

    def gathered(self, *, keep: bool) -> dict[str, Tensor] | None:
        """The weights of the critic's classifier by name, where they are spread over processes,
        else None. All processes must call this; ``keep``: whether this one gets them, else {}."""
        weights = gathered_state_dict(self.unwrapped, keep=keep)
        prefix = "pretrained_model."
        return None if weights is None else {k.removeprefix(prefix): x for k, x in weights.items()}

    def save_pretrained(
        self, folder: str | Path, state_dict: dict[str, Tensor] | None, tokenizer: Any
    ) -> None:
        """Saves the critic, with the tokenizer, in the subfolder ``critic`` of a model's folder, so
        that it can be loaded as a reward model.

        Args:
            state_dict: what :meth:`gathered` returned.
        """
        subfolder = Path(folder) / FOLDER
        self.unwrapped.save_pretrained(subfolder, state_dict=state_dict)
        tokenizer.save_pretrained(subfolder)


def _own_layers(accelerator: Accelerator, critic: Critic) -> AbstractContextManager[None]:
    """Context in which FSDP spreads the critic by the critic's kind of layers, where it differs
    from the policy's."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    names = None if plugin is None else plugin.transformer_cls_names_to_wrap
    kinds = {type(module).__name__ for module in critic.modules()}
    if plugin is None or not names or kinds & {*names}:
        return nullcontext()
    return attributes_set((plugin, "transformer_cls_names_to_wrap", None))


def check_states_critic(critic: CriticLearner | None, state: Mapping[str, Any]) -> None:
    """Raises BadCheckpoint for the state of a trainer with another critic than this one, or where
    one of the two has a critic and the other has none."""
    saved = state.get("critic")
    if (saved is None) != (critic is None):
        had = "no critic of its own" if saved is None else "a critic of its own"
        raise BadCheckpoint(
            f"resume: the checkpoint's run had {had}: make the trainer alike (critic)"
        )
    if critic is not None and saved is not None:
        critic.check(saved)
