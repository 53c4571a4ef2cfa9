"""How PPOTrainer generates responses, and what it remembers of them until the next update."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.data.prompt_ids import check_tensors
from fastrl.models.layout import layout_of
from fastrl.ppo.experience import TokenFigures, rollout_logprobs
from fastrl.ref_model import RefModel
from fastrl.rollout import (
    GenerateEngine,
    RolloutEngine,
    RolloutOutput,
    choose_engine,
    sampling_params,
)
from fastrl.rollout.generation_kwargs import (
    Change,
    changes_of_the_draw,
    is_sampled,
    policy_kwargs,
    unpacked,
)

REMEMBERED = 1 << 14  # samples, the latest


class Rollouts:
    """Responses of the policy and of the reference, and the policy's log-probs of its own.

    Args:
        config: says the temperature T of the policy softmax(logits / T), and the backend.
        policy: the model.
        wrapped: the same, as accelerate has wrapped it.
        tokenizer: of the policy.
        reference: what the policy is compared with.
        optimizer: whose steps make the log-probs out of date; torch's own.
        accelerator: for autocast, and the device.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: Any,
        wrapped: nn.Module,
        tokenizer: Any,
        reference: RefModel,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
    ):
        self.config = config
        self.model, self.reference = wrapped, reference
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.layout = layout_of(policy)
        self.backend = make_backend(config, tokenizer, accelerator.autocast)
        self.arguments = SamplingArguments(policy, config.temperature)
        self.memory = RolloutMemory(policy, optimizer, config.temperature)

    def generate(
        self,
        queries: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """As :meth:`fastrl.PPOTrainer.generate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        single = isinstance(queries, Tensor)
        prompts = [queries] if isinstance(queries, Tensor) else list(queries)
        check_tensors(prompts)
        generation_kwargs = self.arguments.of_generate(generation_kwargs)
        contexts: list[AbstractContextManager[Any]] = [contextlib.nullcontext(self.model)]
        if generate_ref_response:
            contexts.append(self.reference.as_policy())
        results = []
        for reference, context in zip((False, True), contexts, strict=False):
            limits = None
            if length_sampler is not None:
                drawn = [length_sampler() for _ in range(0, len(prompts), batch_size)]
                limits = [drawn[i // batch_size] for i in range(len(prompts))]
            with context as model:
                request = Request(prompts, generation_kwargs, batch_size, limits, reference)
                output = self._run(model, request)
            responses = [r.to(self.accelerator.device) for r in output.sequences]
            if return_prompt:
                responses = [
                    self.layout.with_prompt(q.to(r.device), r)
                    for q, r in zip(prompts, responses, strict=True)
                ]
            results.append(responses[0].unsqueeze(0) if single else responses)
        return tuple(results) if generate_ref_response else results[0]

    def sample(
        self, prompts: Sequence[Tensor], generation_kwargs: dict[str, Any], samples: int = 1
    ) -> RolloutOutput:
        """Responses of the policy, without their prompts, with reasons of ending and timings;
        ``samples`` to each prompt, one after the other.

        They are sampled from softmax(logits / T), but for what ``generation_kwargs`` says; of the
        model's generation_config only the tokens that end a response act.

        Raises:
            ValueError: another temperature in ``generation_kwargs``.
        """
        kwargs = self.arguments.of_the_policy(generation_kwargs)
        return self._run(
            self.model, Request(prompts, kwargs, self.config.batch_size, samples=samples)
        )

    def decode(self, prompt: Tensor, response: Tensor) -> str:
        """A response as text, without special tokens."""
        return self.layout.decode(self.tokenizer, prompt, response)

    def logprobs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], rollout: RolloutOutput | None
    ) -> list[TokenFigures] | None:
        """Log-probs and values of responses, from ``rollout``, which generated them, or else as
        they are remembered; None where those of one are not known.

        Raises:
            ValueError: the responses are not the rollout's sequences.
        """
        if rollout is None:
            return self.memory.find(queries, responses)
        _check_sequences(rollout, responses)
        return rollout_logprobs(rollout, self.memory.policy, self.config.temperature)

    def before_update(self) -> None:
        """Frees what an update could use, where ``rollout_sleep`` asks for it."""
        self.backend.before_update()

    def _run(self, model: Any, request: Request) -> RolloutOutput:
        output = self.backend(self.accelerator.unwrap_model(model), request)
        if not request.reference:
            self.memory.keep(request.repeated(), output)
        return output


def _check_sequences(rollout: RolloutOutput, responses: Sequence[Tensor]) -> None:
    if len(rollout.sequences) != len(responses):
        raise ValueError(
            f"rollout holds {len(rollout.sequences)} samples for {len(responses)} responses: pass "
            "the one that generated them"
        )
    for i, (sequence, response) in enumerate(zip(rollout.sequences, responses, strict=True)):
        if not torch.equal(sequence.cpu(), response.cpu()):
            raise ValueError(f"rollout.sequences[{i}] is not responses[{i}]: pass both unchanged")


# ------------------------------------------------------------------ engine or model.generate


class Request(NamedTuple):
    """Responses to some prompts."""

    prompts: Sequence[Tensor]
    generation_kwargs: dict[str, Any]  # of ``model.generate``
    batch_size: int  # prompts per call of that
    limits: Sequence[int] | None = None  # max_new_tokens of each; the same within a batch
    reference: bool = False  # the model stands for the reference policy
    samples: int = 1  # responses to each prompt, one after the other

    def repeated(self) -> list[Tensor]:
        """The prompt of each response."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


class RolloutBackend(Protocol):
    """What generates the responses."""

    def __call__(self, model: Any, request: Request) -> RolloutOutput:
        """The responses of a model."""

    def before_update(self) -> None:
        """Frees what an update could use."""


class GenerateBackend:
    """``model.generate``, a batch of prompts at a time, with any of its keywords."""

    def __init__(self, tokenizer: Any, autocast: Callable[[], AbstractContextManager]):
        self.tokenizer, self.autocast = tokenizer, autocast

    def __call__(self, model: Any, request: Request) -> RolloutOutput:
        prompts, kwargs, size, limits = request.repeated(), *request[1:4]
        engine = GenerateEngine(model, self.tokenizer, size, self.autocast)
        if limits is None:
            return engine.generate_with(prompts, kwargs)
        whole = RolloutOutput(sequences=[], finish_reasons=[])
        for start in range(0, len(prompts), size):
            limited = {**kwargs, "max_new_tokens": limits[start]}
            part = engine.generate_with(prompts[start : start + size], limited)
            whole.sequences += part.sequences
            whole.finish_reasons += part.finish_reasons
        return whole

    def before_update(self) -> None:
        """Nothing is held."""


class EngineBackend:
    """The engine, which also says how likely each token was; what it cannot honour goes to
    ``model.generate``, with a warning that names the argument.

    Args:
        slots, kv_cache_bytes: of the engine.
        sleep: free its memory before updates.
    """

    def __init__(
        self,
        tokenizer: Any,
        autocast: Callable[[], AbstractContextManager],
        slots: int,
        kv_cache_bytes: int | None = None,
        sleep: bool = False,
    ):
        self.tokenizer, self.autocast = tokenizer, autocast
        self.slots, self.kv_cache_bytes, self.sleep = slots, kv_cache_bytes, sleep
        self.otherwise = GenerateBackend(tokenizer, autocast)
        self._engines: dict[tuple[int, bool], RolloutEngine | GenerateEngine] = {}
        self._warned: set[str] = set()

    def __call__(self, model: Any, request: Request) -> RolloutOutput:
        engine = self._engine(model, request.reference)
        if not isinstance(engine, RolloutEngine):
            return self.otherwise(model, request)
        params = sampling_params(request.generation_kwargs, model)
        if isinstance(params, str):
            self._warn(params)
            return self.otherwise(model, request)
        if request.limits is not None:
            params = replace(params, max_new_tokens=list(request.limits))
        # A prompt's samples share its prefill.
        params = replace(params, n=request.samples)
        return engine.generate(request.prompts, params)

    def before_update(self) -> None:
        if self.sleep:
            for engine in self._engines.values():
                engine.sleep()

    def _engine(self, model: Any, reference: bool) -> RolloutEngine | GenerateEngine:
        # A PEFT model is the policy or, with its adapter off, the reference.
        key = (id(model), reference)
        if key not in self._engines:
            self._engines[key] = choose_engine(
                model,
                self.tokenizer,
                autocast=self.autocast,
                max_slots=self.slots,
                kv_cache_bytes=self.kv_cache_bytes,
            )
        return self._engines[key]

    def _warn(self, argument: str) -> None:
        if argument not in self._warned:
            self._warned.add(argument)
            warnings.warn(
                f"the rollout engine does not know the argument {argument} of generate: rollouts "
                "go through model.generate, which is slower",
                stacklevel=6,
            )


def make_backend(
    config: PPOConfig, tokenizer: Any, autocast: Callable[[], AbstractContextManager]
) -> RolloutBackend:
    """By ``PPOConfig.rollout_backend``."""
    if config.rollout_backend == "generate":
        return GenerateBackend(tokenizer, autocast)
    budget = config.rollout_kv_cache_gib
    return EngineBackend(
        tokenizer,
        autocast,
        config.rollout_slots,
        None if budget is None else int(budget * 2**30),
        config.rollout_sleep,
    )


# ------------------------------------------------------------------ arguments of generate


class SamplingArguments:
    """What keyword arguments of ``model.generate`` become, for a policy softmax(logits / T).

    Args:
        model: the policy, with its generation_config.
        temperature: T.
    """

    def __init__(self, model: Any, temperature: float):
        self.model, self.temperature = model, temperature
        self._warned: set[str] = set()

    def of_the_policy(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For responses that an update learns from: sampled from the policy, but for what is given.

        Raises:
            ValueError: another temperature.
        """
        kwargs = policy_kwargs(given, self.model, self.temperature)
        self._warn("generation_kwargs", changes_of_the_draw(kwargs, self.model, self.temperature))
        return kwargs

    def of_training(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a whole run, in which greedy responses are hardly meant."""
        kwargs = self.of_the_policy(given)
        if not kwargs["do_sample"]:
            self._warn("generation_kwargs", [Change("do_sample", False, True, "")])
        return kwargs

    def of_generate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """For the classic ``generate()``, which keeps the rule of ``model.generate``: the model's
        generation_config stands in for what is not given. A temperature of the policy that is not 1
        has been asked for, and comes before that."""
        kwargs = unpacked(given)
        if self.temperature != 1 and is_sampled(kwargs, self.model):
            kwargs.setdefault("temperature", self.temperature)
        self._warn("generate", changes_of_the_draw(kwargs, self.model, self.temperature), 5)
        return kwargs

    def _warn(self, where: str, changes: Iterable[Change], stacklevel: int = 4) -> None:
        """Once for each field."""
        new = [change for change in changes if change.name not in self._warned]
        if not new:
            return
        self._warned |= {change.name for change in new}
        told = ", ".join(map(_told, new))
        remedy = ", ".join(f"{change.name}={change.neutral!r}" for change in new)
        if any(change.name == "temperature" for change in new):
            remedy += " (or set PPOConfig.temperature)"
        warnings.warn(
            f"{where}: {told} changes what tokens are drawn from. Log-probs, and with them the "
            f"ratio, the clip range and the KL, are those of softmax(logits / "
            f"{self.temperature:g}) without that, and only approximate for such responses: pass "
            f"{remedy} for those that step() learns from",
            stacklevel=stacklevel,
        )


_LONGEST = 40


def _told(change: Change) -> str:
    value = repr(change.value)
    value = value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"
    return f"{change.name}={value}" + (f" ({change.origin})" if change.origin else "")


# ------------------------------------------------------------------ what is remembered


class RolloutMemory:
    """The log-probs and values of the tokens that the policy, softmax(logits / temperature),
    generated, for as long as its weights stay."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, temperature: float = 1.0
    ):
        self.policy, self.temperature = policy, temperature
        # Fused steps raise no parameter's version. One may fail halfway: the hook is in front.
        optimizer.register_step_pre_hook(lambda *_: self._known.clear())
        self._version: tuple[int, int] | None = None
        self._known: dict[tuple[bytes, bytes], TokenFigures] = {}

    def keep(self, prompts: Sequence[Tensor], output: RolloutOutput) -> None:
        """Remembers samples, one per prompt."""
        figures = rollout_logprobs(output, self.policy, self.temperature)
        if figures is None:
            return
        self._forget_other_weights()
        for prompt, sequence, found in zip(prompts, output.sequences, figures, strict=True):
            self._known[_key(prompt, sequence)] = found
        for oldest in list(self._known)[: max(0, len(self._known) - REMEMBERED)]:
            del self._known[oldest]

    def find(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> list[TokenFigures] | None:
        """Of each response; None unless all came from here, token for token, under the current
        weights."""
        self._forget_other_weights()
        found = [self._known.get(_key(q, r)) for q, r in zip(queries, responses, strict=True)]
        return None if None in found else found  # type: ignore[return-value]

    def _forget_other_weights(self) -> None:
        version = weights_version(self.policy)
        if version != self._version:
            self._known.clear()
            self._version = version


def weights_version(model: nn.Module) -> tuple[int, int]:
    """Differs where a parameter has been written to or replaced, but for fused optimizers."""
    parameters = list(model.parameters())
    places = hash(tuple(p.data_ptr() for p in parameters))
    return sum(p._version for p in parameters), places


def _key(*sequences: Any) -> tuple[bytes, bytes]:
    prompt, response = (x.cpu().long().numpy().tobytes() for x in sequences)
    return prompt, response
