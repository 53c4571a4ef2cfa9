"""Ways of generating responses for a trainer: the rollout engine, or ``model.generate``."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationMixin

from fastrl.config import FULL, SAMPLED
from fastrl.models.sharding import wrapped_by_fsdp
from fastrl.models.utils import base_of
from fastrl.rollout.choose_engine import choose_engine
from fastrl.rollout.engine import RolloutEngine
from fastrl.rollout.generate_engine import GenerateEngine
from fastrl.rollout.generation_kwargs import sampling_params
from fastrl.rollout.sampling_params import draw_seed
from fastrl.samples import Room, Samples

RoomState = dict[str, dict[str, int]]  # an engine's Room by role, "policy" or "reference"


class Request(NamedTuple):
    """Prompts, and how to generate responses to them."""

    prompts: Sequence[Tensor]
    sample_ids: Sequence[int]  # a number for each prompt, which keys the engine's draws
    generation_kwargs: dict[str, Any]  # keyword arguments of ``model.generate``
    batch_size: int  # responses per call of ``model.generate``
    limits: Sequence[int] | None = None  # each prompt's max_new_tokens, in place of the keyword
    reference: bool = False  # the model acts as the reference policy
    samples: int = 1  # responses to each prompt, one after the other
    seed: int | None = None  # the draws' seed; None: one from torch's own generator

    def repeated(self) -> list[Tensor]:
        """The prompt of each response."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


class RolloutBackend(ABC):
    """A way of generating responses; a call returns a model's responses to a request."""

    @abstractmethod
    def __call__(self, model: Any, request: Request) -> Samples: ...

    def expect(self, tokens: int) -> None:  # noqa: B027 - optional, as those below
        """Announces the largest number of tokens that a prompt and its response will have."""

    def before_update(self) -> None:  # noqa: B027
        """Frees memory for an update."""

    def rooms(self) -> RoomState:
        """The engines' rooms for the next calls, see :meth:`fastrl.RolloutEngine.room`."""
        return {}

    def reserve(self, rooms: RoomState) -> None:  # noqa: B027
        """Takes over the :meth:`rooms` of another backend."""


class GenerateBackend(RolloutBackend):
    """Generates by ``model.generate``, a batch of prompts at a time, with its keywords.

    Args:
        process: the number of this process: every process draws other random numbers.
    """

    def __init__(
        self, tokenizer: Any, autocast: Callable[[], AbstractContextManager], process: int = 0
    ):
        self.tokenizer, self.autocast, self.process = tokenizer, autocast, process

    def __call__(self, model: Any, request: Request) -> Samples:
        if request.generation_kwargs.get("response_format") is not None:
            raise ValueError(
                "response_format needs the rollout engine, and model.generate runs here: set "
                "rollout_backend='engine', for a model that it runs, or leave response_format (or "
                "tool_choice='required') out"
            )
        engine = GenerateEngine(model, self.tokenizer, request.batch_size, self.autocast)
        kwargs, limits, samples = request.generation_kwargs, request.limits, range(request.samples)
        kwargs = {name: x for name, x in kwargs.items() if name != "response_format"}
        if limits is not None:
            limits = [limit for limit in limits for _ in samples]
        seed = request.seed
        if self.process:
            seed = (draw_seed() if seed is None else seed) ^ self.process
        output = engine.generate_with(request.repeated(), kwargs, limits, seed)
        output.sample_ids = [prompt for prompt in request.sample_ids for _ in samples]
        output.numbers = [number for _ in request.prompts for number in samples]
        return output


_ROLES = {False: "policy", True: "reference"}  # by Request.reference


