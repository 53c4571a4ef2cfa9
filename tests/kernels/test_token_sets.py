"""Sets of tokens, and the ops that take a softmax over them, against float64."""

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import TokenSets, gemm, linear_logprobs, reference
from fastrl_kernels.token_sets import packed, restrict_to_words_, unpacked
from fastrl_kernels.types import KL_KINDS
from tests.kernels.judge import judge
from tests.kernels.test_linear_logprobs import (
    WORKSPACE,
    assert_logits_never_exist,
    assert_same_bits,
    batch,
    run,
    with_holes,
)
from tests.kernels.test_linear_properties import LIMITS, head, ppo_formula, ppo_loss
from tests.kernels.test_properties import Draw, examples
from tests.kernels.test_vocab_parallel import CUTS, group, shared  # noqa: F401
from tests.kernels.test_vocab_parallel import judge as judge_shared

SIZES = (1, 31, 32, 33, 64, 507, 5003)
# The number of tokens of a set, by the vocabulary's; None: one of the others for each row.
KINDS = {
    "one": lambda _: 1,
    "two": lambda _: 2,
    "512": lambda _: 512,
    "half": lambda v: v // 2 + 1,
    "all but one": lambda v: v - 1,
    "all": lambda v: v,
    "mixed": None,
}


def drawn_mask(random: Random, labels: Tensor, vocabulary: int, kind: str) -> Tensor:
    """Which tokens each of the flat ``labels`` may be, [N, V] bool, itself among them."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    order = torch.rand(len(labels), vocabulary, generator=generator)
    order[torch.arange(len(labels)), labels.clamp(min=0)] = -1.0
    sizes = [size for size in KINDS.values() if size is not None]
    counts = [(KINDS[kind] or random.choice(sizes))(vocabulary) for _ in range(len(labels))]
    counts = torch.tensor(counts).clamp(1, vocabulary).view(-1, 1)
    return order.argsort(-1).argsort(-1) < counts


def with_sets(draw: Draw, inputs: dict[str, Any], kind: str) -> TokenSets:
    """Adds drawn sets, and gives them as an op takes them; ``inputs`` get the formula's mask."""
    shift = int(inputs.get("shift", 0))
    labels = inputs["labels"][..., shift:] if shift else inputs["labels"]
    mask = drawn_mask(draw.random, labels.flatten().cpu().long(), len(inputs["weight"]), kind)
    inputs["support"] = mask.view(*labels.shape, mask.shape[1]).to(draw.device)
    return TokenSets.of_mask(mask).to(draw.device)


def check(op: Any, formula: Any, inputs: dict[str, Any], sets: TokenSets) -> dict[str, Tensor]:
    """Judges values and gradients, and that tokens outside of all sets get no gradient."""
    tensors = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and n != "support"}
    others = {n: x for n, x in inputs.items() if x is not None and not isinstance(x, Tensor)}
    op = partial(op, support=sets, **others)
    formula = partial(
        formula, support=inputs["support"], **{n: x for n, x in others.items() if n not in LIMITS}
    )
    wrt = [name for name in ("hidden", "weight", "bias") if name in inputs]
    found = judge(op, formula, tensors, wrt=wrt, own_dtypes=True)
    nowhere = ~inputs["support"].reshape(-1, len(inputs["weight"])).any(0)
    assert not found["dweight"][nowhere].any()
    return found


@pytest.mark.parametrize("kind", KINDS)
@examples(9)
def test_log_probs_and_entropies_over_sets(backend, device, kind, random):
    draw = Draw(random, device)
    leading = draw.one_of(((), (1,), (9,), (2, 3), (3, 7), (0, 4)), "leading")
    inputs = head(draw, leading)
    if len(leading) and leading[-1] > 2 and draw.sometimes("shift"):
        inputs["shift"] = draw.one_of((1, 2), "shift")
        leading = (*leading[:-1], leading[-1] - inputs["shift"])
    inputs["temperature"] = draw.temperature(leading)
    inputs["mask"] = draw.perhaps(draw.mask(leading), "masked")
    inputs["entropy"] = draw.sometimes("entropy")
    sets = with_sets(draw, inputs, kind)
    op = partial(linear_logprobs, backend=backend)
    check(op, reference.linear_logprobs, inputs, sets)


