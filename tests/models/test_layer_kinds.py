"""Layers of every kind: rollouts and packed rows are those of plain forwards."""

import contextlib
import re

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.data.choose_padding import why_not_packed
from fastrl.models import layer_functions
from fastrl.models.attention import replaced, why_not_replaceable
from fastrl.models.latents import latent_layers
from fastrl.models.packed_attention import Group, PackedAttention, PackedLayout
from fastrl.rollout.choose_engine import choose_engine
from fastrl.rollout.self_check import UnsupportedModel
from tests import tiny_models
from tests.golden import tiny
from tests.models.test_packed_attention import sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = tiny_models.KINDS + tiny_models.MORE_KINDS + tiny_models.OF_ATTENTION
GROUPS = (Group(11, (9, 4, 13)), Group(7), Group(2, (3, 12)))
# Of log-probs near -5, whose terms are up to 5 in fp32; gradients beside the largest of a weight.
CLOSE = 1e-5


def build(family, dtype=torch.float32, **changes):
    """With sinks and scores that are far from equal. Delta rules of small outputs are normalised:
    with smaller weights, what fp32 rounds of them is not made so much larger."""
    model = tiny_models.language_model(family, **changes).to(DEVICE, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 1.5, len(parameter)))
            elif hasattr(model.config, "linear_key_head_dim") and "weight" in name:
                parameter.mul_(0.3 if "linear_attn" in name or "lm_head" in name else 1.0)
    return model


def logprobs(model, ids, positions=None):
    """Log-softmax [T, V] of a row of tokens."""
    given = {} if positions is None else {"position_ids": positions[None]}
    row = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    return model(**row, **given, use_cache=False).logits[0].log_softmax(-1)


def packed_logprobs(model, ids, layout):
    with replaced(model, PackedAttention(layout)):
        return logprobs(model, ids, layout.positions)


def words(count, seed=0):
    return tiny_models.prompts(count, seed=seed)[0].to(DEVICE)


