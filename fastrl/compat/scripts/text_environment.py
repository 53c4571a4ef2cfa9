"""TextEnvironment: a model that calls tools by text, under TRL 0.11's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import pad
from fastrl.data.encode import encode_responses, encode_text
from fastrl.models.utils import evaluating
from fastrl.rollout.generation_check import together
from fastrl.run.terminal import run_console

REQUEST, CALL, RESPONSE, SUBMIT = "<request>", "<call>", "<response>", "<submit>"
_TOOL = re.compile(f"{REQUEST}.*?<(.*?)>(.*?){CALL}", re.DOTALL)
_PROMPT, _SYSTEM, _MODEL, _REWARD = "grey85", "cyan3", "deep_sky_blue1", "plum1"


class TextHistory:
    """An episode, of segments that the environment and the model wrote in turn.

    Attributes:
        text: the episode's text; ``text_spans`` has each segment's begin and end in it.
        tokens: [T] int64; ``token_spans`` has each segment's begin and end in it.
        token_masks: [T] int64, 1 where the model wrote.
        system_spans: whether the environment wrote each segment.
        completed, truncated: whether the episode is over, and whether it ended as too long.
        reward: the reward of the whole episode.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True):
        self.text, self.completed, self.truncated = "", False, False
        self.reward: Any = 0.0
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.tokens = self.token_masks = tokens.new_zeros(0)
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Appends a segment; raises ValueError where it is empty."""
        if not text or not len(tokens):
            raise ValueError("a segment of a history needs text and tokens: this one is empty")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        mask = torch.full_like(tokens, int(not system))
        self.token_masks = torch.cat([self.token_masks, mask])

    def complete(self, truncated: bool = False) -> None:
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        begin, end = self.text_spans[-1]
        return self.text[begin:end]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first segment's tokens, all tokens behind it, and the mask of these."""
        begin = self.token_spans[0][1]
        return self.tokens[:begin], self.tokens[begin:], self.token_masks[begin:]

    def show_text(self, show_legend: bool = False) -> None:
        """Prints the history's text, with a colour for who wrote what."""
        parts = [self.text[begin:end] for begin, end in self.text_spans]
        self._show(list(zip(parts, self._colours(), strict=True)), show_legend)

    def show_tokens(self, tokenizer: Any, show_legend: bool = False) -> None:
        """Prints the history token by token, with a colour for who wrote what."""
        parts = []
        for (begin, end), colour in zip(self.token_spans, self._colours(), strict=True):
            names = tokenizer.convert_ids_to_tokens(self.tokens[begin:end].tolist())
            parts += [(f"{name} ", colour) for name in names]
        self._show(parts, show_legend)

    def show_colour_legend(self) -> None:
        names = [("Prompt", _PROMPT), ("System", _SYSTEM), ("Model", _MODEL), ("Reward", _REWARD)]
        self._print([(f" {name} ", colour) for name, colour in names])

    def _colours(self) -> list[str]:
        return [_PROMPT, *(_SYSTEM if system else _MODEL for system in self.system_spans[1:])]

    def _show(self, parts: list[tuple[str, str]], legend: bool) -> None:
        self._print([*parts, (f"\n\nReward: {self.reward}", _REWARD)])
        if legend:
            self.show_colour_legend()

    @staticmethod
    def _print(parts: list[tuple[str, str]]) -> None:
        from rich.text import Text

        run_console().print(
            Text.assemble(*((text, f"black on {colour}") for text, colour in parts))
        )