@pytest.mark.parametrize("kind", KINDS)
@examples(9)
def test_losses_over_sets(backend, device, kind, random):
    draw = Draw(random, device)
    draw.dtype = torch.float32  # in bf16 a ratio near a bound may be clipped on one side alone
    leading = draw.one_of(((1,), (9,), (2, 3), (3, 7)), "leading")
    inputs = head(draw, leading)
    mask = inputs["mask"] = draw.mask(leading)
    sets = with_sets(draw, inputs, kind)
    given = {k: inputs[k] for k in ("bias", "temperature", "softcap", "logit_scale") if k in inputs}
    old = linear_logprobs(
        inputs["hidden"], inputs["weight"], inputs["labels"].long(), **given, support=sets,
        backend="torch",
    )  # fmt: skip
    inputs["old_logprobs"] = old.float() + draw.normal(leading, 0.3).to(device)
    inputs["advantages"] = draw.placed(draw.normal(leading))
    if draw.sometimes("KL loss"):
        inputs["ref_logprobs"] = old.float() + draw.normal(leading, 0.3).to(device)
        inputs["kind"] = draw.one_of(KL_KINDS, "kind")
    inputs["entropy_coef"] = draw.one_of((0.0, 0.1), "entropy_coef")
    assert mask.shape == leading

    check(partial(ppo_loss, backend), ppo_formula, inputs, sets)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_set_may_have_tokens_that_a_bias_bars(backend, device, softcap):
    """Of probability 0, or with a soft cap of the lowest logit; others are in no distribution."""
    inputs = batch(9, 507, device=device, bias=True)
    inputs["bias"][::3] = -torch.inf
    inputs["labels"] = inputs["labels"] // 3 * 3 + 1
    mask = drawn_mask(Random(5), inputs["labels"].cpu(), 507, "mixed")
    inputs["support"] = mask.to(device)
    options = {"entropy": True, "softcap": softcap}
    op = partial(linear_logprobs, backend=backend, **options)
    formula = partial(reference.linear_logprobs, **options)
    check(op, formula, inputs, TokenSets.of_mask(mask).to(device))


@pytest.mark.parametrize("library", ["mm", "onednn"])
@pytest.mark.parametrize("workspace", [None, WORKSPACE])
def test_sets_of_all_tokens_change_no_bit(backend, device, library, workspace, monkeypatch):
    """Also where a CPU takes a vocabulary in pieces, which is up to the library of its products."""
    monkeypatch.setenv(gemm.LIBRARY_VARIABLE, library)
    inputs = with_holes(batch(11, 2500, device=device, bias=True))
    n = inputs["labels"].numel()
    whole = {
        "whole": TokenSets.whole(n, 2500),
        "none missing": TokenSets.of_mask(torch.ones(n, 2500, dtype=torch.bool)),
    }
    for options in ({}, {"softcap": 5.0}):
        options = {**options, "workspace_bytes": workspace, "backend": backend}
        expected = run(inputs, **options)
        for sets in whole.values():
            assert_same_bits(run(inputs, support=sets.to(device), **options), expected)


