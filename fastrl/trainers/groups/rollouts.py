"""How prompts of GRPOTrainer and RLOOTrainer are answered: by the policy, or a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fastrl.collect.completions import FromData
from fastrl.collect.interaction import Interaction
from fastrl.collect.respond import Respond, RolloutFunction, Sampled
from fastrl.data.chat import templates_of
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.data.prompts import with_prompt_ids
from fastrl.models.layout import layout_of
from fastrl.models.utils import context_length
from fastrl.rewards.calls import EventLoop
from fastrl.rollout.backends import Request, RolloutBackend
from fastrl.rollout.generation_kwargs import neutral_kwargs
from fastrl.rollout.sampling_params import end_tokens
from fastrl.samples import Samples
from fastrl.trainers.groups.prompt_data import reserved_of
from fastrl.trainers.policy_support import check_form
from fastrl.trainers.prompt_room import PromptRoom


class GroupRollouts:
    """Makes the callables that answer prompts.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.
        interaction: the tools and environments between the policy's turns.
        room: the room that a model's context leaves for prompts.
        event_loop: returns the event loop of tools that are ``async def``.
        policy: returns the policy, without wrappers.
        template: further arguments of the chat template.

    Attributes:
        backend: samples responses.
    """

    def __init__(
        self,
        args: Any,
        tokenizer: Any,
        backend: RolloutBackend,
        interaction: Interaction,
        room: PromptRoom,
        event_loop: Callable[[], EventLoop],
        policy: Callable[[], nn.Module],
        template: dict[str, Any],
    ):
        self.args, self.tokenizer, self.backend = args, tokenizer, backend
        self.interaction, self.room = interaction, room
        self.event_loop, self.policy, self.template = event_loop, policy, template
        ends = args.generation_arguments.get("eos_token_id")
        self.end_ids = end_tokens(policy(), tokenizer, ends).tolist()

    def by_policy(self, model: Callable[[], nn.Module] | None = None) -> Respond:
        """Returns what samples from the policy, with tools and environments where there are any.

        Args:
            model: returns another model to sample from, as the policy would be.
        """
        sampler = model or self.policy
        args, policy = self.args, sampler()
        # Settings decide how to sample, not the generation config that a model was saved with.
        arguments = {**neutral_kwargs(policy), **args.generation_arguments}
        arguments["pad_token_id"] = self.tokenizer.pad_token_id
        arguments.setdefault("eos_token_id", self.end_ids)

        def run(request: Request) -> Samples:
            # As the reference it has an engine, and a room in checkpoints, of its own.
            return self.backend(sampler(), request._replace(reference=model is not None))

        respond = self.interaction.respond(
            Sampled(run, arguments, self.decode, self.encoded),
            self.tokenizer,
            self.template,
            self.end_ids,
            self.event_loop,
            args.max_tool_calling_iterations,
            args.max_completion_length,
            context_length(policy),
            args.temperature,
            args.max_prompt_length,
            calls_first=args.tool_choice == "required",
        )
        check_form(self.interaction.first_turn, policy, self.tokenizer)
        return respond

    def by_function(self, function: Any, trainer: Any) -> RolloutFunction:
        """Returns what answers prompts by a ``rollout_func``, called with prompts and trainer."""
        return RolloutFunction(
            function,
            trainer,
            self.policy(),
            self.tokenizer,
            self.decode,
            {*self.end_ids, self.tokenizer.pad_token_id},
            self.args.generation_arguments.get("stop") or (),
            reserved_of(environments=False),
            self.args.temperature,
            self.args.policy_support,
        )

    def from_data(self, longest: int | None, teachers: Sequence[Any] = ()) -> FromData:
        """Returns what answers prompts by the data's completions, see :class:`FromData`.

        Args:
            teachers: models that read the same prompts and completions.
        """
        limits = [("", layout_of(self.policy()).exceeded)]
        limits += [("teacher's ", layout_of(model).exceeded) for model in teachers]

        def exceeded(prompt: int, completion: int) -> str | None:
            found = ((whose, limit(prompt, completion)) for whose, limit in limits)
            return next((f"{whose}{limit}" for whose, limit in found if limit), None)

        return FromData(self.tokenizer, self.template, longest, exceeded, self.decode)

    def decode(self, prompt: Tensor, response: Tensor) -> str:
        return layout_of(self.policy()).decode(self.tokenizer, prompt, response)

    def encoded(self, prompts: Samples) -> Samples:
        """Prompts with their token ids. Raises ValueError for a prompt that leaves no room for a
        response of full length."""
        texts = prompts.prompts
        ids = ids_of_prompts(
            texts,
            self.tokenizer,
            templates_of(texts, prompts.columns, prompts.prompt_rows, self.template),
            longest=self.args.max_prompt_length,
        )
        for i, prompt in enumerate(ids):
            self.room.check(prompt, f"prompt {i}, {texts[i]!r:.80},")
        return with_prompt_ids(prompts, ids, self.tokenizer)
