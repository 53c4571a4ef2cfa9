"""Trainers that keep their reference each in its way, and what a step of theirs costs."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from benchmarks.before import rollout_cases
from benchmarks.before.memory import footprint
from benchmarks.before.ppo_worker import padding_tokenizer
from benchmarks.before.reference_cases import (
    CHECKPOINTED,
    CHECKPOINTING,
    MODES,
    Case,
    Mode,
    Samples,
    samples,
)
from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.models.modes import evaluating

# What step() spends, by its own clock; the trunk's pass over a batch is part of its first phase.
TIMERS = {"scores": "time/ppo/forward_pass", "update": "time/ppo/optimize_step"}
LORA_RANK = 8
# Of attention alone: GPT-2's c_proj would be that of its MLP too.
_ATTENTION = {
    "gpt2": ["attn.c_attn", "attn.c_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@dataclasses.dataclass
class Observation:
    """Bytes that a trainer keeps and needs.

    Weights are those of policy and reference, each storage counted once; `boundaries` is what a
    trunk made of a batch; `peak` is the most that is live at a time during an update beyond all of
    these: activations and gradients.
    """

    weights: int
    weights_on_host: int
    optimizer: int
    boundaries: int = 0
    samples_run_again: int = 0  # whose boundary was not kept
    peak: int = 0


@dataclasses.dataclass
class Side:
    """A trainer that steps on the same batch again and again."""

    trainer: PPOTrainer
    data: Samples
    checkpointing: bool = False

    def step(self) -> dict[str, float]:
        """Seconds by phase: those of `TIMERS`."""
        # The trainer's own setting: it is read at every update.
        self.trainer.config.gradient_checkpointing = self.checkpointing
        with warnings.catch_warnings():
            # The responses were drawn at random, not by the policy.
            warnings.filterwarnings("ignore", message="the KL estimate is negative")
            stats = self.trainer.step(*self.data)
        return {phase: stats[timer] for phase, timer in TIMERS.items()}

    def reference_logprobs(self) -> Tensor:
        """Of all response tokens, [N], sample by sample."""
        batch = self.trainer._make_batch(self.data.queries, self.data.responses, None)
        with evaluating(self.trainer.model):
            return self.trainer._score(batch).ref_logprobs[batch.mask]

    def observe(self) -> Observation:
        """What is kept and needed, by a further step."""
        device = self.trainer.current_device
        seen = self._weights()
        update = self.trainer._update

        def watched(batch: Any, experience: Any) -> Any:
            if batch.boundaries is not None:
                kept = batch.boundaries._kept
                seen.boundaries = storage_bytes(kept.values())
                seen.samples_run_again = len(batch) - len(kept)
            done: list[Any] = []
            used = footprint(
                lambda: done.append(update(batch, experience)), lambda _: (), torch.device(device)
            )
            seen.peak = used.peak
            return done[0]

        self.trainer._update = watched  # type: ignore[assignment]
        try:
            self.step()
        finally:
            self.trainer._update = update
        return seen

    def _weights(self) -> Observation:
        models = [self.trainer.model, self.trainer.ref_model]
        weights = [p for model in models if model is not None for p in model.parameters()]
        here = torch.device(self.trainer.current_device).type
        on_host = [p for p in weights if p.device.type != here]
        states = self.trainer.optimizer.state.values()
        return Observation(
            weights=storage_bytes(p for p in weights if p.device.type == here),
            weights_on_host=storage_bytes(on_host),
            optimizer=storage_bytes(x for s in states for x in s.values() if torch.is_tensor(x)),
        )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages below tensors, each counted once."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def sides(case: Case, device: torch.device) -> tuple[dict[str, Side], dict[str, str]]:
    """All sides of a case by name; and for those that cannot be made, why."""
    data = samples(case)
    found, absent = {}, {}
    for name, mode in MODES.items():
        try:
            found[name] = Side(trainer(case, mode, device), data)
        except ImportError as error:
            absent[name] = f"not installed ({error})"
            continue
        if name in CHECKPOINTED:
            found[name + CHECKPOINTING] = Side(found[name].trainer, data, checkpointing=True)
    return found, absent


@contextlib.contextmanager
def own_accelerate() -> Iterator[None]:
    """While open, trainers may be made in another precision than those before; drop them first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def trainer(case: Case, mode: Mode, device: torch.device) -> PPOTrainer:
    """One with a policy of its own, whose weights are the same in every mode.

    Raises:
        ImportError: an adapter, without PEFT.
    """
    config = PPOConfig(
        batch_size=case.samples,
        mini_batch_size=case.mini_batch,
        ppo_epochs=1,
        old_logprobs="recompute",
        reference=mode.reference,
        num_shared_layers=mode.shared_layers(case.shape.layers),
        init_kl_coef=0.0 if mode.reference == "none" else 0.2,
        accelerator_kwargs={
            "cpu": device.type == "cpu",
            "mixed_precision": "bf16" if case.precision == "bf16" else "no",
        },
    )
    base = rollout_cases.build(case.shape, device)
    # A tied head that a trunk freezes is told of by the tables; PEFT has deprecations of others.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            base,
            peft_config=_lora(case) if mode.reference == "adapter" else None,
            summary_dropout_prob=0.0,
        )
        return PPOTrainer(config, model, tokenizer=padding_tokenizer())


def _lora(case: Case) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK,
        target_modules=_ATTENTION[case.shape.family],
        fan_in_fan_out=case.shape.family == "gpt2",
        task_type="CAUSAL_LM",
    )