class TextEnvironment:
    """Lets a model answer tasks in turns. When it writes ``<request><TOOL>QUERY<call>``, the tool's
    answer is appended, with ``<response>`` behind it; an episode ends at ``<submit>``, EOS, a turn
    without a call, or a limit. For typed tools in chats see the trainers' argument ``tools``.

    Args:
        model: a value-head model of ours, or a model of transformers, with ``generate``.
        tools: functions of a text, in a dict by name, or callable objects, named by their class.
        reward_fn: returns rewards for a list of texts, each history's last segment; :meth:`run`
            passes its keywords on to it.
        prompt: stands in front of each task.
        max_turns: most turns of an episode.
        max_tool_reponse: most characters of a tool's answer (TRL's spelling).
        max_length: an episode that has more tokens ends, as truncated; None: any number.
    """

    request_token, call_token = REQUEST, CALL
    response_token, submit_token = RESPONSE, SUBMIT

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Mapping[str, Callable[[str], str]] | Sequence[Any] = (),
        reward_fn: Callable[..., Any] | None = None,
        prompt: str | None = None,
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ):
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt or ""
        self.tools: dict[str, Callable[[str], str]]
        if isinstance(tools, Mapping):
            self.tools = dict(tools)
        else:
            self.tools = {type(tool).__name__: tool for tool in tools}
        self.reward_fn, self.max_turns, self.max_length = reward_fn, max_turns, max_length
        self.max_tool_response = max_tool_reponse
        self.generation_kwargs = dict(generation_kwargs or {})

    @property
    def current_device(self) -> torch.device:
        return next(self._unwrapped.parameters()).device

    @property
    def _unwrapped(self) -> Any:
        return getattr(self.model, "module", self.model)

    def run(self, queries: Sequence[str], **rewards_kwargs: Any) -> tuple[list[Any], ...]:
        """Returns queries, responses and their masks (1 where the model wrote), as
        ``PPOTrainer.step`` takes them; rewards; and the histories.

        Raises:
            ValueError: there is no reward_fn.
        """
        self._check_rewarded()
        texts = [self.prompt + query for query in queries]
        histories = [
            TextHistory(text, self._on_device(encode_text(text, self.tokenizer))) for text in texts
        ]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = [self.step(history) for history in histories]
            histories = self.tasks_end_check(histories, model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        split = [history.split_query_response_tokens() for history in histories]
        columns = [list(column) for column in zip(*split, strict=True)]
        return (*columns, [history.reward for history in histories], histories)

    def step(self, history: TextHistory) -> TextHistory:
        """Appends the answer of the tool that the last segment calls, or what is wrong with the
        call, unless the episode is over; returns the history."""
        self.tasks_end_check([history])
        if history.completed:
            return history
        turn = history.last_text_segment
        tool, query = self.parse_tool_call(turn)
        if tool is None:
            answer = f"Unknown tool call: {turn}"
        elif tool not in self.tools:
            answer = f"Unknown tool {tool}."
        else:
            try:
                answer = str(self.tools[tool](query))
            except Exception as error:  # the model reads the tool's error
                answer = f"Tool error: {error}"
        if len(answer) > self.max_tool_response:
            answer = answer[: self.max_tool_response - 3] + "..."
        answer += self.response_token
        (ids,) = encode_responses([answer], self.tokenizer)
        history.append_segment(answer, self._on_device(ids), system=True)
        return history

    def parse_tool_call(self, text: str) -> tuple[Any, Any]:
        """A tool's name and the query to it; None and None where no tool is called."""
        match = _TOOL.search(text)
        return (None, None) if match is None else (match[1], match[2])

    def compute_reward(self, histories: list[TextHistory], **kwargs: Any) -> list[TextHistory]:
        """Sets the histories' rewards, by their last segments' texts; returns the histories."""
        rewards = self._check_rewarded()(
            [history.last_text_segment for history in histories], **kwargs
        )
        for history, reward in zip(histories, rewards, strict=True):
            history.reward = reward
        return histories

    def _check_rewarded(self) -> Callable[..., Any]:
        if self.reward_fn is None:
            raise ValueError("TextEnvironment needs a reward_fn: pass one to its constructor")
        return self.reward_fn

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Appends a turn of the model to the histories that are not over; returns all."""
        active = [history for history in histories if not history.completed]
        responses = self._generate_batched([history.tokens for history in active])
        for history, ids in zip(active, responses, strict=True):
            history.append_segment(self.tokenizer.decode(ids), ids, system=False)
        return histories

    def tasks_end_check(
        self, histories: list[TextHistory], model_turn: bool = True
    ) -> list[TextHistory]:
        """Completes the histories that are over, by :meth:`task_end_check`; returns all."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn)
            if ended:
                history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether a history that is not over yet is too long, and whether it is over now. A
        ``model_turn`` that calls no tool ends it, too."""
        if history.completed:
            return False, False
        turn = history.last_text_segment
        if self.max_length is not None and len(history.tokens) > self.max_length:
            return True, True
        calls = self.request_token in turn and self.call_token in turn
        eos = self.tokenizer.eos_token
        over = self.submit_token in turn or (model_turn and not calls)
        return False, over or bool(eos and eos in history.text)

    def _on_device(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=self.current_device)

    @torch.no_grad()
    def _generate_batched(self, query_tensors: list[Tensor], batch_size: int = 16) -> list[Tensor]:
        eos, pad_token = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        stops = [self.call_token, self.submit_token]
        responses: list[Tensor] = []
        options = {"stop_strings": stops, "tokenizer": self.tokenizer, **self.generation_kwargs}
        with evaluating(self._unwrapped):
            batch_size = together(self._unwrapped, query_tensors, batch_size)
            for i in range(0, len(query_tensors), batch_size):
                part = query_tensors[i : i + batch_size]
                inputs = pad(part, eos if pad_token is None else pad_token, "left")
                padded = {name: x.to(self.current_device) for name, x in inputs.items()}
                sequences = self._unwrapped.generate(**padded, **options)
                generated = sequences[:, padded["input_ids"].shape[1] :]
                responses += map(self._until_stop, generated)
        return responses

    def _until_stop(self, ids: Tensor) -> Tensor:
        """The token ids up to the first stop or EOS, which stays; at least a token."""
        for count in range(1, len(ids)):
            text = self.tokenizer.decode(ids[:count])
            ended = int(ids[count - 1]) == self.tokenizer.eos_token_id
            if ended or self.call_token in text or self.submit_token in text:
                return ids[:count]
        return ids
