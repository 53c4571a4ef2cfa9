"""The one container of samples: named columns with an element for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.run.processes import Processes
from fastrl_kernels import TokenSets

# The kinds of columns, which decide the processes that get a column.
PROMPT = "prompt"  # what is known before a response is drawn: all processes may have it already
SAMPLE = "sample"  # a value for each sample: every process gets it
TOKEN = "token"  # a value for each token: only the process that keeps the ledger gets it


class Room(NamedTuple):
    """The size of an engine's KV cache; zeros where there is none.

    Decode steps have rows for 1, 2, 3, 4, 6, 8 … or all slots: on some devices, the number of rows
    decides the last bits of a matrix product.
    """

    slots: int = 0
    length: int = 0  # tokens of a slot


class ToolCalls(NamedTuple):
    """How often tools were called, and how many of the calls failed."""

    calls: int
    failures: int


def _column(
    kind: str, absent: Callable[[Samples], Any] | None = None, *, learn: bool = False
) -> Any:
    """Declares a column: a list or a tensor with an element for each sample, or a dict of these.

    Args:
        learn: whether an update reads it, so that it is kept until then.
        absent: makes the column for samples that lack it and are joined to others that have it.
            Without this function the joined samples lack the column, too.
    """
    return field(default=None, metadata={"kind": kind, "absent": absent, "learn": learn})


@dataclass(eq=False, repr=False)
class Samples:
    """B samples, one after the other, as columns. A column that is not known is None. How samples
    are selected, joined, gathered and split is written once, here, for all columns.

    ``logprobs``, ``logprobs_t1``, ``entropies`` and ``values`` have a tensor per sample with a
    number per token of its sequence, fp32: log-probs in nats under the whole softmax at the
    sampling temperature and at 1 (greedy: both at 1), entropies in nats at the sampling
    temperature, and values (None without a value head). All are of the model's own distribution,
    before penalties and truncation; with ``supports`` they are of the model over these.

    Attributes:
        sequences: the responses' token ids, with the EOS and tools' results.
        finish_reasons: "eos", "length", "stop", "nan" or "grammar", which allowed no token.
        experts: the k experts that a mixture's L routers chose, where the engine keeps them,
            [T - 1, L, k] int16, for a prompt of P tokens and its response, T tokens together. The
            last router does not run for the first P - 1 tokens, and has -1 for them.
        seed, sample_ids: what the engine keys the draws of a sample by; ``model.generate`` uses the
            seed alone.
        numbers: a sample's number among those of its prompt, from 0.
        supports: the sets that each token was drawn from, L sets of token ids, where log-probs and
            entropies are over these; None: they are over the whole vocabulary.
        room: the engine's room; zeros for ``model.generate``.
        temperature: the temperature of ``logprobs`` and ``entropies``; 1 where decoding was greedy.
        stats: statistics of the batch by their names, see :func:`joined_statistics`.
        prompts: the prompts in the user's form: texts or chat messages.
        prompt_texts, prompt_ids: the prompts as the model read them: as text, and as token ids.
        prompt_rows: the prompts' rows in the data.
        columns: the data's other columns.
        texts: the responses as text.
        completions: the responses as reward functions get them: texts, or messages for chats.
        masks: bool, which tokens of a response the policy wrote; None: all.
        tool_calls: how often a response called tools; None: there were no tools.
        left_out: whether a sample ended in NaN logits, so that nothing is learned from it.
        rewards: Σ_k w_k·r_k over the reward functions k, [B] fp64; NaN for samples that are left
            out or unjudged, or have a reward that is not finite.
        rewards_by_function: r_k by function, [B] fp64 each; NaN where it gave no finite number.
        token_rewards: Σ_k w_k·r_k for each token, [L] fp64; None where no function rewards tokens.
        unjudged: whether no function judged a sample.
        penalties: what is taken off the rewards for how responses ended and how long they are, [B]
            fp32; None: nothing.
        weights: how much a sample counts in the loss, [B] fp32; None: 1.
        noted: columns that reward functions noted; None for a sample that has no note.
        rooms: the room of the engine that drew the sample.
        token_scores: scores of a response's tokens, [L] fp32; their sum is the response's score.
        learned: bool, which tokens of a response are learned.
        advantages: [B] fp32.
        old_logprobs: log-probs of the policy that is about to learn, [L]; ref_logprobs: of the
            reference model; sampler_logprobs: of another engine that sampled, NaN where it gave
            none; sampler_weights: weights by which the loss corrects for that engine.
        teacher_prompt_ids: the prompts behind which teachers read the responses, as token ids;
            None: teachers, if any, read the policy's.
        teacher_logprobs: log-probs of the teachers, [L], where rewards or a ledger have them.
        token_advantages: what a token's advantage has beside its sample's, [L].
        likely_ids, likely_logprobs: tokens and their log-probs by teachers that are functions,
            [L, K]; K is 0 for samples that have another teacher.
        teachers: numbers of the samples' teachers; None: all have the same one, or none.
        further: columns that a trainer's subclass adds.
        of_batch: what a trainer's subclass keeps for the batch as a whole.
        generated: the number of learned tokens in all processes' samples generated together.
    """

    sequences: list[Tensor] = _column(TOKEN, learn=True)
    finish_reasons: list[str] = _column(SAMPLE)
    logprobs: list[Tensor] | None = _column(TOKEN)
    logprobs_t1: list[Tensor] | None = _column(TOKEN)
    entropies: list[Tensor] | None = _column(TOKEN)
    values: list[Tensor] | None = _column(TOKEN)
    experts: list[Any] | None = _column(TOKEN, learn=True)
    seed: int | None = None
    sample_ids: list[int] | None = _column(SAMPLE)
    numbers: list[int] | None = _column(SAMPLE)
    supports: list[TokenSets] | None = _column(TOKEN, learn=True)
    room: Room = Room()
    temperature: float = 1.0
    stats: dict[str, float] = field(default_factory=dict)

    prompts: list[Any] = _column(PROMPT)
    prompt_texts: list[str] = _column(PROMPT)
    prompt_ids: Sequence[Tensor] = _column(PROMPT, learn=True)
    prompt_rows: list[int] = _column(PROMPT)
    columns: dict[str, list[Any]] = _column(PROMPT)
    texts: list[str] = _column(SAMPLE)
    completions: list[Any] = _column(SAMPLE)
    masks: list[Tensor] | None = _column(TOKEN, lambda samples: samples.written)
    tool_calls: list[ToolCalls] | None = _column(
        SAMPLE, lambda samples: [ToolCalls(0, 0)] * len(samples)
    )
    left_out: list[bool] = _column(SAMPLE)
    rewards: Tensor = _column(SAMPLE)
    rewards_by_function: dict[str, Tensor] = _column(SAMPLE)
    token_rewards: list[Tensor | None] = _column(TOKEN)
    unjudged: list[bool] = _column(SAMPLE)
    penalties: Tensor = _column(SAMPLE)
    weights: Tensor | None = _column(SAMPLE, lambda samples: torch.ones(len(samples)))
    noted: dict[str, list[Any]] = _column(SAMPLE)
    rooms: list[Room] = _column(SAMPLE)
    token_scores: list[Tensor] | None = _column(TOKEN, lambda samples: samples.scores_as_tokens())

    learned: list[Tensor] = _column(TOKEN, learn=True)
    advantages: Tensor = _column(SAMPLE, learn=True)
    old_logprobs: list[Tensor] | None = _column(TOKEN, learn=True)
    ref_logprobs: list[Tensor] | None = _column(TOKEN, learn=True)
    sampler_logprobs: list[Tensor] | None = _column(TOKEN, learn=True)
    sampler_weights: list[Tensor] | None = _column(TOKEN, learn=True)
    teacher_prompt_ids: Sequence[Tensor] | None = _column(PROMPT, learn=True)
    teachers: list[int] | None = _column(PROMPT, learn=True)
    teacher_logprobs: list[Tensor] | None = _column(TOKEN, learn=True)
    token_advantages: list[Tensor] | None = _column(TOKEN, learn=True)
    likely_ids: list[Tensor] | None = _column(TOKEN, learn=True)
    likely_logprobs: list[Tensor] | None = _column(TOKEN, learn=True)
    further: dict[str, Any] = _column(SAMPLE, learn=True)
    of_batch: dict[str, Any] = field(default_factory=dict)
    generated: float = 0.0

    def __len__(self) -> int:
        return next(map(_length, self.known().values()), 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)}: {', '.join(self.known())})"

    def known(self) -> dict[str, Any]:
        """The columns that are known, by their names."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def without(self, *names: str) -> Samples:
        """The same samples without some of their columns."""
        nothing: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **nothing)

    def select(self, order: Sequence[int]) -> Samples:
        """Returns the samples at the indices ``order``, in this order; the statistics are those of
        all samples.

        Raises:
            TypeError: ``order`` is a slice or a mask.
        """
        if isinstance(order, slice) or any(map(_is_flag, order)):
            raise TypeError(
                "select takes the places of samples, such as [0, 2], and no mask or slice: pass "
                "[i for i, kept in enumerate(mask) if kept], or range(first, end)"
            )
        return replace(self, **{name: _some(x, order) for name, x in self.known().items()})

    take = select

    def repeated(self, times: int) -> Samples:
        """Each sample ``times`` times in a row."""
        return self.select([i for i in range(len(self)) for _ in range(times)])

    def split(self, sizes: Sequence[int]) -> list[Samples]:
        """Consecutive parts, of ``sizes[i]`` samples each."""
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [self.select(range(end - n, end)) for end, n in zip(ends, sizes, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of parts that were drawn at the same time with one seed and temperature, one
        after the other, with :func:`joined_statistics`. The room is that of the first part."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: _joined_column(name, parts) for name in COLUMNS}
        stats = joined_statistics([part.stats for part in parts])
        return replace(parts[0], **columns, stats=stats)

    def followed_by(self, more: Samples) -> Samples:
        """Returns these samples and behind them ``more``, which were drawn later. Times, and counts
        of non-finite rewards and retries, add up; other statistics are those of these samples."""
        stats = {
            name: value + more.stats.get(name, 0.0) if _adds_up(name) else value
            for name, value in self.stats.items()
        }
        return replace(Samples.joined([self, more]), stats=stats)

    def gathered(
        self, processes: Processes, prompts: Samples | None = None, *, tokens: bool = False
    ) -> Samples:
        """The samples of all processes, in the processes' order. Columns of tokens reach the main
        process alone.

        Args:
            prompts: the prompts of all processes, if each knows them; None: they are exchanged.
            tokens: give every process the columns of tokens, too.
        """
        kinds = {TOKEN} if not tokens else set()
        kinds |= set() if prompts is None else {PROMPT}
        apart = [name for name, column in COLUMNS.items() if column["kind"] in kinds]
        joined = Samples.joined(processes.objects(self.without(*apart)))
        if prompts is not None:
            joined = replace(joined, **prompts.known())
        if not tokens:
            columns = [name for name in apart if COLUMNS[name]["kind"] == TOKEN]
            others = [name for name in COLUMNS if name not in columns]
            parts = processes.objects_at_main(replace(self.without(*others), stats={}))
            if parts:
                joined = replace(joined, **Samples.joined(parts).known())
        return joined

    def to_learn(self) -> Samples:
        """The samples with the columns that an update reads, and no others."""
        others = [name for name, column in COLUMNS.items() if not column["learn"]]
        return replace(self.without(*others), stats={})

    def state(self) -> dict[str, Any]:
        """What an update reads, as a tree of tensors and plain values."""
        known = self.to_learn().known()
        if self.supports is not None:
            known["supports"] = [list(sets.fields()) for sets in self.supports]
        return {**known, "of_batch": self.of_batch, "generated": self.generated}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Samples:
        """The samples of a :meth:`state`, also of fastrl 0.2, whose columns had other names."""
        if "completion_ids" in state:
            state = {_NAMES_OF_BEFORE.get(name, name): column for name, column in state.items()}
        if state.get("supports") is not None:
            state = {**state, "supports": [TokenSets(*fields) for fields in state["supports"]]}
        return cls(**state)

    @property
    def ended(self) -> list[bool]:
        """Whether each response ends by itself, in EOS or at a stop."""
        return [reason in ("eos", "stop") for reason in self.finish_reasons]

    @property
    def written(self) -> list[Tensor]:
        """Which tokens of each response the policy wrote, bool."""
        if self.masks is not None:
            return self.masks
        return [torch.ones(len(x), dtype=torch.bool) for x in self.sequences]

    @property
    def scores(self) -> Tensor:
        """Rewards less penalties, [B] fp32."""
        return self.rewards.float() - (0 if self.penalties is None else self.penalties)

    def scores_as_tokens(self) -> list[Tensor] | None:
        """The scores of responses of one token each, [1] fp32 each; None without rewards.

        Raises:
            ValueError: a response has another length.
        """
        if self.rewards is None:
            return None
        if any(len(response) != 1 for response in self.sequences):
            raise ValueError(
                "in one process scores are numbers for each token, in another one number for each "
                "response: pass the same kind in all"
            )
        return list(self.scores.view(-1, 1))

    def scores_of_tokens(self) -> list[Tensor]:
        """The scores of each response's tokens, [L] fp32 each; penalties, and rewards of whole
        responses, are the last token's."""
        scores, of_responses = self.scores, []
        for i, response in enumerate(self.sequences):
            of_tokens, rewards = torch.zeros(len(response)), self.token_rewards[i]
            if rewards is None:
                of_tokens[-1:] = scores[i]
            else:
                of_tokens.copy_(rewards)
                of_tokens[-1] -= 0 if self.penalties is None else self.penalties[i]
            of_responses.append(of_tokens)
        return of_responses

    def logprobs_at(self, temperature: float) -> list[Tensor] | None:
        """Log-probs log softmax(z/T) of the tokens; None where none were computed at this T."""
        if temperature == 1 and self.logprobs_t1 is not None:
            return self.logprobs_t1
        return self.logprobs if temperature == self.temperature else None

    def recorded(self) -> Samples:
        """The samples without entropies, experts and, where it equals logprobs, logprobs_t1."""
        equal = self.logprobs is not None and self.temperature == 1
        return self.without("entropies", "experts", *(["logprobs_t1"] if equal else []))


_NAMES_OF_BEFORE = {
    "completion_ids": "sequences",
    "masks": "learned",
    "old": "old_logprobs",
    "ref": "ref_logprobs",
    "sampled": "sampler_logprobs",
}
COLUMNS: Mapping[str, Mapping[str, Any]] = {
    each.name: each.metadata for each in dataclasses.fields(Samples) if each.metadata
}


def joined_statistics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics that all parts have, joined for parts that were made at the same time: of
    times the longest, of numbers per second and counts the sums, of others the means."""
    return {
        name: joined_statistic(name, [part[name] for part in parts])
        for name in parts[0]
        if all(name in part for part in parts)
    }


def joined_statistic(name: str, values: Sequence[float]) -> float:
    """A statistic of several parts, joined by the rule of :func:`joined_statistics`."""
    if name.startswith("time/"):
        return max(values)
    counts = name == "perf/nan_samples" or name.startswith("annotator/") or _adds_up(name)
    if counts or name.endswith("_per_second"):
        return sum(values)
    return sum(values) / len(values)


def _adds_up(name: str) -> bool:
    """Whether a statistic of parts that are drawn one after the other is the sum of the parts'."""
    return name.startswith("time/") or name in ("reward/nonfinite", "reward/retries")


def _length(column: Any) -> int:
    if isinstance(column, dict):
        return next(map(len, column.values()), 0)
    return len(column)


def _is_flag(place: Any) -> bool:
    return isinstance(place, bool) or str(getattr(place, "dtype", "")) in ("bool", "torch.bool")


def _some(column: Any, order: Sequence[int]) -> Any:
    if isinstance(column, dict):
        return {name: _some(x, order) for name, x in column.items()}
    if isinstance(column, Tensor):
        return column[list(order)]
    return [column[i] for i in order]


def _joined_column(name: str, parts: Sequence[Samples]) -> Any:
    """A column of several parts; None where no part has it, and where a part lacks it and the
    column is declared without ``absent``."""
    absent = COLUMNS[name]["absent"]
    columns = [getattr(part, name) for part in parts]
    if all(x is None for x in columns):
        return None
    if absent is not None:
        pairs = zip(columns, parts, strict=True)
        columns = [absent(part) if x is None else x for x, part in pairs]
    if any(x is None for x in columns):
        return None
    if isinstance(columns[0], dict):
        return _joined_dicts(columns, list(map(len, parts)))
    return torch.cat(columns) if isinstance(columns[0], Tensor) else [y for x in columns for y in x]


def _joined_dicts(parts: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """Columns by their names; NaN or None where a part has none of a name."""
    joined = dict[str, Any]()
    for name in dict.fromkeys(name for part in parts for name in part):
        columns = [part.get(name, [None] * n) for part, n in zip(parts, lengths, strict=True)]
        if any(isinstance(x, Tensor) for x in columns):
            nan = float("nan")
            numbers = [x if isinstance(x, Tensor) else torch.full((len(x),), nan) for x in columns]
            joined[name] = torch.cat(numbers)
        else:
            joined[name] = [y for x in columns for y in x]
    return joined
