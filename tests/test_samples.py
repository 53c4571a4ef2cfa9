"""What holds samples: every column goes where its samples go, or is named as dropped."""

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl.data import token_batch
from fastrl.data.token_batch import EncodedBatch, TokenBatch, known_columns
from fastrl.learn.experience import TOKENS, Experience
from fastrl.run.processes import OneProcess
from fastrl.samples import COLUMNS, TOKEN, Room, Samples, ToolCalls
from fastrl_kernels import TokenSets

FACTS = {  # of a whole batch
    Samples: {"seed", "room", "temperature", "stats", "of_batch", "generated"},
    TokenBatch: {"left_padded", "padding", "boundaries"},
    EncodedBatch: {"left_padded", "padding", "boundaries"},
    Experience: {"tokens", "kl_coef", "teacher_tokens"},
}
FILLED = {"masks", "tool_calls", "weights"}  # where a part of a join lacks them
HINTS = get_type_hints(Samples)


def elements(name: str, count: int, first: int, lengths: list[int]) -> Any:
    """A column of ``count`` samples that no other number ``first`` gives."""
    kind, places = str(HINTS[name]), range(first, first + count)
    tokens = [torch.arange(n) + 100.0 * i for n, i in zip(lengths, places, strict=True)]
    if name == "masks":
        return [x.long() % 2 == 0 for x in tokens]
    if name == "sequences":
        return [x.long() for x in tokens]
    if name == "supports":
        return [TokenSets.of_ids(x.long()[:, None], 10_000) for x in tokens]
    if name == "tool_calls":
        return [ToolCalls(i + 1, i) for i in places]
    if COLUMNS[name]["kind"] == TOKEN:
        return tokens
    if "dict" in kind and "Tensor" in kind:
        return {"a": torch.tensor([float(i) for i in places], dtype=torch.float64)}
    if "dict" in kind:
        return {"a": [f"{name} {i}" for i in places]}
    if "list" not in kind and "Sequence" not in kind:
        return torch.tensor([float(i) for i in places], dtype=torch.float64)
    if name == "prompt_ids":
        return [torch.tensor([i, i + 1]) for i in places]
    return [f"{name} {i}" for i in places]


def some(names: set[str], lengths: list[int], first: int = 0) -> Samples:
    columns = {
        name: elements(name, len(lengths), first, lengths)
        for name in COLUMNS
        if name in names | {"sequences"}
    }
    return Samples(**columns, seed=5, room=Room(2, 3), temperature=0.5, stats={"time/rollout": 1.0})


def plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return [str(x.dtype), x.tolist()]
    if isinstance(x, TokenSets):
        return [x.vocabulary, *x.mask().nonzero().tolist()]
    if isinstance(x, dict):
        return {name: plain(y) for name, y in x.items()}
    return [plain(y) for y in x] if isinstance(x, list) else x


def batch_of(
    names: set[str], lengths: list[int], kind: type[TokenBatch] = TokenBatch, left: bool = False
) -> TokenBatch:
    """A batch with columns of padding in all of its rows; columns that may be unknown are where
    they have no name."""
    queries = [1 + i % 3 for i in range(len(lengths))]
    read = [2 + i % 4 for i in range(len(lengths))]
    known = {"query_lengths": queries, "response_lengths": lengths, "encoder_lengths": read}
    columns = dict[str, Any]()
    for salt, each in enumerate(fields(kind)):
        if each.name in ("position_ids", "experts") and each.name not in names:
            columns[each.name] = None
        elif each.metadata == token_batch.LIST:
            numbers = [f"{each.name} {i}" for i in range(len(lengths))]
            columns[each.name] = known.get(each.name, numbers)
        elif each.metadata:
            encoded = each.metadata == token_batch.ENCODED
            total = read if encoded else list(map(sum, zip(queries, lengths, strict=True)))
            less = each.metadata in (token_batch.PREDICTIONS, token_batch.ON_HOST)
            column = torch.zeros(len(lengths), max(total) + 2 - less, dtype=torch.long)
            for i, (row, n, q) in enumerate(zip(column, total, queries, strict=True)):
                place = row[len(row) - n + less :] if left and not encoded else row[: n - less]
                numbered = torch.arange(n - less) + 100 * i + 1000 * salt
                counts = (torch.arange(n - less) >= q - 1) & (torch.arange(n - less) % 3 != i)
                place.copy_(counts if "mask" in each.name and less else numbered)
            columns[each.name] = column.bool() if "mask" in each.name and less else column
    return kind(**columns, left_padded=left)


