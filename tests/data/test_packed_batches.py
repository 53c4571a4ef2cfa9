"""Batches without padding: what a model computes of a packed row is what it computes of each
sequence alone."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fastrl.data.choose_padding import choose_padding, why_not_packed
from fastrl.data.padding_free import PackedTokens, PaddingFree
from fastrl.data.token_batch import Padded
from fastrl.learn.scorer import scoring_request
from fastrl.models import CausalLMPolicy
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.models.attention import NAME
from fastrl.models.scoring import PassLimit, PolicyObjective
from tests import seq2seq_models, tiny_models
from tests.models.conftest import FAMILIES, batch_of, counted, deep

CPU = torch.device("cpu")
QUERIES = (4, 7, 4, 2, 4, 7)  # of prompts 0, 1, 0, 2, 0, 1
OF_PROMPT = (0, 1, 0, 2, 0, 1)
RESPONSES = (3, 1, 5, 6, 2, 4)


def batch(padding, side="right", responses=RESPONSES):
    prompts = tiny_models.prompts(4, 7, 2)
    answers = tiny_models.prompts(*responses, seed=1)
    joined = [torch.cat([prompts[k], r]) for k, r in zip(OF_PROMPT, answers, strict=True)]
    return batch_of(joined, QUERIES, padding, side)


def scored(policy, tokens, objective=False):
    """Log-probs, values, and with an objective the loss."""
    model_pass, options = tokens.model_pass, {}
    count = len(tokens.rows())
    if objective:
        numbers = torch.linspace(-1, 1, count)
        options["objective"] = PolicyObjective(numbers - 3, numbers.cos(), 0.2)
    request = scoring_request(tokens, model_pass, **options)
    return policy(**model_pass.inputs, scoring=request)


def ready(family):
    """A policy that has chosen how its head runs."""
    policy = deep(family)
    with torch.no_grad():
        scored(policy, batch(Padded()))
    return policy


def gradients(policy, tokens):
    found = scored(policy, tokens, objective=True)
    weights = [p for p in policy.parameters() if p.requires_grad]
    (found.loss + found.values.square().mean()).backward()
    return [found.logprobs, found.values, found.loss], [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights
    ]


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_token_stands_where_the_layout_says(side):
    tokens = batch(PaddingFree(), side)
    packed = PackedTokens(tokens)
    ids = tokens.input_ids.flatten()[packed.sources]
    assert len(ids) == packed.layout.tokens == 4 + 7 + 2 + sum(RESPONSES)
    parts = ids[packed.places].split(tokens.lengths)
    for part, sequence in zip(parts, tokens.sequences(), strict=True):
        assert torch.equal(part, sequence)
    positions = packed.layout.positions[packed.places].split(tokens.lengths)
    assert all(torch.equal(p, torch.arange(len(p))) for p in positions)
    # The token behind the place that predicts it, or for a first one the first of the response.
    labels = tokens.input_ids.flatten()[tokens.rows() + 1]
    of_rows = {(int(row), int(label)) for row, label in zip(packed.rows, labels, strict=True)}
    expected = set()
    for place, sequence, n in zip(
        packed.places.split(tokens.lengths), tokens.sequences(), QUERIES, strict=True
    ):
        expected |= {(int(p), int(x)) for p, x in zip(place[n - 1 :], sequence[n:], strict=False)}
    assert of_rows == expected


def test_masked_response_tokens_are_not_scored():
    tokens = batch(PaddingFree())
    mask = tokens.response_mask.clone()
    mask[2, 5] = mask[0, 3] = False
    some = replace(tokens, response_mask=mask, mask=mask)
    assert len(PackedTokens(some).rows) == int(mask.sum()) == sum(RESPONSES) - 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_padded_batches(family, side):
    policy = ready(family)
    other = copy.deepcopy(policy)
    expected, wanted = gradients(other, batch(Padded(), side))
    counts = counted(policy)
    found, got = gradients(policy, batch(PaddingFree(), side))
    assert counts == {i: 4 + 7 + 2 + sum(RESPONSES) for i in range(4)}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    largest = max(float(x.abs().max()) for x in wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * largest
    assert policy.pretrained_model.config._attn_implementation != NAME


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbours_tokens_change_nothing(family):
    policy = deep(family)
    tokens = batch(PaddingFree())
    before = scored(policy, tokens)
    changed = tokens.input_ids.clone()
    changed[2, 5:8] = (changed[2, 5:8] + 1) % 90  # of a response to prompt 0
    changed[3, 0] = (changed[3, 0] + 1) % 90  # prompt 2
    after = scored(policy, replace(tokens, input_ids=changed))
    lengths = list(RESPONSES)
    for name in ("logprobs", "values"):
        for i, (a, b) in enumerate(
            zip(
                getattr(before, name).split(lengths),
                getattr(after, name).split(lengths),
                strict=True,
            )
        ):
            assert torch.equal(a, b) == (i not in (2, 3)), (name, i)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("by", ["fastrl", "transformers"])
def test_layers_that_run_again_attend_as_before(family, by):
    policy = ready(family)
    expected, wanted = gradients(copy.deepcopy(policy), batch(PaddingFree()))
    counts = counted(policy, inside="mlp")
    if by == "fastrl":
        with checkpointed(all_layers(policy.pretrained_model)):
            found, got = gradients(policy, batch(PaddingFree()))
    else:
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        policy.activation_checkpointing_enable({"use_reentrant": False})
        policy.train()
        policy.v_head.eval()
        found, got = gradients(policy, batch(PaddingFree()))
    assert set(counts.values()) == {2 * (13 + sum(RESPONSES))}, "twice"
    for a, b in zip(found + got, expected + wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("limit", "expected"), [
    (PassLimit(6), [[0, 1, 2, 3, 4, 5]]),
    (PassLimit(2), [[0, 2], [1, 4], [3, 5]]),
    (PassLimit(6, 14), [[0, 2, 4], [1, 5], [3]]),
    (PassLimit(6, 12), [[0, 2], [4], [1, 5], [3]]),
    (PassLimit(6, 1), [[0], [2], [4], [1], [5], [3]]),
])  # fmt: skip
def test_passes_keep_to_their_limit_and_groups_together(limit, expected):
    tokens = batch(PaddingFree())
    parts = tokens.parts(range(6), limit)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert sorted(parts) == sorted(expected)
    if limit.tokens == 14:
        assert all(PaddingFree().tokens(tokens, part) <= limit.tokens for part in parts)
        assert [PaddingFree().tokens(tokens, part) for part in parts] == [14, 12, 8]
        assert Padded().tokens(tokens, [0, 2, 4]) == 27


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_packed(family):
    policy = deep(family)
    assert why_not_packed(policy, CPU, torch.float32) is None
    assert isinstance(choose_padding(True, CPU, torch.float32, policy, None), PaddingFree)
    assert isinstance(choose_padding(False, CPU, torch.float32, policy), Padded)


def test_a_model_whose_attention_is_its_own_gets_padded_batches_and_that_is_said():
    with pytest.warns(UserWarning, match=r"BloomForCausalLM: batches are padded.*interface"):
        padding = choose_padding(
            True, CPU, torch.float32, deep("gpt2"), tiny_models.policy("bloom")
        )
    assert isinstance(padding, Padded)


def test_a_model_that_reads_its_neighbours_gets_padded_batches(monkeypatch):
    policy = ready("llama")
    model = policy.pretrained_model.model
    forward = type(model).forward

    def mixes(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        hidden = out.last_hidden_state
        out.last_hidden_state = hidden + 0.1 * hidden.roll(1, dims=1)
        return out

    monkeypatch.setattr(type(model), "forward", mixes)
    with (
        pytest.warns(UserWarning, match=r"LlamaForCausalLM: .* off by .* when packed"),
        pytest.warns(UserWarning, match="LlamaForCausalLM: padding changes what it computes"),
    ):
        padding = choose_padding(True, CPU, torch.float32, policy)
    assert isinstance(padding, Padded)


def test_encoder_decoders_are_padded_without_a_word():
    assert isinstance(choose_padding(True, CPU, torch.float32, seq2seq_models.policy()), Padded)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_right_padded_batches_of_causal_models_need_no_mask(family):
    policy = deep(family)
    padding = choose_padding(False, CPU, torch.float32, policy)
    assert batch(padding).model_pass.inputs["attention_mask"] is None
    assert batch(padding, "left").model_pass.inputs["attention_mask"] is not None
    expected, found = (scored(policy, batch(x)) for x in (Padded(), padding))
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_a_model_that_needs_its_mask_gets_it(monkeypatch):
    policy = ready("llama")
    model = policy.pretrained_model.model
    forward = type(model).forward

    def counts_its_mask(self, *args, attention_mask=None, **kwargs):
        out = forward(self, *args, attention_mask=attention_mask, **kwargs)
        length = 1 if attention_mask is None else attention_mask.sum(-1)[:, None, None]
        out.last_hidden_state = out.last_hidden_state * length
        return out

    monkeypatch.setattr(type(model), "forward", counts_its_mask)
    padding = choose_padding(False, CPU, torch.float32, policy)
    assert batch(padding).model_pass.inputs["attention_mask"] is not None


@pytest.mark.parametrize("family", ["qwen2_moe", "phimoe"])
def test_a_window_that_is_in_the_mask_alone_is_found_out(family):
    changes = {"sliding_window": 8} | ({"use_sliding_window": True} if "qwen" in family else {})
    config = transformers.AutoConfig.for_model(
        family, vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **changes,
    )  # fmt: skip
    model = CausalLMPolicy(transformers.AutoModelForCausalLM.from_config(config).eval())
    cause = why_not_packed(model, CPU, torch.float32)
    assert "applies its window of 8 tokens by a mask alone" in (cause or "")


def test_layers_of_another_kind_are_refused():
    policy = deep("qwen3")
    policy.config.layer_types[0] = "linear_attention"
    assert "linear_attention" in why_not_packed(policy, CPU, torch.float32)


def test_layers_in_torchs_checkpoint_wrapper_are_refused():
    policy = deep("llama")
    layers = policy.pretrained_model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert "use gradient_checkpointing" in why_not_packed(policy, CPU, torch.float32)
