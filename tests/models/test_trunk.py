"""A model in two parts computes what it computes in one."""

import copy

import pytest
import torch

from fastrl.models.scoring import ScoringRequest
from fastrl.models.trunk import Trunk, layer_stack
from tests import tiny_models
from tests.models.conftest import FAMILIES, counted, deep


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


def test_a_copy_of_a_model_has_a_trunk_of_its_own():
    model = deep("gpt2")
    model.trunk = Trunk(model.pretrained_model, 2)
    other = copy.deepcopy(model)
    assert other.trunk.stack is layer_stack(other.pretrained_model)
    assert other.trunk.stack is not model.trunk.stack