def experience_of(names: set[str], lengths: list[int]) -> Experience:
    """With columns of tokens [B, T-1]."""
    tokens, columns = batch_of(names, lengths), dict[str, Any]()
    for salt, each in enumerate(fields(Experience)):
        if each.metadata and each.name in names | {"advantages"}:
            shape = tokens.mask.shape if each.metadata == TOKENS else (len(lengths),)
            numbers = torch.arange(float(torch.Size(shape).numel())) + 1000 * salt
            columns[each.name] = numbers.view(shape)
    return Experience(tokens=tokens, kl_coef=0.5, **columns)


def rows_of_batch(batch: TokenBatch) -> list[dict[str, Any]]:
    def of_row(column: Any, kind: str, i: int) -> Any:
        if kind == token_batch.LIST["kind"]:
            return column[i]
        if kind == token_batch.ENCODED["kind"]:
            return column[i, : batch.prompt_lengths[i]]
        n = batch.lengths[i] - (kind != token_batch.POSITIONS["kind"])
        return column[i, column.shape[1] - n :] if batch.left_padded else column[i, :n]

    known = list(known_columns(batch))
    return [{name: plain(of_row(x, kind, i)) for name, x, kind in known} for i in range(len(batch))]


def rows_of_experience(experience: Experience) -> list[dict[str, Any]]:
    counts, found = experience.counts.tolist(), rows_of_batch(experience.tokens)
    for name, x, kind in known_columns(experience):
        each = x.split(counts) if kind == TOKENS["kind"] else x
        for row, of_row in zip(found, each, strict=True):
            row[name] = plain(of_row)
    return found


def rows(samples: Any) -> list[dict[str, Any]]:
    """Each sample by itself: what the columns say of it."""
    if isinstance(samples, TokenBatch):
        return rows_of_batch(samples)
    if isinstance(samples, Experience):
        return rows_of_experience(samples)
    known = samples.known()

    def pick(column: Any, i: int) -> Any:
        if isinstance(column, dict):
            return {name: plain(x[i]) for name, x in column.items()}
        return plain(column[i])

    return [{name: pick(x, i) for name, x in known.items()} for i in range(len(samples))]


NAMES = st.sets(st.sampled_from(sorted(COLUMNS)))
MADE: dict[str, Callable[[set[str], list[int]], Any]] = {
    "samples": some,
    "batch": batch_of,
    "left-padded batch": lambda names, lengths: batch_of(names, lengths, left=True),
    "encoded batch": lambda names, lengths: batch_of(names, lengths, EncodedBatch),
    "experience": lambda names, lengths: experience_of(names, lengths).counted(),
}
LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", FACTS)
def test_a_field_is_a_column_or_a_fact_of_the_batch(kind: type) -> None:
    assert {each.name for each in fields(kind) if not each.metadata} == FACTS[kind]


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.data())
def test_some_of_them(kind: str, lengths: list[int], data: Any) -> None:
    whole = MADE[kind](set(), lengths)
    columns = {each.name for x in (whole, TokenBatch) for each in fields(x) if each.metadata}
    samples = MADE[kind](data.draw(st.sets(st.sampled_from(sorted(columns)))), lengths)
    places = st.integers(0, len(lengths) - 1)
    order = data.draw(st.lists(places, min_size=kind != "samples", max_size=6))
    part, every = samples.select(order), rows(samples)
    assert rows(part) == [every[i] for i in order]
    for each in fields(samples):
        known = getattr(samples, each.name) is not None
        assert (getattr(part, each.name) is not None) == known, each.name
    for name in FACTS[type(samples)] - {"tokens", "teacher_tokens"}:
        assert getattr(part, name) == getattr(samples, name)
    if isinstance(samples, TokenBatch):  # without padding that none of them needs
        assert part.input_ids.shape[1] == max(part.lengths)
        assert part.mask.shape[1] == max(part.lengths) - 1