@pytest.mark.parametrize("library", ["mm", "onednn"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_set_of_one_token_has_a_log_prob_of_0_and_no_gradient(
    backend, device, library, softcap, monkeypatch
):
    monkeypatch.setenv(gemm.LIBRARY_VARIABLE, library)
    inputs = batch(11, 2500, device=device, bias=True)
    sets = TokenSets.of_ids(inputs["labels"].view(-1, 1).cpu(), 2500).to(device)
    logprobs, entropies, *gradients = run(inputs, support=sets, softcap=softcap, backend=backend)
    assert not logprobs.any()
    assert not entropies.any()
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["one", "two", "half", "mixed"])
def test_processes_share_a_vocabulary_of_which_sets_have_some(shared, backend, device, cut, kind):  # noqa: F811
    inputs = with_holes(batch(9, 507, device=device, bias=True))
    mask = drawn_mask(Random(5), inputs["labels"].cpu(), 507, kind)
    sets = TokenSets.of_mask(mask).to(device)
    op = partial(linear_logprobs, entropy=True, support=sets, backend=backend)
    formula = partial(reference.linear_logprobs, entropy=True, support=mask.to(device))
    judge_shared(shared, op, formula, inputs, CUTS[cut])


def test_logits_never_exist(backend, device):
    def make(n: int, vocabulary: int, **options: Any) -> dict[str, Any]:
        inputs = batch(n, vocabulary, **options)
        mask = drawn_mask(Random(5), inputs["labels"].cpu(), vocabulary, "mixed")
        return {**inputs, "support": TokenSets.of_mask(mask).to(device)}

    def of_tensors(inputs: dict[str, Any], **options: Any) -> Any:
        return run(inputs, **options)

    assert_logits_never_exist(of_tensors, make, device, backend=backend)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_sets_are_what_they_are_made_of(vocabulary):
    torch.manual_seed(vocabulary)
    shares = torch.rand(24, 1).pow(3)
    mask = torch.rand(24, vocabulary) < torch.cat([shares[:12], 1 - shares[12:]])
    mask[5], mask[6] = False, True
    sets, tokens = TokenSets.of_mask(mask), torch.randint(vocabulary, (24,))
    order, rows = torch.randperm(24), torch.arange(24)
    assert torch.equal(sets.mask(), mask)
    assert torch.equal(sets.sizes(), mask.sum(-1))
    assert torch.equal(unpacked(packed(mask), vocabulary), mask)
    assert torch.equal(sets.words(), packed(mask))
    assert torch.equal(sets.has(tokens), mask[rows, tokens])
    assert not sets.has(torch.full((24,), vocabulary)).any()
    assert torch.equal(sets.select(order).mask(), mask[order])
    assert torch.equal(TokenSets.joined([sets, sets.select(order)]).mask()[24:], mask[order])
    of_ids = TokenSets.of_ids([row.nonzero()[:, 0].flip(0) for row in mask], vocabulary)
    assert torch.equal(of_ids.mask(), mask)
    assert sets.nbytes <= packed(mask).nbytes + 24 * 9 + 8
    chosen = torch.rand(24) < 0.3
    assert torch.equal(sets.whole_where(chosen).mask(), mask | chosen[:, None])
    assert torch.equal(sets.whole_where(chosen).sizes(), (mask | chosen[:, None]).sum(-1))
    assert torch.equal(sets.whole_where(chosen).has(tokens), mask[rows, tokens] | chosen)


def test_short_sets_are_ids_and_long_ones_what_is_missing():
    v = 50257
    few, many = torch.arange(20), torch.arange(v - 20)
    half = torch.arange(0, v, 2)
    sets = TokenSets.of_ids([few, many, half], v)
    assert sets.offsets.diff().tolist() == [20, 20, -(-v // 32)]


def lacking(labels: list[int]) -> TokenSets:
    """The labels' sets, of which the last has another token."""
    return TokenSets.of_ids([*([y] for y in labels[:-1]), [(labels[-1] + 1) % 60]], 60)


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda _: [[1]], TypeError, "support is a list: pass TokenSets"),
    (lambda _: TokenSets.whole(4, 60), ValueError, "support has 4 sets: there must be 5"),
    (lambda _: TokenSets.whole(5, 61), ValueError, "a vocabulary of 61 tokens, the head has 60"),
    (lacking, ValueError, "set 4 of support does not have the label"),
])  # fmt: skip
def test_bad_sets_are_named(device, change, error, message):
    inputs = batch(5, 60, device=device)
    support = change(inputs["labels"].tolist())
    if isinstance(support, TokenSets):
        support = support.to(device)
    with pytest.raises(error, match=message):
        linear_logprobs(**inputs, support=support, check_labels=True)


def test_other_misuse_is_named():
    with pytest.raises(ValueError, match=r"set 1 has ids outside of \[0, 7\)"):
        TokenSets.of_ids([[0], [7]], 7)
    with pytest.raises(ValueError, match=r"a vocabulary of 33 tokens has \[N, 2\]"):
        TokenSets.of_words(torch.zeros(1, 1, dtype=torch.int32), 33)
    with pytest.raises(ValueError, match=r"not those of \[7, 8\] tokens"):
        TokenSets.joined([TokenSets.whole(1, 7), TokenSets.whole(1, 8)])
    with pytest.raises(ValueError, match="mean_logit is of all tokens"):
        linear_logprobs(**batch(1, 7), support=TokenSets.whole(1, 7), extras=("mean_logit",))


@pytest.mark.parametrize(("rows", "first", "columns"), [
    (1, 0, 1), (3, 5, 20), (7, 40, 17), (2, 31, 2), (300, 0, 5003), (9, 4096, 907),
])  # fmt: skip
def test_words_restrict_logits_of_any_columns_whatever_they_are(rows, first, columns):
    torch.manual_seed(0)
    mask = torch.rand(rows, first + columns) < 0.5
    x = torch.randn(rows, first + columns + 9)[:, 3 : 3 + columns]  # rows of a stride
    x[0, 0], x[-1, -1] = -torch.inf, torch.inf
    expected = x.masked_fill(~mask[:, first:], -torch.inf)
    found = restrict_to_words_(x, packed(mask)[:, first // 32 :], first % 32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