def gradients(model, loss):
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("repeated", [False, True], ids=["prompts once", "prompts repeated"])
def test_a_packed_row_is_its_sequences_alone(family, repeated):
    """Log-probs of every token, and the gradient of every weight."""
    once, model = PackedLayout(GROUPS, DEVICE), build(family)
    ids = words(once.tokens)
    weights = torch.randn(once.tokens, tiny.VOCABULARY, generator=torch.Generator().manual_seed(1))
    weights = weights.to(DEVICE)
    places = sequences(once)
    layout, row = once, torch.arange(once.tokens)
    if repeated:
        layout, row = PackedLayout([Group(len(x)) for x in places], DEVICE), torch.cat(places)
    # Of a token that stands several times, each time its share.
    share = (1 / row.bincount()[row, None]).to(DEVICE)
    found = packed_logprobs(model, ids[row], layout)
    got = gradients(model, (found * weights[row] * share).sum())

    alone, loss = build(family), torch.zeros((), device=DEVICE)
    times = torch.cat(places).bincount()
    for own in places:
        expected = logprobs(alone, ids[own])
        loss = loss + (expected * weights[own] / times[own, None].to(DEVICE)).sum()
        at = torch.tensor([(row == i).nonzero()[0, 0] for i in own])
        assert (found[at] - expected).abs().max() <= CLOSE
    wanted = gradients(alone, loss)
    assert got.keys() == wanted.keys() == dict(alone.named_parameters()).keys()
    for name, right in wanted.items():
        assert (got[name] - right).abs().max() <= CLOSE * right.abs().max().clamp(min=1), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbours_tokens_change_not_one_bit(family):
    layout, model = PackedLayout(GROUPS, DEVICE), build(family)
    ids = words(layout.tokens)
    ours = torch.cat(sequences(layout)[-2:]).unique()  # the last group
    others = torch.ones(layout.tokens, dtype=torch.bool, device=DEVICE)
    others[ours] = False
    changed = torch.where(others, words(layout.tokens, seed=7), ids)
    with torch.no_grad():
        before, after = (packed_logprobs(model, x, layout)[ours] for x in (ids, changed))
    assert torch.equal(before, after)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with replaced(model, PackedAttention(layout)):
        out = model(
            inputs_embeds=embedded[None],
            position_ids=layout.positions[None],
            attention_mask=torch.ones_like(ids)[None],
            use_cache=False,
        ).logits
    (grad,) = torch.autograd.grad(out[0, ours].square().sum(), embedded)
    assert grad[ours].abs().min(0).values.max() > 0
    assert (grad[others] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_of_other_lengths_and_places_change_next_to_nothing(family):
    """Products of other shapes round otherwise."""
    ours, model = Group(6, (9, 4)), build(family)
    ids = words(ours.prompt + sum(ours.responses))
    found = []
    for groups in ([ours], [Group(3, (17, 2)), ours, Group(40)], [Group(1), Group(5, (6,)), ours]):
        layout = PackedLayout(groups, DEVICE)
        at = groups.index(ours)
        begin = sum(group.prompt for group in groups[:at])
        behind = layout.first_response + sum(sum(group.responses) for group in groups[:at])
        places = torch.cat(
            [
                torch.arange(begin, begin + ours.prompt),
                torch.arange(behind, behind + sum(ours.responses)),
            ]
        )
        row = words(layout.tokens, seed=len(groups) + at)
        row[places] = ids
        with torch.no_grad():
            found.append(packed_logprobs(model, row, layout)[places])
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= CLOSE


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_as_a_plain_forward_says(family):
    """Prompts and responses that cross windows and chunks, in slots that others have left, and
    samples that move to other slots."""
    model = build(family)
    engine = choose_engine(model, tiny.tokenizer(), max_slots=8)
    assert isinstance(engine, RolloutEngine)
    prompts = tiny_models.prompts(11, 1, 6, 3, 2)
    params = SamplingParams(max_new_tokens=[14, 2, 14, 2, 9], min_new_tokens=2, seed=0, n=2)
    out = engine.generate(prompts, params)
    for i, sequence in enumerate(out.sequences):
        prompt = prompts[i // 2]
        with torch.no_grad():
            expected = logprobs(model, torch.cat([prompt, sequence]).to(DEVICE))
        expected = expected[len(prompt) - 1 : -1].cpu()
        found = expected.gather(1, sequence[:, None])[:, 0]
        assert (found - out.logprobs[i]).abs().max() <= CLOSE


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "deepseek_v3"])
def test_a_prompt_is_run_once_whatever_the_slots(family, slots):
    """Samples that get a slot later begin with what the prompt left, states included."""
    model = build(family)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=slots)
    prompt = tiny_models.prompts(9)
    params = SamplingParams(max_new_tokens=6, min_new_tokens=3, seed=0, n=16)
    with counted_tokens(engine.model_runner) as tokens:
        out = engine.generate(prompt, params)
    assert tokens == [8]
    for sequence, found in zip(out.sequences, out.logprobs, strict=True):
        with torch.no_grad():
            expected = logprobs(model, torch.cat([*prompt, sequence]).to(DEVICE))[8:-1].cpu()
        assert (found - expected.gather(1, sequence[:, None])[:, 0]).abs().max() <= CLOSE


@contextlib.contextmanager
def counted_tokens(runner):
    """Tokens of each prefill pass."""
    own, found = runner.prefill, []
    runner.prefill = lambda tokens, *rest: (found.append(len(tokens)), own(tokens, *rest))[1]
    try:
        yield found
    finally:
        del runner.prefill


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_such_a_model_are_packed(family):
    policy = tiny_models.policy(family).to(DEVICE)
    assert why_not_packed(policy, DEVICE, torch.float32) is None


def test_slots_keep_latents():
    """Rank and rotated numbers of a token, for all heads."""
    model = build("deepseek_v3")
    if not latent_layers(model):
        pytest.skip("this version of transformers caches what latents expand to")
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    engine.generate(tiny_models.prompts(5, 3), SamplingParams(max_new_tokens=3, seed=0))
    cache = engine._kv_cache
    assert [tuple(x.shape[2:]) for x in cache.keys] == [(1, 8 + 4)] * 2
    assert all(v.data_ptr() == k.data_ptr() for k, v in zip(cache.keys, cache.values, strict=True))
    assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("hooked", [False, True])