@settings(max_examples=60, deadline=None)
@given(NAMES, LENGTHS, st.data())
def test_parts_one_after_the_other(names: set[str], lengths: list[int], data: Any) -> None:
    samples, every = some(names, lengths), rows(some(names, lengths))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = samples.split([cut, len(lengths) - cut])
    assert [row for part in parts for row in rows(part)] == every
    assert samples.without("texts").known().keys() == samples.known().keys() - {"texts"}
    for part in parts:
        assert (part.seed, part.room, part.temperature) == (5, Room(2, 3), 0.5)


@pytest.mark.parametrize("kind", [TokenBatch, EncodedBatch])
def test_a_batch_moves_to_a_device_but_for_what_the_host_reads(kind: type[TokenBatch]) -> None:
    moved = batch_of({"position_ids", "experts"}, [2, 1], kind).to(torch.device("meta"))
    for name, column, of_column in known_columns(moved):
        if of_column != token_batch.LIST["kind"]:
            device = "cpu" if of_column == token_batch.ON_HOST["kind"] else "meta"
            assert column.device.type == device, name
    assert moved.response_mask.tolist() == batch_of(set(), [2, 1], kind).response_mask.tolist()


def test_an_update_reads_the_tokens_that_count() -> None:
    every = {each.name for each in fields(Experience)}
    whole = experience_of(every, [3, 0, 4])
    known, mask = whole.counted(), whole.tokens.response_mask
    for name, column, kind in known_columns(whole):
        expected = column[mask] if kind == TOKENS["kind"] else column
        assert torch.equal(getattr(known, name), expected), name
    assert {name for name, *_ in known_columns(known)} == every - FACTS[Experience]


@pytest.mark.parametrize("order", [[True, False], torch.tensor([True, False]), slice(1)], ids=str)
def test_a_mask_is_no_order(order: Any) -> None:
    with pytest.raises(TypeError, match=r"places of samples, such as .* no mask or slice"):
        some(set(), [2, 1]).select(order)


@settings(max_examples=60, deadline=None)
@given(NAMES, NAMES, LENGTHS, LENGTHS)
def test_a_column_that_one_part_lacks_is_filled_or_dropped_by_name(
    names: set[str], others: set[str], lengths: list[int], more: list[int]
) -> None:
    names, others = names - {"token_scores"}, others - {"token_scores"}
    one, other = some(names, lengths), some(others, more, 50)
    both = Samples.joined([one, other])
    kept = (names & others) | ((names | others) & FILLED) | {"sequences"}
    assert both.known().keys() == kept
    written = [[True] * n for n in (*lengths, *more)]
    for i, row in enumerate([*rows(one), *rows(other)]):
        for name in kept - FILLED:
            assert rows(both)[i][name] == row[name], name
        if "masks" in kept:
            assert rows(both)[i]["masks"] == row.get("masks", ["torch.bool", written[i]])
        if "tool_calls" in kept:
            assert rows(both)[i]["tool_calls"] == row.get("tool_calls", ToolCalls(0, 0))
        if "weights" in kept:
            assert rows(both)[i]["weights"][1] == row.get("weights", [0, 1.0])[1]


