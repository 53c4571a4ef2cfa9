"""Generation of responses for PPOTrainer, and their log-probs until the next update."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import FULL, PPOConfig
from fastrl.data.batch import on_host
from fastrl.data.prompt_ids import check_tensors
from fastrl.learn.old_logprobs import known_of
from fastrl.learn.ref_model import RefModel
from fastrl.models.host_memory import to_device
from fastrl.models.layout import layout_of
from fastrl.models.routing import replays
from fastrl.models.sharding import whole_weights
from fastrl.rollout import sampling_params
from fastrl.rollout.backends import Request, make_backend
from fastrl.rollout.generation_kwargs import (
    Change,
    changes_of_the_draw,
    check_names,
    is_sampled,
    policy_kwargs,
    refuse_unknown,
    unknown_changes,
    unpacked,
    warning_of,
)
from fastrl.rollout.grammars import checked_format
from fastrl.run.processes import Processes
from fastrl.samples import Samples
from fastrl.trainers.policy_support import check_form
from fastrl_kernels import TokenSets

REMEMBERED = 1 << 14  # a RolloutMemory keeps at most so many samples, the latest ones


class Rollouts:
    """Samples responses of policy and reference, and keeps the policy's log-probs of its responses.

    Args:
        config: names the temperature T of the policy softmax(logits / T), and the backend.
        wrapped: ``policy``, wrapped by accelerate.
        optimizer: the policy's, not wrapped; its steps make the log-probs out of date.
        accelerator: gives autocast and the device.
        processes: each of which generates responses to prompts of its own.
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
        processes: Processes,
    ):
        self.config = config
        self.processes = processes
        self.model, self.reference = wrapped, reference
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.layout = layout_of(policy)
        self.replays = replays(policy, config.replay_routing)
        self.backend = make_backend(
            config,
            tokenizer,
            accelerator.autocast,
            processes.index,
            self.replays,
            config.policy_support,
        )
        self.arguments = SamplingArguments(
            policy, config.temperature, config.policy_support, config.response_format
        )
        check_form(self.arguments.defaults, policy, tokenizer)
        self.memory = RolloutMemory(policy, optimizer, config.temperature)
        # Hashes of torch's generator as generate() first drew since the last update, and since the
        # update before that; b"": it has not drawn.
        self._drew_from = self._earlier_drew_from = b""
        self._warned_of_seeds = False

    def generate(
        self,
        queries: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Samples responses, see :meth:`fastrl.PPOTrainer.generate`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        single = isinstance(queries, Tensor)
        prompts = [queries] if isinstance(queries, Tensor) else list(queries)
        check_tensors(prompts)
        (prompts,) = on_host(prompts)
        generation_kwargs = self.arguments.of_generate(generation_kwargs)
        if is_sampled(generation_kwargs, self.arguments.model):
            self._look_at_the_generator()
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
                first = self.processes.index * len(prompts)
                request = Request(
                    prompts,
                    range(first, first + len(prompts)),
                    generation_kwargs,
                    batch_size,
                    limits,
                    reference,
                )
                output = self._run(model, request)
            responses = output.sequences
            if return_prompt:
                responses = list(map(self.layout.with_prompt, prompts, responses))
            responses = [to_device(r, self.accelerator.device) for r in responses]
            results.append(responses[0].unsqueeze(0) if single else responses)
        return tuple(results) if generate_ref_response else results[0]

    def _look_at_the_generator(self) -> None:
        """Warns where torch's generator is as it was before the last update: something, such as a
        reward function, seeds it in every step, and all steps draw the same random numbers."""
        if self._drew_from:
            return
        self._drew_from = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()
        if self._drew_from == self._earlier_drew_from and not self._warned_of_seeds:
            self._warned_of_seeds = True
            warnings.warn(
                "generate() draws the same random numbers as before the last step(): something "
                "sets torch's seed in each step, such as a reward function that calls "
                "torch.manual_seed; let it draw from a torch.Generator of its own, or call train()",
                stacklevel=4,
            )

    def sample(
        self,
        prompts: Sequence[Tensor],
        generation_kwargs: dict[str, Any],
        samples: int = 1,
        seed: int | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> Samples:
        """Samples ``samples`` responses to each prompt; those of a prompt lie one after the other,
        without the prompt, with finish reasons and timings.

        Tokens are drawn from softmax(logits / T) unless ``generation_kwargs`` say otherwise; of the
        model's generation_config only the tokens that end a response are used.

        Args:
            seed: seeds the draws; None takes what is needed from torch's own generator.
            sample_ids: the prompts' numbers in the batch of all processes; with the seed they key
                the draws. None: their indices.

        Raises:
            ValueError: another temperature in ``generation_kwargs``.
        """
        kwargs = self.arguments.of_the_policy(generation_kwargs)
        batch_size = self.config.batch_size
        ids = range(len(prompts)) if sample_ids is None else sample_ids
        return self.run(Request(prompts, ids, kwargs, batch_size, samples=samples, seed=seed))

    def run(self, request: Request) -> Samples:
        """The policy's responses to a request, ``request.samples`` for each prompt."""
        return self._run(self.model, request)

    def decode(self, prompt: Tensor, response: Tensor) -> str:
        """A response as text, without special tokens."""
        return self.layout.decode(self.tokenizer, prompt, response)

    def known(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], rollout: Samples | None
    ) -> Samples:
        """The known columns of responses, from the ``rollout`` that generated them, else from the
        memory: old log-probs and values, where they are known of all responses, and the experts'
        choices where they are replayed.

        Raises:
            ValueError: the responses are not the rollout's sequences; a column of the rollout has
                another length or shape; choices that are to be replayed are not known.
            TypeError: ``rollout`` is no :class:`Samples`, or its numbers are no tensors.
        """
        if rollout is None:
            known = self.memory.find(queries, responses)
        else:
            _check_sequences(rollout, responses)
            known = known_of(rollout, self.memory.policy, self.config.temperature)
        if self.config.policy_support == FULL:
            if known.supports is not None and known.old_logprobs is not None:
                raise ValueError(
                    "rollout's log-probs are over the sets that tokens were drawn from, and "
                    "policy_support='full' takes those over the whole vocabulary: set "
                    "PPOConfig.policy_support='sampled', or sample with SamplingParams("
                    "policy_support='full')"
                )
            known = known.without("supports")
        elif known.supports is None:
            raise ValueError(
                "policy_support='sampled': it is not known what these responses were drawn from: "
                "pass the rollout= of an engine that records it (SamplingParams(policy_support="
                "'sampled')), let this trainer generate with the current weights, or set 'full'"
            )
        if not self.replays:
            return known.without("experts")
        if known.experts is None:
            raise ValueError(
                "replay_routing: the experts' choices of these responses are not known: pass the "
                "rollout= of an engine that keeps them (RolloutEngine(keep_experts=True)), let "
                "this trainer generate, or leave replay_routing out"
            )
        return known

    def ready(self) -> AbstractContextManager[None]:
        """Context in which sampling from the policy does not wait for other processes."""
        return whole_weights(self.model)

    def expect(self, tokens: int) -> None:
        """Announces the most tokens that a prompt with its response will have from now on."""
        self.backend.expect(tokens)

    def before_update(self) -> None:
        """Frees the engine's memory for an update where ``rollout_sleep`` is set; notes from which
        state of torch's generator :meth:`generate` drew."""
        self._earlier_drew_from, self._drew_from = self._drew_from, b""
        self.backend.before_update()

    def state_dict(self) -> dict[str, Any]:
        """The state beside weights on which the bits of later samples depend, as JSON."""
        return {"rooms": self.backend.rooms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.backend.reserve(state["rooms"])

    def _run(self, model: Any, request: Request) -> Samples:
        with whole_weights(model):
            output = self.backend(self.accelerator.unwrap_model(model), request)
        if not request.reference:
            self.memory.keep(request.repeated(), output)
        return output


def _check_sequences(rollout: Samples, responses: Sequence[Tensor]) -> None:
    if not isinstance(rollout, Samples):
        raise TypeError(
            f"rollout must be a fastrl.rollout.RolloutOutput, got {type(rollout).__name__}"
        )
    for name in ("sequences", "finish_reasons"):
        if getattr(rollout, name) is None:
            raise ValueError(f"rollout has no {name}: give one for each response")
    if len(rollout.sequences) != len(responses):
        raise ValueError(
            f"rollout holds {len(rollout.sequences)} samples for {len(responses)} responses: pass "
            "the one that generated them"
        )
    for i, (sequence, response) in enumerate(zip(rollout.sequences, responses, strict=True)):
        if not torch.equal(sequence.cpu(), response.cpu()):
            raise ValueError(f"rollout.sequences[{i}] is not responses[{i}]: pass both unchanged")
    for name in ("finish_reasons", "logprobs", "logprobs_t1", "entropies", "values", "supports"):
        column = getattr(rollout, name)
        if column is not None and len(column) != len(responses):
            raise ValueError(
                f"rollout.{name} has {len(column)} elements for {len(responses)} responses: give "
                "one for each"
            )
    for i, sets in enumerate(rollout.supports or ()):
        if not isinstance(sets, TokenSets) or len(sets) != len(responses[i]):
            found = len(sets) if isinstance(sets, TokenSets) else type(sets).__name__
            raise ValueError(
                f"rollout.supports[{i}] has {found}, responses[{i}] {len(responses[i])} tokens: "
                "give a fastrl_kernels.TokenSets with a set for each token"
            )
        if not sets.has(responses[i].cpu()).all():
            raise ValueError(
                f"rollout.supports[{i}] has a set without the token of responses[{i}] that was "
                "drawn from it: pass both unchanged"
            )
    for name in ("logprobs", "logprobs_t1", "values"):
        for i, numbers in enumerate(getattr(rollout, name) or ()):
            if not isinstance(numbers, Tensor):
                raise TypeError(
                    f"rollout.{name}[{i}] must be a tensor, got {type(numbers).__name__}: wrap it "
                    "in torch.tensor(...)"
                )
            if numbers.shape != responses[i].shape:
                raise ValueError(
                    f"rollout.{name}[{i}] has shape {tuple(numbers.shape)}, responses[{i}] "
                    f"{tuple(responses[i].shape)}: give one number for each token"
                )


class SamplingArguments:
    """Keyword arguments of ``model.generate`` for a policy softmax(logits / T), with warnings of
    those that make the responses come from another distribution.

    Args:
        model: the policy, with its generation_config.
        temperature: T.
        policy_support, response_format: see :class:`PPOConfig`; the format is that of calls that
            name none.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        policy_support: str = FULL,
        response_format: Any = None,
    ):
        self.model, self.temperature = model, temperature
        self.policy_support = policy_support
        form = checked_format(response_format)
        self.defaults = {} if form is None else {"response_format": form}
        self._warned: set[str] = set()

    def of_the_policy(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``generate()`` for responses that an update learns from: they are sampled
        from the policy unless ``arguments`` change that.

        Raises:
            ValueError: another temperature.
        """
        kwargs = policy_kwargs({**self.defaults, **arguments}, self.model, self.temperature)
        changes = changes_of_the_draw(kwargs, self.model, self.temperature)
        refuse_unknown(changes, self.policy_support)
        self._warn("generation_kwargs", changes)
        return kwargs

    def of_training(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`of_the_policy` for a whole run; warns of greedy decoding, too.

        Raises:
            ValueError: another temperature; an unknown argument; a value that is out of range.
        """
        check_names(arguments, self.model)
        kwargs = self.of_the_policy(arguments)
        sampling_params(kwargs, self.model)
        if not kwargs["do_sample"]:
            self._warn("generation_kwargs", [Change("do_sample", False, True, "")])
        return kwargs

    def of_generate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for the classic ``generate()``, as ``model.generate`` reads them: those left
        out come from the model's generation_config, but for a policy temperature other than 1."""
        kwargs = {**self.defaults, **unpacked(arguments)}
        if self.temperature != 1 and is_sampled(kwargs, self.model):
            kwargs.setdefault("temperature", self.temperature)
        self._warn("generate", changes_of_the_draw(kwargs, self.model, self.temperature), 5)
        return kwargs

    def _warn(self, where: str, changes: Iterable[Change], stacklevel: int = 4) -> None:
        """Warns of changes that log-probs have no part in, once of each argument."""
        unknown = unknown_changes(changes, self.policy_support)
        new = [change for change in unknown if change.name not in self._warned]
        if not new:
            return
        self._warned |= {change.name for change in new}
        warnings.warn(f"{where}: {warning_of(new, self.temperature)}", stacklevel=stacklevel)


class RolloutMemory:
    """Keeps log-probs, values and experts' choices of the responses of the policy
    softmax(logits / temperature) until its weights change."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, temperature: float = 1.0
    ):
        self.policy, self.temperature = policy, temperature
        # Fused steps change no version counter. A step may fail halfway: the hook runs before it.
        optimizer.register_step_pre_hook(lambda *_: self._forget())
        self._version: tuple[int, int] | None = None
        # By prompt and response: the samples that have the response, and its index in them.
        self._known: dict[tuple[bytes, bytes], tuple[Samples, int]] = {}

    def keep(self, prompts: Sequence[Tensor], output: Samples) -> None:
        """Keeps what is known of the samples of a rollout, one per prompt."""
        logprobs = known_of(output, self.policy, self.temperature)
        if logprobs.old_logprobs is None:
            return
        self._forget_other_weights()
        for i, both in enumerate(zip(prompts, output.sequences, strict=True)):
            self._known[_key(*both)] = logprobs, i
        for oldest in list(self._known)[: max(0, len(self._known) - REMEMBERED)]:
            del self._known[oldest]

    def find(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Samples:
        """The columns that were kept of all responses; no column unless all were generated here,
        token for token, with the current weights."""
        self._forget_other_weights()
        remembered = [self._known.get(_key(q, r)) for q, r in zip(queries, responses, strict=True)]
        rows = [x for x in remembered if x is not None]
        if len(rows) < len(remembered):
            return Samples()
        runs = [list(run) for _, run in itertools.groupby(rows, lambda row: id(row[0]))]
        return Samples.joined([run[0][0].select([i for _, i in run]) for run in runs])

    def _forget(self) -> None:
        self._known.clear()

    def _forget_other_weights(self) -> None:
        version = weights_version(self.policy)
        if version != self._version:
            self._forget()
            self._version = version


def weights_version(model: nn.Module) -> tuple[int, int]:
    """Two numbers, one of which changes when a parameter is replaced or written to, except by a
    fused optimizer."""
    parameters = list(model.parameters())
    addresses = hash(tuple(p.data_ptr() for p in parameters))
    return sum(p._version for p in parameters), addresses


def _key(*sequences: Any) -> tuple[bytes, bytes]:
    prompt, response = (x.cpu().long().numpy().tobytes() for x in sequences)
    return prompt, response
