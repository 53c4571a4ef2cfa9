"""A model in two parts computes what it computes in one."""

import copy

import pytest
import torch

from fastrl.data.packing import Padded, PaddingFree
from fastrl.models.scoring import ScoringRequest
from fastrl.models.trunk import Budget, Trunk, TrunkCache, layer_stack
from tests import tiny_models
from tests.models.conftest import FAMILIES, LENGTHS, batch_of, counted, deep, trunk_cache


def inputs(*lengths):
    ids = torch.nn.utils.rnn.pad_sequence(tiny_models.prompts(*lengths), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n).long() for n in lengths], True)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_starts_at_the_boundary_gives_the_same(family, layers):
    model = deep(family)
    trunk = model.trunk = Trunk(model.pretrained_model, layers)
    batch = inputs(9, 9)
    request = ScoringRequest(torch.arange(3, 15), batch["input_ids"].flatten()[4:16])
    expected = model(**batch), model(**batch, scoring=request)
    counts = counted(model)
    boundary = trunk(batch["input_ids"])
    assert counts == {i: 18 for i in range(layers)}
    counts.clear()
    found = model(**batch, boundary=boundary), model(**batch, boundary=boundary, scoring=request)
    assert counts == {i: 36 for i in range(layers, 4)}
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            if x is not None:
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)  # of logits up to 4, in fp32
    counts.clear()
    again = model(**batch)[0]
    assert counts == {i: 18 for i in range(4)}, "the layers are back"
    torch.testing.assert_close(again, expected[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "opt_projected", "gptj", "bloom"])
def test_what_is_frozen_is_what_lies_below(family):
    model = deep(family, **({"n_layer": 4} if family in ("gptj", "bloom") else {}))
    trunk = Trunk(model.pretrained_model, 3)
    trunk.freeze()
    stack = layer_stack(model.pretrained_model)
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert {id(p) for layer in stack[:3] for p in layer.parameters()} < frozen
    assert id(model.get_output_embeddings().weight) in frozen or not trunk.head_is_tied
    above = [*stack[3].parameters(), *model.v_head.parameters()]
    last_norm = ("transformer.ln_f", "_neox.final_layer_norm", "decoder.final_layer_norm", "l.norm")
    norm = [m for name, m in model.named_modules() if name.endswith(last_norm)]
    above += [p for m in norm for p in m.parameters()]
    assert len(norm) == (0 if family == "opt_projected" else 1)
    assert not {id(p) for p in above} & frozen
    assert trunk.head_is_tied == model.config.tie_word_embeddings
    assert sum(p.requires_grad for p in model.parameters()) >= len(above)


def test_the_layers_are_back_after_an_error():
    model = deep("gpt2")
    trunk = Trunk(model.pretrained_model, 2)
    before = list(trunk.stack)
    with pytest.raises(RuntimeError), trunk.skipped(torch.zeros(1, 2, 16)):
        raise RuntimeError
    assert all(a is b for a, b in zip(trunk.stack, before, strict=True))
    with pytest.raises(RuntimeError):
        trunk(torch.zeros(1, 2))  # no token ids
    assert all(a is b for a, b in zip(trunk.stack, before, strict=True))


def test_checksums_see_single_bits_and_places():
    model = deep("gpt2")
    trunk = Trunk(model.pretrained_model, 2)
    before = trunk.checksum()
    assert trunk.checksum() == before
    weight = model.pretrained_model.transformer.h[1].mlp.c_fc.weight.data
    kept = weight.clone()
    weight.view(torch.int32)[3, 4] ^= 1
    assert trunk.checksum() != before
    weight.copy_(kept.flip(0))
    assert trunk.checksum() != before
    weight.copy_(kept)
    assert trunk.checksum() == before
    model.pretrained_model.transformer.h[2].mlp.c_fc.weight.data.zero_()
    assert trunk.checksum() == before, "that one is trained"