def test_latents_are_expanded_where_a_product_is_not_plain(hooked, monkeypatch):
    """A hook, as an adapter, sees what the layer is given and may change what it makes of it."""
    model = build("deepseek_v3")
    calls = []

    def double(module, args, out):
        calls.append(out.shape[-2])
        return out * 2.0

    if hooked:
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(double)
    else:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj.weight.mul_(2.0)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    prompts = tiny_models.prompts(9, 4)
    out = engine.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0))
    plain = build("deepseek_v3")
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(2.0)
        for prompt, sequence, found in zip(prompts, out.sequences, out.logprobs, strict=True):
            expected = logprobs(plain, torch.cat([prompt, sequence]).to(DEVICE))
            expected = expected[len(prompt) - 1 : -1].cpu()
            expected = expected.gather(1, sequence[:, None])[:, 0]
            assert (found - expected).abs().max() <= CLOSE
    assert bool(calls) == hooked


# Of the last layer a rollout reads no results of prompts.
_RECURRENT_FIRST = {
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize(("family", "table", "function"), [
    ("qwen3_5", "_OF_ROWS", "causal_conv1d_fn"),
    ("qwen3_5", "_OF_ROWS", "torch_chunk_gated_delta_rule"),
    ("qwen3_5", "_OF_SLOTS", "torch_recurrent_gated_delta_rule"),
    ("kimi_linear", "_OF_ROWS", "chunk_kimi_delta_attention"),
    ("nemotron_h", "_OF_ROWS", "mamba2_chunk_scan"),
    ("lfm2", "_OF_ROWS", "causal_conv1d_fn"),
])  # fmt: skip
def test_a_spoiled_layer_is_found_out(family, table, function, monkeypatch):
    """By the engine's self-check and by that of packed batches."""
    functions = getattr(layer_functions, table)
    right = functions[function]

    def spoiled(*args, **kwargs):
        found = right(*args, **kwargs)
        # No factor: norms follow.
        return found + 0.05 if isinstance(found, torch.Tensor) else (found[0] + 0.05, *found[1:])

    shape = _RECURRENT_FIRST.get(family, {})
    model = tiny_models.policy(family, **shape).to(DEVICE)
    monkeypatch.setitem(functions, function, spoiled)
    with pytest.raises(UnsupportedModel, match=r"off by .* from a plain forward"):
        RolloutEngine(model, tiny.tokenizer())
    packed = why_not_packed(model, DEVICE, torch.float32)
    assert packed is None if table == "_OF_SLOTS" else "when packed" in packed
    monkeypatch.setitem(functions, function, right)
    again = tiny_models.policy(family, **shape).to(DEVICE)
    RolloutEngine(again, tiny.tokenizer())
    assert why_not_packed(again, DEVICE, torch.float32) is None


@pytest.mark.parametrize(("family", "says"), [
    ("deepseek_v32", "indexed_attention|deepseek_sparse_attention"),
    ("deepseek_v4", "compressed_sparse_attention"),
])  # fmt: skip
def test_sparse_attention_is_refused_by_name(family, says):
    """On short sequences it may choose all tokens, and look like full attention."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "vocab_size": 20, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes))
    assert re.search(says, why_not_replaceable(model))
    for module in model.modules():  # whatever its layers are called
        if hasattr(module, "config"):
            module.config.layer_types = ["full_attention"] * 4
    assert "indexer" in why_not_replaceable(model)


def test_sinks_of_each_token_are_refused():
    from fastrl.models.attention import _attend, attending

    layout = PackedLayout([Group(3)])
    q = torch.zeros(1, 2, 3, 4)
    with attending(PackedAttention(layout)), pytest.raises(NotImplementedError, match="sinks"):
        _attend(torch.nn.Module(), q, q, q, None, sinks=torch.zeros(1, 2, 3, 1))