def test_scores_are_those_of_tokens_where_all_have_one() -> None:
    one = Samples([torch.tensor([3])], rewards=torch.tensor([2.0]), token_scores=[torch.ones(1)])
    both = Samples.joined([one, one.without("token_scores")])
    assert plain(both.token_scores) == [["torch.float32", [1.0]], ["torch.float32", [2.0]]]
    longer = replace(one, sequences=[torch.tensor([3, 4])]).without("token_scores")
    with pytest.raises(ValueError, match="in another one number for each response"):
        Samples.joined([one, longer])


def test_what_an_update_reads_is_saved_by_the_names_of_now_and_of_before() -> None:
    learned = replace(some({*COLUMNS}, [2, 1]).to_learn(), generated=3.0, of_batch={"a": 1})
    assert {"sequences", "experts", "old_logprobs", "further"} < learned.known().keys()
    assert not {"texts", "logprobs", "rewards"} & learned.known().keys()
    again = Samples.of_state(learned.state())
    assert (rows(again), again.generated, again.of_batch) == (rows(learned), 3.0, {"a": 1})
    names = {"completion_ids": "sequences", "masks": "learned", "old": "old_logprobs"}
    before = {name: getattr(learned, now) for name, now in names.items()}
    known = Samples.of_state({**before, "further": {}, "generated": 3.0}).known()
    assert known.keys() == {*names.values(), "further"}


def test_a_name_that_one_part_lacks_is_none_or_nan_there() -> None:
    one = Samples(["x"], noted={"a": [1]}, rewards_by_function={"f": torch.tensor([1.0])})
    both = Samples.joined([one, replace(one, noted={"b": [2]}, rewards_by_function={})])
    assert both.noted == {"a": [1, None], "b": [None, 2]}
    assert both.rewards_by_function["f"].nan_to_num(nan=-1).tolist() == [1, -1]


def test_statistics_of_parts_at_the_same_time_and_one_after_the_other() -> None:
    stats = {"time/a": 2.0, "b_per_second": 3.0, "reward/retries": 1.0, "other": 4.0}
    one = Samples(["x"], stats=stats)
    other = replace(
        one, stats={"time/a": 5.0, "b_per_second": 1.0, "reward/retries": 2.0, "other": 0}
    )
    together = {"time/a": 5.0, "b_per_second": 4.0, "reward/retries": 3.0, "other": 2.0}
    assert Samples.joined([one, other]).stats == together
    after = {"time/a": 7.0, "b_per_second": 3.0, "reward/retries": 3.0, "other": 4.0}
    assert one.followed_by(other).stats == after


class _Process(OneProcess):
    """One of several threads, which wait for each other."""

    def __init__(self, index: int, shared: list[Any], barrier: threading.Barrier):
        self.index, self.count = index, len(shared)
        self.shared, self.barrier = shared, barrier

    def objects(self, own: Any) -> list[Any]:
        self.barrier.wait()
        self.shared[self.index] = own
        self.barrier.wait()
        return list(self.shared)

    def objects_at_main(self, own: Any) -> list[Any]:
        found = self.objects(own)
        return found if self.index == 0 else []


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("prompts_are_known", [False, True])
def test_the_samples_of_all_processes(tokens: bool, prompts_are_known: bool) -> None:
    parts = [some({*COLUMNS}, [1, 0, 3]), some({*COLUMNS}, [2], 50), some({*COLUMNS}, [4, 1], 70)]
    whole = Samples.joined(parts)
    names = [name for name, column in COLUMNS.items() if column["kind"] == "prompt"]
    prompts = Samples(**{name: getattr(whole, name) for name in names})
    shared, barrier, found = [None] * 3, threading.Barrier(3), dict[int, Samples]()

    def run(index: int) -> None:
        process = _Process(index, shared, barrier)
        own = parts[index].without(*(names if prompts_are_known else ()))
        known = prompts if prompts_are_known else None
        found[index] = own.gathered(process, known, tokens=tokens)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of_tokens = [name for name, column in COLUMNS.items() if column["kind"] == TOKEN]
    assert rows(found[0]) == rows(whole)
    for index in (1, 2):
        assert rows(found[index]) == rows(whole if tokens else whole.without(*of_tokens))
