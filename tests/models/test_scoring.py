"""Scoring rows equals the classic forward pass on those rows, whatever the model's head does."""

import types
import warnings

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import fastrl_kernels
from fastrl.data.batch import pad
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.scorer import scoring_request
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.models.lm_head import FullHead, FusedHead, RowHead, choose_head
from fastrl.models.scoring import PolicyObjective, ScoringRequest
from fastrl_kernels.types import LogitTransform
from tests import tiny_models
from tests.golden import tiny

# fp32 logits of magnitude 5 from sums of 16 terms: float64 differs from them by under 3e-6.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
ROWS = torch.tensor([3, 4, 5, 11, 14, 15])  # of a batch [2, 8]


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def policy(request):
    return tiny_models.policy(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return tiny_models.policy("gpt2")


@pytest.fixture(scope="module")
def ids():
    return torch.stack(tiny_models.prompts(8, 8))


def labels_of(ids, rows):
    return ids.roll(-1, 1).flatten()[rows]


def classic_scores(model, ids, rows, **inputs):
    """Log-probs, entropies, values and logits of the rows, from all logits, in float64."""
    logits, _, values = model(input_ids=ids, **inputs)
    of_rows = logits.flatten(0, 1)[rows].double()
    logprobs = of_rows.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    labels = labels_of(ids, rows)
    return logprobs.gather(1, labels[:, None])[:, 0], entropies, values.flatten()[rows], of_rows


@torch.no_grad()
@pytest.mark.parametrize("logits", [False, True])
def test_scores_of_rows_are_those_of_the_classic_forward(policy, ids, logits):
    request = ScoringRequest(ROWS, labels_of(ids, ROWS), entropy=True, logits=logits)
    got = policy(input_ids=ids, scoring=request)
    expected = classic_scores(policy, ids, ROWS)
    assert (got.logits is None) == (not logits)
    for value, wanted in zip(got[: 3 + logits], expected, strict=False):
        torch.testing.assert_close(value.double(), wanted.double(), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_fused_head_is_what_runs(family, ids, monkeypatch):
    policy = tiny_models.policy(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy(input_ids=ids, scoring=ScoringRequest(ROWS, labels_of(ids, ROWS)))
    assert isinstance(policy.scorer.head, FusedHead)
    seen = []
    linear_logprobs = fastrl_kernels.linear_logprobs
    monkeypatch.setattr(
        fastrl_kernels,
        "linear_logprobs",
        lambda hidden, *args, **kwargs: (
            seen.append(hidden.shape) or linear_logprobs(hidden, *args, **kwargs)
        ),
    )
    heads = []
    handle = policy.get_output_embeddings().register_forward_hook(
        lambda _module, _args, out: heads.append(out.numel())
    )
    policy(input_ids=ids, scoring=ScoringRequest(ROWS, labels_of(ids, ROWS)))
    handle.remove()
    assert [shape[0] for shape in seen] == [len(ROWS)]
    assert heads == [0], "the model's own head gets no rows"


def test_an_objective_gives_the_loss_and_its_gradients(policy, ids):
    labels = labels_of(ids, ROWS)
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(ROWS), generator=generator)
    parameters = [p for p in policy.pretrained_model.parameters() if p.requires_grad]

    logits, _, values = policy(input_ids=ids)
    logprobs = logits.flatten(0, 1)[ROWS].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    # Some ratios within the clip range, some beyond on either side.
    old = logprobs.detach() + torch.tensor([0.0, 0.1, -0.1, 0.9, -0.9, 0.5])
    ratios = (logprobs - old).exp()
    loss = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2)).mean()
    values = values.flatten()[ROWS]
    expected = torch.autograd.grad(loss + values.square().sum(), parameters, allow_unused=True)

    objective = PolicyObjective(old, advantages, 0.2)
    got = policy(
        input_ids=ids, scoring=ScoringRequest(ROWS, labels, entropy=True, objective=objective)
    )
    torch.testing.assert_close(got.loss, loss, **TOLERANCE)
    torch.testing.assert_close(got.logprobs, logprobs.detach(), **TOLERANCE)
    assert not got.logprobs.requires_grad
    assert not got.entropies.requires_grad
    gradients = torch.autograd.grad(
        got.loss + got.values.square().sum(), parameters, allow_unused=True
    )
    for value, wanted in zip(gradients, expected, strict=True):
        assert (value is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(value, wanted, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_left_and_right_padding_score_alike(policy):
    queries, responses = tiny_models.prompts(2, 5, 3), tiny_models.prompts(4, 2, 1, seed=1)
    joined = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    scores = {}
    for side in ("left", "right", "none"):
        groups = [[j] for j in range(3)] if side == "none" else [range(3)]
        parts = []
        for group in groups:
            padded = pad([joined[i] for i in group], tiny.PAD, side)
            lengths = [[len(x[i]) for i in group] for x in (queries, responses)]
            batch = TokenBatch.from_padded(padded["input_ids"], padded["attention_mask"], *lengths)
            assert (batch.position_ids is not None) == (side == "left")
            model_pass = batch.model_pass
            request = scoring_request(batch, model_pass)
            parts.append(policy(**model_pass.inputs, scoring=request))
        scores[side] = (
            torch.cat([p.logprobs for p in parts]),
            torch.cat([p.values for p in parts]),
        )
    for side in ("left", "right"):
        torch.testing.assert_close(scores[side], scores["none"], **TOLERANCE)


def test_gradients_are_those_of_the_classic_forward(policy, ids):
    labels = labels_of(ids, ROWS)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    got = policy(input_ids=ids, scoring=ScoringRequest(ROWS, labels))
    gradients = torch.autograd.grad(
        got.logprobs.sum() + got.values.square().sum(), parameters, allow_unused=True
    )
    logits, _, values = policy(input_ids=ids)
    logprobs = logits.flatten(0, 1)[ROWS].log_softmax(-1).gather(1, labels[:, None])
    expected = torch.autograd.grad(
        logprobs.sum() + values.flatten()[ROWS].square().sum(), parameters, allow_unused=True
    )
    # Sums over 16 positions of figures up to 1e2 in fp32.
    for value, wanted in zip(gradients, expected, strict=True):
        assert (value is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(value, wanted, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_temperature_divides_the_logits(gpt2, ids):
    request = ScoringRequest(ROWS, labels_of(ids, ROWS), temperature=0.5, entropy=True)
    got = gpt2(input_ids=ids, scoring=request)
    logprobs = (gpt2(input_ids=ids)[0].flatten(0, 1)[ROWS].double() / 0.5).log_softmax(-1)
    wanted = logprobs.gather(1, request.labels[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs.double(), wanted, atol=2e-5, rtol=1e-5)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(got.entropies.double(), entropy, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_not_asked_for_is_none(gpt2, ids):
    got = gpt2(input_ids=ids, scoring=ScoringRequest(ROWS, labels_of(ids, ROWS), values=False))
    assert (got.entropies, got.values, got.logits) == (None, None, None)
    assert got.logprobs.shape == ROWS.shape


@torch.no_grad()
def test_logits_are_made_of_the_requested_rows_only(gpt2, ids):
    request = ScoringRequest(ROWS, labels_of(ids, ROWS), logits=True)
    gpt2(input_ids=ids, scoring=request)  # the head is chosen
    shapes = []
    handle = gpt2.get_output_embeddings().register_forward_hook(
        lambda _module, args, out: shapes.append((args[0].shape, out.shape))
    )
    gpt2(input_ids=ids, scoring=request)
    handle.remove()
    assert shapes == [((1, len(ROWS), 16), (1, len(ROWS), tiny.VOCABULARY))]


def without_head_module(model):
    """A model that multiplies by its head's weight instead of calling the head."""

    def forward(self, input_ids=None, attention_mask=None, output_hidden_states=False, **kwargs):
        out = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=kwargs.get("position_ids"),
            output_hidden_states=output_hidden_states,
        )
        logits = torch.nn.functional.linear(out.last_hidden_state, self.lm_head.weight)
        return CausalLMOutputWithPast(logits=logits, hidden_states=out.hidden_states)

    model.forward = types.MethodType(forward, model)
    return model


@torch.no_grad()
def test_a_head_that_is_not_called_falls_back_with_the_same_numbers(gpt2, ids):
    model = AutoModelForCausalLMWithValueHead(without_head_module(tiny_models.language_model()))
    model.v_head.load_state_dict(gpt2.v_head.state_dict())
    model.eval()
    request = ScoringRequest(ROWS, labels_of(ids, ROWS), entropy=True, logits=True)
    with pytest.warns(UserWarning, match="whole sequences.*does not call its output embeddings"):
        got = model(input_ids=ids, scoring=request)
    assert isinstance(model.scorer.head, FullHead)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = model(input_ids=ids, scoring=request)  # it warns once
    torch.testing.assert_close(got, again, **TOLERANCE)
    torch.testing.assert_close(got, gpt2(input_ids=ids, scoring=request), **TOLERANCE)


@torch.no_grad()
def test_a_head_that_mixes_positions_falls_back(ids):
    model = tiny_models.language_model()
    model.lm_head.register_forward_hook(lambda _module, _args, out: out - out.mean(1, keepdim=True))
    with pytest.warns(UserWarning, match="its logits differ when the head sees single rows"):
        assert isinstance(choose_head(model, {"input_ids": ids[:1]}), FullHead)


@torch.no_grad()
def test_a_head_with_an_adapter_is_not_bypassed(ids):
    from peft import get_peft_model

    adapter = tiny_models.lora(target_modules=["lm_head"], fan_in_fan_out=False)
    model = get_peft_model(tiny_models.language_model("llama"), adapter)
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM: logits .* nn.Linear, but peft's Linear"
    ):
        head = choose_head(model, {"input_ids": ids[:1]})
    assert isinstance(head, RowHead)


@torch.no_grad()
def test_another_rounding_of_large_logits_is_no_other_head(ids, monkeypatch):
    """As of products that are summed in another order for fewer rows."""
    model = tiny_models.language_model("llama").to(torch.bfloat16)
    model.lm_head.weight.mul_(40)
    inputs = {"input_ids": ids[:1, :8]}
    assert model(**inputs).logits.abs().max() > 16

    def rounded_otherwise(hidden, weight, labels, **_):
        logits = (hidden @ weight.t()).float()
        logits *= 1 + 2.0**-8 * torch.ones_like(logits).bernoulli_(0.5)
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    monkeypatch.setattr(fastrl_kernels, "linear_logprobs", rounded_otherwise)
    assert isinstance(choose_head(model, inputs), FusedHead)
    with pytest.warns(UserWarning, match="logits of the response tokens are kept"):
        assert isinstance(choose_head(model.float(), inputs), RowHead), "fp32 rounds less"


@pytest.mark.parametrize("change", ["bias", "cap"])
def test_logits_that_change_after_the_head_are_found_out(ids, change):
    model = tiny_models.language_model()
    forward = model.forward

    def changed(*args, **kwargs):
        out = forward(*args, **kwargs)
        if change == "bias":
            out.logits = out.logits + torch.arange(out.logits.shape[-1]) * 1e-3
        else:  # far above the logits: a comparison of numbers alone would not notice
            out.logits = 500 * torch.tanh(out.logits / 500)
        return out

    model.forward = changed
    with pytest.warns(UserWarning, match="logits of the response tokens are kept"):
        assert isinstance(choose_head(model, {"input_ids": ids[:1]}), RowHead)


@torch.no_grad()
@pytest.mark.parametrize("head_of", [RowHead(), FusedHead(LogitTransform(None, 1.0))])
def test_the_hook_is_gone_after_an_error(gpt2, ids, head_of):
    head, rows = gpt2.get_output_embeddings(), torch.tensor([999])
    before = len(head._forward_pre_hooks)
    model = gpt2.pretrained_model
    with pytest.raises(IndexError), head_of.scoring(model, ScoringRequest(rows, rows)):
        model(input_ids=ids)
    assert len(head._forward_pre_hooks) == before
    assert gpt2(input_ids=ids)[0].shape == (2, 8, tiny.VOCABULARY)


def test_the_head_is_chosen_without_dropout_and_every_mode_is_put_back(ids):
    torch.manual_seed(0)
    policy = tiny_models.policy("gpt2", resid_pdrop=0.5).train()
    policy.pretrained_model.transformer.drop.eval()  # as a base is under a new adapter
    modes = [module.training for module in policy.modules()]
    policy(input_ids=ids, scoring=ScoringRequest(ROWS, labels_of(ids, ROWS)))
    assert isinstance(policy.scorer.head, FusedHead)
    assert [module.training for module in policy.modules()] == modes
