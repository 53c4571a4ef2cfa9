"""Sets of tokens, one for each row of logits: what a softmax is over, where it is cut.

A sampler that cuts its distribution, by top-p, a grammar or banned tokens, draws from the softmax
over some of the vocabulary. Such a set is kept as the shortest of three forms: the ids in it, the
ids that are not, or a bit for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .checks import check_device

# Kinds of sets: ids, the ids that are missing, words of 32 tokens, all tokens whatever the data.
ONLY, BUT, BITS, WHOLE = 0, 1, 2, 3
_WORD = 32
_AT_A_TIME = 1 << 24  # elements of masks that exist at a time
_IN_CACHE = 1 << 18  # elements that are worked on at a time
_GATHER = 0x0102040810204080  # collects the lowest bits of eight bytes in the highest byte


@dataclass(frozen=True, eq=False)
class TokenSets:
    """Which tokens of a vocabulary each of N rows has.

    Made by :meth:`of_ids`, :meth:`of_mask`, :meth:`of_words` or :meth:`whole`; the fields are for
    kernels.

    Attributes:
        kinds: [N] uint8, 0 for rows whose data are the ids of their tokens, 1 the ids of all other
            tokens, 2 a bit for each token, 3 whatever they are, and the set is whole.
        offsets: [N + 1] int64, where the rows' data begin and end.
        data: [M] int32: ids in ascending order, or words whose bit i is the token 32·word + i.
        vocabulary: the number of tokens that there are.
        longest: what no row has more ids than.
    """

    kinds: Tensor
    offsets: Tensor
    data: Tensor
    vocabulary: int
    longest: int

    def __len__(self) -> int:
        return len(self.kinds)

    @classmethod
    def whole(cls, n: int, vocabulary: int) -> TokenSets:
        """N sets of all tokens."""
        offsets = torch.zeros(n + 1, dtype=torch.int64)
        kinds = torch.full((n,), WHOLE, dtype=torch.uint8)
        return cls(kinds, offsets, torch.empty(0, dtype=torch.int32), vocabulary, 0)

    @classmethod
    def of_ids(cls, ids: Sequence[Sequence[int] | Tensor], vocabulary: int) -> TokenSets:
        """The sets with these ids, in any order.

        Raises:
            ValueError: an id outside of [0, vocabulary).
        """
        rows = [torch.as_tensor(row, dtype=torch.int64).unique() for row in ids]
        for i, row in enumerate(rows):
            if len(row) and not 0 <= int(row[0]) <= int(row[-1]) < vocabulary:
                raise ValueError(f"set {i} has ids outside of [0, {vocabulary})")
        parts = []
        for row in rows:
            if len(row) <= _words(vocabulary):
                parts.append(_of_rows(ONLY, row.view(1, -1), vocabulary))
            else:
                mask = torch.zeros(1, vocabulary, dtype=torch.bool)
                mask[0, row] = True
                parts.append(cls.of_mask(mask))
        return cls.joined(parts) if parts else cls.whole(0, vocabulary)

    @classmethod
    def of_mask(cls, mask: Tensor) -> TokenSets:
        """The sets of the tokens where ``mask`` [N, V] is True."""
        return cls.of_words(packed(mask), mask.shape[1])

    @classmethod
    def of_words(cls, words: Tensor, vocabulary: int) -> TokenSets:
        """The sets whose tokens are the bits of ``words`` [N, ⌈V/32⌉] int32, as grammars have them;
        bits from V on are ignored.

        Raises:
            ValueError: another shape.
        """
        width = _words(vocabulary)
        if words.dim() != 2 or words.shape[1] != width:
            raise ValueError(
                f"words have shape {tuple(words.shape)}: a vocabulary of {vocabulary} tokens has "
                f"[N, {width}]"
            )
        words = within(words.to("cpu", torch.int32).contiguous(), vocabulary)
        last = _last(vocabulary)
        counts = counts_of(words)
        kinds = torch.full((len(words),), BITS, dtype=torch.uint8)
        kinds[vocabulary - counts <= width] = BUT
        kinds[counts <= width] = ONLY
        lengths = torch.where(kinds == ONLY, counts, width)
        lengths = torch.where(kinds == BUT, vocabulary - counts, lengths)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        if (kinds == BITS).all():
            return cls(kinds, offsets, words.flatten().clone(), vocabulary, 0)
        data = torch.empty(int(offsets[-1]), dtype=torch.int32)
        at_a_time = max(1, _AT_A_TIME // max(1, vocabulary))
        for kind in (ONLY, BUT, BITS):
            for chosen in (kinds == kind).nonzero()[:, 0].split(at_a_time):
                found = words[chosen]
                if kind == BUT:
                    found = found.bitwise_not_()
                    found[:, -1:] &= last
                data[_places(offsets, chosen)] = found.flatten() if kind == BITS else ids_of(found)
        ids = lengths[kinds != BITS]
        return cls(kinds, offsets, data, vocabulary, int(ids.max()) if len(ids) else 0)

    @classmethod
    def joined(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """The rows of all parts, one after the other.

        Raises:
            ValueError: parts of several vocabularies.
        """
        if len({part.vocabulary for part in parts}) != 1:
            raise ValueError(
                "sets of one vocabulary can be joined, not those of "
                f"{sorted({part.vocabulary for part in parts})} tokens"
            )
        lengths = torch.cat([part.offsets.diff() for part in parts])
        return cls(
            torch.cat([part.kinds for part in parts]),
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            torch.cat([part.data for part in parts]),
            parts[0].vocabulary,
            max(part.longest for part in parts),
        )

    def select(self, rows: Tensor) -> TokenSets:
        """The sets of some rows, given by their indices [n] int64, in this order."""
        lengths = self.offsets.diff()[rows]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        data = self.data[_places(self.offsets, rows)]
        return replace(self, kinds=self.kinds[rows], offsets=offsets, data=data)

    def to(self, device: torch.device | str) -> TokenSets:
        moved = {x: getattr(self, x).to(device) for x in ("kinds", "offsets", "data")}
        return replace(self, **moved)

    def whole_where(self, rows: Tensor) -> TokenSets:
        """These sets, with all tokens in some rows, [N] bool."""
        # Their data would not be read: no shape depends on which rows they are.
        return replace(self, kinds=torch.where(rows, WHOLE, self.kinds))

    def fields(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Tensors and numbers that make the same sets, in the order of the constructor's."""
        return *self.tensors(), self.vocabulary, self.longest

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kinds, self.offsets, self.data

    def with_tensors(self, kinds: Tensor, offsets: Tensor, data: Tensor) -> TokenSets:
        return replace(self, kinds=kinds, offsets=offsets, data=data)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors())

    def sizes(self) -> Tensor:
        """The number of tokens of each set, [N] int64."""
        sizes = self.offsets.diff()
        sizes = torch.where(self.kinds == BUT, self.vocabulary - sizes, sizes)
        sizes = torch.where(self.kinds == WHOLE, self.vocabulary, sizes)
        of_bits = (self.kinds == BITS).nonzero()[:, 0]
        if len(of_bits):
            sizes[of_bits] = counts_of(self._bits(of_bits, 0, _words(self.vocabulary)))
        return sizes

    def words(self) -> Tensor:
        """The sets as bits, [N, ⌈V/32⌉] int32."""
        words = torch.empty(
            len(self), _words(self.vocabulary), dtype=torch.int32, device=self.data.device
        )
        at_a_time = max(1, _AT_A_TIME // max(1, self.vocabulary))
        for first in range(0, len(self), at_a_time):
            rows = slice(first, min(first + at_a_time, len(self)))
            words[rows] = packed(self._mask(rows))
        return words

    def mask(self) -> Tensor:
        """The sets as booleans, [N, V]."""
        return self._mask(slice(0, len(self)))

    def has(self, tokens: Tensor) -> Tensor:
        """Whether each set has one token, [N] bool; tokens [N] in any range."""
        known = (tokens >= 0) & (tokens < self.vocabulary)
        tokens = tokens.clamp(0, self.vocabulary - 1)
        rows, ids = self._pairs(slice(0, len(self)))
        named = torch.zeros(len(self), dtype=torch.bool, device=tokens.device)
        named[rows[ids == tokens[rows]]] = True
        found = named == (self.kinds == ONLY)
        of_bits = (self.kinds == BITS).nonzero()[:, 0]
        if len(of_bits):
            at = tokens[of_bits]
            words = self.data[self.offsets[of_bits] + at // _WORD]
            found[of_bits] = ((words >> (at % _WORD)) & 1) == 1
        return found & known

    def cuts(self, rows: slice) -> bool:
        """Whether some rows may have other sets than whole ones; True on devices that would have
        to be waited for."""
        if self.kinds.device.type != "cpu" or torch.compiler.is_compiling():
            return True
        kinds, lengths = self.kinds[rows], self.offsets[rows.start : rows.stop + 1].diff()
        return bool(((kinds != WHOLE) & ((kinds != BUT) | (lengths > 0))).any())

    def restrict_(self, x: Tensor, rows: slice, first: int = 0) -> None:
        """Gives logits x [r, C] of some rows, and of the tokens from ``first`` on, -inf where a
        token is not in the row's set."""
        kinds = self.kinds[rows]
        pair_rows, ids = self._pairs(rows)
        columns = ids - first
        if first or x.shape[1] < self.vocabulary:
            here = (columns >= 0) & (columns < x.shape[1])
            pair_rows, columns = pair_rows[here], columns[here]
        only = kinds == ONLY
        of_only = only[pair_rows]
        kept = pair_rows[of_only], columns[of_only]
        values = x[kept]
        if bool(only.all()):
            x.fill_(-torch.inf)  # a fifth of the other's time
        else:
            x.index_fill_(0, only.nonzero()[:, 0], -torch.inf)
            x.index_put_((pair_rows[~of_only], columns[~of_only]), x.new_tensor(-torch.inf))
        x.index_put_(kept, values)
        of_bits = (kinds == BITS).nonzero()[:, 0]
        if not len(of_bits):
            return
        words = self._bits(of_bits + rows.start, first // _WORD, _words(first + x.shape[1]))
        if len(of_bits) == len(x):
            restrict_to_words_(x, words, first % _WORD)
        else:
            x[of_bits] = restrict_to_words_(x[of_bits], words, first % _WORD)

    def _mask(self, rows: slice) -> Tensor:
        x = torch.zeros(rows.stop - rows.start, self.vocabulary, device=self.data.device)
        self.restrict_(x, rows)
        return x == 0

    def _pairs(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The ids that the rows' data name, and the row of each, counted from the first."""
        ends = self.offsets[rows.start : rows.stop + 1]
        names = self.kinds[rows] < BITS
        lengths = torch.where(names, ends.diff(), 0)
        of = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)
        if bool(names.all()):
            return of, self.data[ends[0] : ends[-1]].long()
        return of, self.data[_places(self.offsets, names.nonzero()[:, 0] + rows.start)].long()

    def _bits(self, rows: Tensor, first: int, end: int) -> Tensor:
        """The words from ``first`` to ``end`` of rows that have bits, [n, end - first]."""
        words = torch.arange(first, end, device=rows.device)
        return self.data[self.offsets[rows][:, None] + words]


def packed(mask: Tensor) -> Tensor:
    """Booleans [N, V] as bits, [N, ⌈V/32⌉] int32."""
    width = _words(mask.shape[1]) * _WORD
    if mask.shape[1] < width or not mask.is_contiguous():
        whole = mask.new_zeros(len(mask), width)
        whole[:, : mask.shape[1]] = mask
        mask = whole
    eights = mask.view(torch.int64)  # eight bytes, each 0 or 1
    return ((eights * _GATHER) >> 56).to(torch.uint8).view(torch.int32)


def unpacked(words: Tensor, columns: int, first: int = 0) -> Tensor:
    """The bits of words [N, W] as booleans [N, columns], from the token ``first`` on."""
    begin, end = first // 8, -(-(first + columns) // 8)
    octets = words.contiguous().view(torch.uint8)[:, begin:end].int()
    eights = _eights(words.device).index_select(0, octets.flatten())
    return eights.view(torch.bool).view(len(words), 8 * (end - begin))[:, first - 8 * begin :][
        :, :columns
    ]


def restrict_to_words_(x: Tensor, words: Tensor, first: int = 0) -> Tensor:
    """Gives logits x [r, C] -inf where words [r, W] have no bit, from the bit ``first`` on; NaN may
    stay."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return x.masked_fill_(~unpacked(words, x.shape[1], first), -torch.inf)
    # By bounds, a few rows at a time: masks of floats are chosen by branches, which take four times
    # as long.
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    bounds = torch.where(bits == 1, torch.inf, -torch.inf)
    begin, end = first // 8, -(-(first + x.shape[1]) // 8)
    octets = words.contiguous().view(torch.uint8)[:, begin:end].int()
    place = slice(first % 8, first % 8 + x.shape[1])
    step = max(1, _IN_CACHE // max(1, x.shape[1]))
    memory = torch.empty(min(step, len(x)) * octets.shape[1], 8)
    for i in range(0, len(x), step):
        part, of = x[i : i + step], octets[i : i + step]
        found = torch.index_select(bounds, 0, of.flatten(), out=memory[: of.numel()])
        bound = found.view(len(of), -1)[:, place]
        torch.minimum(part, bound, out=part)
    return x


def _eights(device: torch.device) -> Tensor:
    """The eight bits of each octet as eight bytes, [256] int64."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (bits & 1).bool().view(torch.int64)[:, 0]


def _words(vocabulary: int) -> int:
    return -(-vocabulary // _WORD)


def _last(vocabulary: int) -> int:
    """The bits of a row's last word."""
    return (1 << vocabulary % _WORD) - 1 if vocabulary % _WORD else -1


def within(words: Tensor, vocabulary: int) -> Tensor:
    """Words [N, W] without bits from ``vocabulary`` on."""
    last = _last(vocabulary)
    if last > 0:
        words = words.clone()
        words[:, -1:] &= last
    return words


def ids_of(words: Tensor) -> Tensor:
    """The places of the bits that are set in each row of words [N, W], one row after the other."""
    rows, columns = words.nonzero(as_tuple=True)
    bits = (words[rows, columns][:, None] >> torch.arange(_WORD)) & 1
    of, bit = bits.nonzero(as_tuple=True)
    return (columns[of] * _WORD + bit).int()


def counts_of(words: Tensor) -> Tensor:
    """The number of bits that are set in each row of words, [N] int64."""
    # In twos, fours, eights, and all four eights at once: Warren, Hacker's Delight, 5-1.
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333).add_((x >> 2).bitwise_and_(0x33333333))
    x = x.add_(x >> 4).bitwise_and_(0x0F0F0F0F).mul_(0x01010101) >> 24
    return x.sum(-1)


def _places(offsets: Tensor, rows: Tensor) -> Tensor:
    """The places of some rows' data, one row after the other."""
    begins = offsets[rows]
    lengths = offsets[rows + 1] - begins
    before = lengths.cumsum(0) - lengths
    shift = (begins - before).repeat_interleave(lengths)
    return shift + torch.arange(len(shift), device=offsets.device)


def _of_rows(kind: int, ids: Tensor, vocabulary: int) -> TokenSets:
    """Sets of one kind, with as many ids [n, K] each."""
    n, k = ids.shape
    kinds = torch.full((n,), kind, dtype=torch.uint8)
    return TokenSets(kinds, torch.arange(n + 1) * k, ids.flatten().int(), vocabulary, k)


def checked_support(
    support: TokenSets | None, vocabulary: int, counted: Tensor, labels: Tensor, read: bool
) -> TokenSets | None:
    """Checks the sets of N rows, and gives them back with all tokens for rows that do not count.

    Args:
        counted, labels: [N]; labels of rows that count are in [0, vocabulary).
        read: also check what has to wait for a device: that each set has its label.

    Raises:
        TypeError: anything but :class:`TokenSets`.
        ValueError: sets of another number of rows, of another vocabulary or on another device; a
            set without its label.
    """
    if support is None:
        return None
    if not isinstance(support, TokenSets):
        raise TypeError(
            f"support is a {type(support).__name__}: pass TokenSets.of_ids(...), .of_mask(...) or "
            ".of_words(...)"
        )
    n = len(labels)
    if len(support) != n:
        raise ValueError(f"support has {len(support)} sets: there must be {n}, one for each result")
    if support.vocabulary != vocabulary:
        raise ValueError(
            f"support is of a vocabulary of {support.vocabulary} tokens, the head has {vocabulary}"
        )
    for name, x in zip(("kinds", "offsets", "data"), support.tensors(), strict=True):
        check_device(f"support.{name}", x, "hidden", counted)
    if read and not torch.compiler.is_compiling():
        lacks = counted & ~support.has(labels)
        if lacks.any():
            row = int(lacks.nonzero()[0])
            raise ValueError(
                f"set {row} of support does not have the label {int(labels[row])}: a token that "
                "was drawn is always in the set that it was drawn from"
            )
    return support.whole_where(~counted)