class EngineBackend(RolloutBackend):
    """Generates by the rollout engine, which also returns log-probs. ``model.generate`` runs in its
    place, with a warning, where the engine cannot run the model or does not know an argument, and
    without one for an encoder–decoder or a model whose ``generate`` is not transformers' own.

    Args:
        config: has ``rollout_slots``, ``rollout_kv_cache_gib`` and ``rollout_sleep``.
        keep_experts: results have a mixture's choices of experts, too, or a call raises ValueError.
        policy_support: see :class:`SamplingParams`; with "sampled" the policy's results have the
            sets, or a call raises ValueError.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        autocast: Callable[[], AbstractContextManager],
        process: int = 0,
        keep_experts: bool = False,
        policy_support: str = FULL,
    ):
        self.policy_support = policy_support
        gib = config.rollout_kv_cache_gib
        self.options: dict[str, Any] = {
            "autocast": autocast,
            "max_slots": config.rollout_slots,
            "kv_cache_bytes": None if gib is None else int(gib * 2**30),
            "keep_experts": keep_experts,
        }
        self.tokenizer, self.sleep = tokenizer, config.rollout_sleep
        self.fallback = GenerateBackend(tokenizer, autocast, process)
        self._engines: dict[tuple[int, bool], RolloutEngine | GenerateEngine] = {}
        self._reserved: dict[str, Room] = {}  # for engines that are yet to be made
        self._expected = 0  # the most tokens of a prompt and its response by the policy
        self._warned: set[str] = set()

    def __call__(self, model: Any, request: Request) -> Samples:
        if _own_generate(model):
            self._check_kept("the model's generate was replaced")
            return self.fallback(model, request)
        engine = self._engine(model, request.reference)
        if not isinstance(engine, RolloutEngine):
            self._check_kept("it cannot run the model")
            return self.fallback(model, request)
        params = sampling_params(request.generation_kwargs, model)
        if isinstance(params, str):
            self._check_kept(f"it does not know the argument {params}")
            self._warn(params, params in request.generation_kwargs)
            return self.fallback(model, request)
        if request.limits is not None:
            params = replace(params, max_new_tokens=list(request.limits))
        # A prompt's samples share its prefill.
        params = replace(params, n=request.samples, seed=request.seed)
        if not request.reference:
            params = replace(params, policy_support=self.policy_support)
            engine.expect(self._expected)
        return engine.generate(request.prompts, params, request.sample_ids)

    def expect(self, tokens: int) -> None:
        self._expected = max(self._expected, tokens)

    def before_update(self) -> None:
        if self.sleep:
            for engine in self._engines.values():
                engine.sleep()

    def rooms(self) -> RoomState:
        by_role = {
            _ROLES[reference]: engine.room()
            for (_, reference), engine in self._engines.items()
            if isinstance(engine, RolloutEngine)
        }
        return {role: room._asdict() for role, room in {**self._reserved, **by_role}.items()}

    def reserve(self, rooms: RoomState) -> None:
        self._reserved = {role: Room(**room) for role, room in rooms.items()}
        for (_, reference), engine in self._engines.items():
            if isinstance(engine, RolloutEngine):
                engine.reserve(*self._reserved.pop(_ROLES[reference], Room()))

    def _engine(self, model: Any, reference: bool) -> RolloutEngine | GenerateEngine:
        # A PEFT model is the policy or, with its adapter off, the reference.
        key = (id(model), reference)
        if key not in self._engines:
            engine = choose_engine(model, self.tokenizer, **self.options)
            if isinstance(engine, RolloutEngine):
                engine.reserve(*self._reserved.pop(_ROLES[reference], Room()))
            self._engines[key] = engine
        return self._engines[key]

    def _check_kept(self, cause: str) -> None:
        """Raises ValueError where experts or sets are to be kept and ``model.generate`` runs the
        model."""
        if name := _kept(self.options["keep_experts"], self.policy_support):
            raise ValueError(
                f"{name} needs the rollout engine, which does not run here, as {cause}: leave one "
                "of the two out"
            )

    def _warn(self, argument: str, by_the_user: bool) -> None:
        if argument not in self._warned:
            self._warned.add(argument)
            origin = "" if by_the_user else " (here of the model's generation_config)"
            warnings.warn(
                f"the rollout engine does not know the argument {argument} of generate{origin}: "
                f"rollouts go through model.generate, which is slower{_INSTEAD.get(argument, '')}",
                stacklevel=6,
            )


def _kept(keep_experts: bool, policy_support: str) -> str | None:
    """The setting because of which results have more than ``model.generate`` returns."""
    if keep_experts:
        return "replay_routing"
    return "policy_support='sampled'" if policy_support == SAMPLED else None


_INSTEAD = {  # what the engine has in place of an argument, for the warning
    "stop_strings": "; it knows stop=[[13, 198], ...], the token ids that end a response, such as "
    "[tokenizer.encode(text, add_special_tokens=False)]"
}
_GENERATE = GenerationMixin.generate  # kept before a program may replace it


def _own_generate(model: Any) -> bool:
    """Whether a model has another ``generate`` than transformers'."""
    inner = base_of(model)
    for owner in (getattr(model, "pretrained_model", model), inner):
        generate = vars(owner).get("generate")
        if generate is not None and not wrapped_by_fsdp(generate):
            return True
    return getattr(type(inner), "generate", None) is not _GENERATE


def make_backend(
    config: Any,
    tokenizer: Any,
    autocast: Callable[[], AbstractContextManager],
    process: int = 0,
    keep_experts: bool = False,
    policy_support: str = FULL,
) -> RolloutBackend:
    """The backend that a configuration's ``rollout_backend`` names.

    Raises:
        ValueError: what is to be kept needs the rollout engine, which is not named.
    """
    if config.rollout_backend == "engine":
        return EngineBackend(config, tokenizer, autocast, process, keep_experts, policy_support)
    if name := _kept(keep_experts, policy_support):
        raise ValueError(f"{name} needs rollout_backend='engine': set that, or leave {name} out")
    return GenerateBackend(tokenizer, autocast, process)
