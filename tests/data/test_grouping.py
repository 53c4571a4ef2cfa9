"""Samples in passes: whole, in order, and as full as a search finds them."""

from hypothesis import given
from hypothesis import strategies as st

from fastrl.data.grouping import passes_by_size, passes_that_fit

SIZES = st.lists(st.integers(0, 12), max_size=12)


@given(SIZES, st.integers(1, 20))
def test_groups_by_size_are_whole_in_order_and_full(sizes: list[int], most: int) -> None:
    groups = passes_by_size(range(len(sizes)), sizes.__getitem__, most)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(
        total <= most or len(group) == 1 for total, group in zip(totals, groups, strict=True)
    )
    following = [sizes[group[0]] for group in groups[1:]]
    assert all(total + n > most for total, n in zip(totals, following, strict=False))


def test_a_group_is_what_its_items_come_to() -> None:
    def longest(so_far: tuple[int, int] | None, i: int) -> tuple[int, int]:
        count, width = so_far or (0, 0)
        return count + 1, max(width, lengths[i])

    lengths = [2, 2, 5, 1, 9, 1]
    assert passes_that_fit(range(6), longest, lambda x: x[0] * x[1] <= 6) == [
        [0, 1],
        [2],
        [3],
        [4],
        [5],
    ]
    assert passes_that_fit([], longest, lambda x: True) == []
