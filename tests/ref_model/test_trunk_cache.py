"""Activations of shared layers are run once, within their budgets."""

import pytest
import torch

from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import Padded
from fastrl.learn.ref_model.trunk_cache import Budget, TrunkCache
from fastrl.models.trunk import Trunk, layer_stack
from tests import tiny_models
from tests.models.conftest import LENGTHS, batch_of, counted, deep

PADDINGS = pytest.mark.parametrize("padding", [PaddingFree(), Padded()], ids=["packed", "padded"])
TOKENS = sum(LENGTHS)
ROW = 16 * 4  # bytes of a token's activations


def trunk_cache(model, lengths, budget, padding=None, **limit):
    trunk = Trunk(model.pretrained_model, 2)
    batch = batch_of(tiny_models.prompts(*lengths), padding=padding)
    return TrunkCache(trunk, batch, budget, **limit)


@PADDINGS
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("left", [True, False])
def test_activations_are_those_of_the_sequences_alone(family, left, padding):
    model = deep(family)
    found = trunk_cache(model, LENGTHS, Budget(1 << 20), padding).padded([4, 1, 3], left)
    assert found.shape[:2] == (3, 40)
    trunk = Trunk(model.pretrained_model, 2)
    sequences = tiny_models.prompts(*LENGTHS)
    for row, i in zip(found, [4, 1, 3], strict=True):
        n = LENGTHS[i]
        real, rest = (row[-n:], row[:-n]) if left else (row[:n], row[n:])
        torch.testing.assert_close(real, trunk(sequences[i][None])[0], atol=1e-5, rtol=1e-6)
        assert not rest.any()


@PADDINGS
def test_a_prompt_runs_once_for_its_responses_and_is_kept_once(padding):
    model = deep("gpt2")
    prompts, responses = tiny_models.prompts(5, 7), tiny_models.prompts(3, 2, 4, 6, seed=1)
    of_prompt = [0, 1, 0, 0]
    sequences = [torch.cat([prompts[k], r]) for k, r in zip(of_prompt, responses, strict=True)]
    batch = batch_of(sequences, [len(prompts[k]) for k in of_prompt], padding)
    trunk = Trunk(model.pretrained_model, 2)
    cache = TrunkCache(trunk, batch, Budget(1 << 20))
    counts = counted(model)
    found = cache.packed([3, 1, 0], [[0, 2], [1]])
    once = 5 + 7 + 3 + 2 + 4 + 6
    assert counts[0] == (once if isinstance(padding, PaddingFree) else 4 * 11 + 0)
    assert sum(len(x) for x in cache.stored()) == once
    alone = [trunk(x[None])[0] for x in sequences]
    places = [alone[3][:5], alone[1], alone[3][5:], alone[0][5:]]
    torch.testing.assert_close(found[0], torch.cat(places), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("budget", "again"), [
    (Budget(TOKENS * ROW), 0),
    (Budget(0, TOKENS * ROW), 0),
    (Budget(0), TOKENS),
    # The first three samples, and of the fourth the response alone.
    (Budget(51 * ROW), TOKENS - 50),
    (Budget(10 * ROW, 40 * ROW), TOKENS - 50),
], ids=["device", "host", "none", "some", "some on the host"])  # fmt: skip
def test_what_the_budget_holds_is_not_run_again_and_the_rest_gives_the_same(budget, again):
    model = deep("gpt2")
    kept = trunk_cache(model, LENGTHS, budget)
    counts = counted(model)
    first = kept.padded([0, 1, 2], False), kept.padded([5, 3, 4], True)
    assert counts[0] == TOKENS
    counts.clear()
    torch.testing.assert_close(kept.padded([0, 1, 2], False), first[0])
    torch.testing.assert_close(kept.padded([5, 3, 4], True), first[1])
    assert counts.get(0, 0) == again


def test_sequences_run_together_as_far_as_the_budget_and_a_pass_hold_them():
    model = deep("gpt2")
    passes = []
    layer_stack(model.pretrained_model)[0].register_forward_pre_hook(
        lambda _m, args: passes.append(tuple(args[0].shape[:2]))
    )
    kept = trunk_cache(model, LENGTHS, Budget(1 << 20))
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, TOKENS)]
    kept = trunk_cache(model, LENGTHS, Budget(1 << 20), tokens_per_pass=60)
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, 3 + 40 + 7), (1, 12 + 2 + 33)]
    kept = trunk_cache(model, LENGTHS, Budget(TOKENS * ROW - 1))
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, 12)], "what was not asked for is not computed"