@pytest.mark.parametrize("layers", [-1, 0, 4, 5])
def test_a_layer_is_shared_and_a_layer_is_left(layers):
    with pytest.raises(ValueError, match=rf"num_shared_layers must lie .* 1 and 3, got {layers}"):
        Trunk(deep("llama").pretrained_model, layers)


PACKINGS = pytest.mark.parametrize("packing", [PaddingFree(), Padded()], ids=["packed", "padded"])
TOKENS = sum(LENGTHS)
ROW = 16 * 4  # bytes of a token's activations


@PACKINGS
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("left", [True, False])
def test_activations_are_those_of_the_sequences_alone(family, left, packing):
    model = deep(family)
    found = trunk_cache(model, LENGTHS, Budget(1 << 20), packing).padded([4, 1, 3], left)
    assert found.shape[:2] == (3, 40)
    trunk = Trunk(model.pretrained_model, 2)
    sequences = tiny_models.prompts(*LENGTHS)
    for row, i in zip(found, [4, 1, 3], strict=True):
        n = LENGTHS[i]
        real, rest = (row[-n:], row[:-n]) if left else (row[:n], row[n:])
        torch.testing.assert_close(real, trunk(sequences[i][None])[0], atol=1e-5, rtol=1e-6)
        assert not rest.any()


@PACKINGS
def test_a_prompt_runs_once_for_its_responses_and_is_kept_once(packing):
    model = deep("gpt2")
    prompts, responses = tiny_models.prompts(5, 7), tiny_models.prompts(3, 2, 4, 6, seed=1)
    of_prompt = [0, 1, 0, 0]
    sequences = [torch.cat([prompts[k], r]) for k, r in zip(of_prompt, responses, strict=True)]
    batch = batch_of(sequences, [len(prompts[k]) for k in of_prompt], packing)
    trunk = Trunk(model.pretrained_model, 2)
    cache = TrunkCache(trunk, batch, Budget(1 << 20))
    counts = counted(model)
    found = cache.packed([3, 1, 0], [[0, 2], [1]])
    once = 5 + 7 + 3 + 2 + 4 + 6
    assert counts[0] == (once if isinstance(packing, PaddingFree) else 4 * 11 + 0)
    assert sum(len(x) for x in cache.stored()) == once
    alone = [trunk(x[None])[0] for x in sequences]
    places = [alone[3][:5], alone[1], alone[3][5:], alone[0][5:]]
    torch.testing.assert_close(found[0], torch.cat(places), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("budget", "again"),
    [
        (Budget(TOKENS * ROW), 0),
        (Budget(0, TOKENS * ROW), 0),
        (Budget(0), TOKENS),
        # The first three samples, and of the fourth the response alone.
        (Budget(51 * ROW), TOKENS - 50),
        (Budget(10 * ROW, 40 * ROW), TOKENS - 50),
    ],
    ids=["device", "host", "none", "some", "some on the host"],
)
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


def test_sequences_run_together_as_far_as_the_budget_and_a_pass_hold_them(monkeypatch):
    model = deep("gpt2")
    passes = []
    layer_stack(model.pretrained_model)[0].register_forward_pre_hook(
        lambda _m, args: passes.append(tuple(args[0].shape[:2]))
    )
    kept = trunk_cache(model, LENGTHS, Budget(1 << 20))
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, TOKENS)]
    monkeypatch.setattr("fastrl.models.trunk._TOKENS_PER_FORWARD", 60)
    kept = trunk_cache(model, LENGTHS, Budget(1 << 20))
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, 3 + 40 + 7), (1, 12 + 2 + 33)]
    kept = trunk_cache(model, LENGTHS, Budget(TOKENS * ROW - 1))
    passes.clear()
    kept.padded([3], False)
    assert passes == [(1, 12)], "what was not asked for is not computed"


def test_a_copy_of_a_model_has_a_trunk_of_its_own():
    model = deep("gpt2")
    model.trunk = Trunk(model.pretrained_model, 2)
    other = copy.deepcopy(model)
    assert other.trunk.stack is layer_stack(other.pretrained_model)
    assert other.trunk.stack is not model.trunk.stack
