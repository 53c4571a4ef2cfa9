"""Answers from data: a column of completions, alone or beside what a model samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.collect.respond import Asked, Respond, as_texts
from fastrl.data.chat import as_answer, bytes_of, templates_of
from fastrl.data.columns import ANSWERS, Roles, read_row
from fastrl.data.encode import Encoder
from fastrl.data.prompts import with_prompt_ids
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples

COMPLETION, MESSAGES = "completion", "messages"
_PROMPTED = Roles("prompt", COMPLETION, None, None, None)
_WHOLE = Roles(None, MESSAGES, None, None, None)


def split_messages(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The conversation of row ``i`` as ``prompt``, all but its last message, and ``completion``.
    Raises ValueError where the last message is not the assistant's, or there is no other."""
    prompt, (answer,) = read_row(row, i, _WHOLE, ANSWERS)
    return {"prompt": prompt, COMPLETION: answer}


def checked_answer(prompt: Any, completion: Any, i: int, where: str) -> Any:
    """The completion of row ``i``. Raises ValueError for one that does not continue its prompt."""
    row = {"prompt": prompt, COMPLETION: completion}
    read, (answer,) = read_row(row, i, _PROMPTED, ANSWERS)
    if not answer or read != prompt:
        raise ValueError(
            f"{where} must continue its prompt: a text a text, messages of the assistant's "
            "messages; and not be empty"
        )
    return answer


@dataclass(frozen=True)
class FromData:
    """Answers prompts by the column ``completion``. A prompt and its completion are tokenised as
    one text, see :meth:`fastrl.data.encode.Encoder.together`.

    Args:
        template: further arguments of the chat template.
        longest: the most tokens of a prompt with its completion, of which the last are kept.
        exceeded: returns the limit, in words, that a prompt and a completion of so many tokens
            exceed; None: they fit.
        decode: see :func:`fastrl.collect.respond.as_texts`.
    """

    tokenizer: Any
    template: Mapping[str, Any]
    longest: int | None
    exceeded: Callable[[int, int], str | None]
    decode: Callable[[Tensor, Tensor], str]

    keeps_prompts = True

    def __call__(self, asked: Asked) -> Samples:
        """Raises ValueError for rows without completions, or with one that is too long."""
        asked_for = asked.prompts
        said, columns, rows = asked_for.prompts, asked_for.columns, asked_for.prompt_rows
        if COMPLETION not in columns:
            raise ValueError(f"the rows have no column {COMPLETION}, only prompt, {[*columns]}")
        templates = templates_of(said, columns, rows, self.template)
        fronts, responses = [], []
        for i, row in enumerate(rows):
            where = f"the completion of row {row} of the batch, to {said[i]!r:.80},"
            answer = checked_answer(said[i], columns[COMPLETION][i], row, where)
            front, ids = self._encoded(said[i], answer, templates[i], where)
            fronts.append(torch.tensor(front))
            responses.append(torch.tensor(ids))
        prompts = with_prompt_ids(asked_for, fronts, self.tokenizer)
        texts = as_texts(self.decode, said, fronts, responses)
        return Samples(
            responses,
            ["eos"] * len(responses),
            **prompts.known(),
            texts=texts,
            completions=list(map(as_answer, said, texts)),
        )

    def check(self, row: Mapping[str, Any], i: int, where: str) -> None:
        """Raises ValueError for row ``i`` with a completion that does not continue its prompt, or
        that has more bytes than there is room for tokens, and more tokens, too."""
        prompt = row["prompt"]
        answer = checked_answer(prompt, row[COMPLETION], i, where)
        sizes = bytes_of(prompt), bytes_of(answer)
        cut = self.longest is not None and sizes[1] >= self.longest
        if cut or self.exceeded(*sizes) is not None:
            columns = {name: [value] for name, value in row.items()}
            (template,) = templates_of([prompt], columns, [i], self.template)
            self._encoded(prompt, answer, template, where)

    def _encoded(
        self, prompt: Any, answer: Any, template: Mapping[str, Any], where: str
    ) -> tuple[list[int], list[int]]:
        """The token ids of a prompt, as it is cut, and of its completion."""
        encoder = Encoder(self.tokenizer).with_template(template)
        front, (ids,) = encoder.together(prompt, (answer,))
        if self.longest is not None:
            front = front[max(0, len(front) + len(ids) - self.longest) :]
        if not front:
            raise ValueError(
                f"{where} has {len(ids)} tokens, which leave none of its prompt within "
                f"max_length={self.longest}: raise max_length, or leave such rows out"
            )
        if limit := self.exceeded(len(front), len(ids)):
            raise ValueError(
                f"{where} has {len(ids)} tokens, with {len(front)} of its prompt more than the "
                f"{limit}: lower max_length, or leave such rows out"
            )
        return front, ids


@dataclass(frozen=True)
class Mixed:
    """Answers each batch of prompts by the policy with a probability, else by someone else; outside
    of training all of them from the data.

    Args:
        policy, other, data: answer prompts.
        share: the probability, of which a seed's draws are the same in all processes.
        size: the prompts of a batch.
        training: whether the model is in training.
    """

    policy: Respond
    other: Respond
    data: Respond
    share: float
    size: int
    training: Callable[[], bool]

    keeps_prompts = False

    def __call__(self, asked: Asked) -> Samples:
        if not self.training():
            return self.data(asked)
        count = len(asked.prompts)
        draws = torch.Generator().manual_seed(seed_at(asked.seed, "share"))
        sampled = torch.rand(-(-count // self.size), generator=draws) < self.share
        parts, order = [], list[int]()
        for respond, by_policy in ((self.policy, True), (self.other, False)):
            chosen = [i for i in range(count) if bool(sampled[i // self.size]) == by_policy]
            if chosen:
                prompts = asked.prompts.select(chosen)
                keys = [asked.keys[i] for i in chosen]
                parts.append(respond(asked._replace(prompts=prompts, keys=keys)))
                order += chosen
        joined = Samples.joined(parts)
        stats = {**joined.stats, "on_policy": float(sampled.float().mean())}
        # Without a seed the ledger says that these cannot be drawn again as one request.
        joined = replace(joined, stats=stats, seed=None)
        return joined.select([order.index(i) for i in range(count)])
