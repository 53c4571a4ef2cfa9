"""Value heads on encoder–decoders: forward, scoring, refusals, checkpoints."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5EncoderModel, T5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput

from fastrl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from fastrl.models.layout import layout_of
from fastrl.models.lm_head import FullHead, FusedHead, RowHead, choose_head
from fastrl.models.scoring import PolicyObjective, ScoringRequest
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.weights import assert_same_weights

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

# fp32 logits of magnitude 5 from sums of 16 terms: float64 differs from them by under 3e-6.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
ROWS = torch.tensor([0, 1, 4, 6, 7, 8])  # of decoder tokens [2, 5]


@pytest.fixture(scope="module", params=seq2seq_models.FAMILIES)
def policy(request):
    return seq2seq_models.policy(request.param)


@pytest.fixture(scope="module")
def inputs():
    queries, responses = tiny_models.prompts(6, 6), tiny_models.prompts(5, 5, seed=1)
    return {"input_ids": torch.stack(queries), "decoder_input_ids": torch.stack(responses)}


def labels_of(inputs):
    return inputs["decoder_input_ids"].roll(-1, 1).flatten()[ROWS]


@torch.no_grad()
def outputs(model, inputs):
    logits, _, values = model.eval()(**inputs)
    return logits, values


# ---------------------------------------------------------------------- forward and scoring


@torch.no_grad()
def test_values_are_a_linear_map_of_the_decoders_last_hidden_state(policy, inputs):
    logits, loss, values = policy(**inputs)
    out = policy.pretrained_model(**inputs, output_hidden_states=True)
    weight, bias = policy.v_head.summary.weight.double(), policy.v_head.summary.bias.double()
    expected = (out.decoder_hidden_states[-1].double() @ weight.T + bias).squeeze(-1)
    torch.testing.assert_close(values.double(), expected, **TOLERANCE)
    torch.testing.assert_close(logits, out.logits)
    assert (values.shape, loss) == ((2, 5), None)


@torch.no_grad()
def test_loss_and_past_key_values_are_the_models(policy, inputs):
    labels = inputs["decoder_input_ids"]
    loss = policy(inputs["input_ids"], labels=labels)[1]
    expected = policy.pretrained_model(input_ids=inputs["input_ids"], labels=labels).loss
    torch.testing.assert_close(loss, expected)
    first = {**inputs, "decoder_input_ids": labels[:, :3], "use_cache": True}
    *_, past = policy(**first, return_past_key_values=True)
    rest = {**inputs, "decoder_input_ids": labels[:, 3:]}
    torch.testing.assert_close(
        policy(**rest, past_key_values=past)[2], policy(**inputs)[2][:, 3:], **TOLERANCE
    )


@torch.no_grad()
@pytest.mark.parametrize("logits", [False, True])
def test_scores_of_rows_are_those_of_the_classic_forward(policy, inputs, logits):
    labels = labels_of(inputs)
    got = policy(**inputs, scoring=ScoringRequest(ROWS, labels, entropy=True, logits=logits))
    all_logits, _, values = policy(**inputs)
    of_rows = all_logits.flatten(0, 1)[ROWS].double()
    logprobs = of_rows.log_softmax(-1)
    expected = {
        "logprobs": logprobs.gather(1, labels[:, None])[:, 0],
        "entropies": torch.special.entr(logprobs.exp()).sum(-1),
        "values": values.flatten()[ROWS],
    }
    if logits:
        expected["logits"] = of_rows
    for name, wanted in expected.items():
        torch.testing.assert_close(getattr(got, name).double(), wanted.double(), **TOLERANCE)
    assert (got.logits is None) == (not logits)


def test_an_objective_gives_the_loss_and_its_gradients(policy, inputs):
    labels = labels_of(inputs)
    advantages = torch.randn(len(ROWS), generator=torch.Generator().manual_seed(1))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    logits, _, values = policy(**inputs)
    logprobs = logits.flatten(0, 1)[ROWS].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    old = logprobs.detach() + torch.tensor([0.0, 0.1, -0.1, 0.9, -0.9, 0.5])
    ratios = (logprobs - old).exp()
    loss = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2)).mean()
    whole = loss + values.flatten()[ROWS].square().sum()
    expected = torch.autograd.grad(whole, parameters, allow_unused=True)

    objective = PolicyObjective(old, advantages, 0.2)
    got = policy(**inputs, scoring=ScoringRequest(ROWS, labels, objective=objective))
    torch.testing.assert_close(got.loss, loss, **TOLERANCE)
    gradients = torch.autograd.grad(
        got.loss + got.values.square().sum(), parameters, allow_unused=True
    )
    for value, wanted in zip(gradients, expected, strict=True):
        assert (value is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(value, wanted, atol=5e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("family", "scale"), [("t5_tied", 0.25), ("t5_untied", 1), ("bart", 1)])
def test_the_fused_head_is_what_runs_with_the_scale_found(family, scale, inputs):
    policy = seq2seq_models.policy(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy(**inputs, scoring=ScoringRequest(ROWS, labels_of(inputs)))
    assert isinstance(policy.scorer.head, FusedHead)
    assert policy.scorer.head.scale == pytest.approx(scale, rel=1e-6)  # 16 ** -0.5
    assert scale != 1 or policy.scorer.head.scale == 1.0  # no division then


@torch.no_grad()
def test_a_bias_after_the_head_runs_it_by_rows(inputs):
    """Marian and mBART add one to their logits; published BART's is zero."""
    policy = seq2seq_models.policy("bart")
    policy.pretrained_model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(0))
    request = ScoringRequest(ROWS, labels_of(inputs))
    with pytest.warns(UserWarning, match="it changes its logits otherwise"):
        got = policy(**inputs, scoring=request)
    assert isinstance(policy.scorer.head, RowHead)
    logprobs = policy(**inputs)[0].flatten(0, 1)[ROWS].log_softmax(-1)
    torch.testing.assert_close(
        got.logprobs, logprobs.gather(1, request.labels[:, None])[:, 0], **TOLERANCE
    )


class Bent(T5ForConditionalGeneration):
    """What its head is given is no multiple of its last hidden state."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        hidden = kwargs.get("output_hidden_states") and tuple(
            h.sin() for h in out.decoder_hidden_states
        )
        return Seq2SeqLMOutput(logits=out.logits, decoder_hidden_states=hidden or None)


@torch.no_grad()
def test_a_head_input_that_is_no_multiple_is_not_taken_for_one(inputs):
    model = seq2seq_models.language_model("t5_tied")
    model.__class__ = Bent
    with pytest.warns(UserWarning, match="the LM head runs on whole sequences"):
        assert isinstance(choose_head(model, dict(inputs)), FullHead)


# ---------------------------------------------------------------------- refusals


def test_each_class_refuses_the_others_models():
    t5 = seq2seq_models.language_model()
    with pytest.raises(
        ValueError, match=r"T5For.* is an encoder–decoder: wrap it with AutoModelForSeq2SeqLMWith"
    ):
        AutoModelForCausalLMWithValueHead(t5)
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel is not an encoder–decoder: .* AutoModelForCausalLMWith"
    ):
        AutoModelForSeq2SeqLMWithValueHead(tiny_models.language_model())


def test_models_that_cannot_write_text_from_text_are_refused(monkeypatch):
    t5 = seq2seq_models.language_model()
    monkeypatch.setattr(type(t5), "main_input_name", "input_features")
    with pytest.raises(ValueError, match="reads input_features, not token ids"):
        AutoModelForSeq2SeqLMWithValueHead(t5)
    monkeypatch.undo()
    body = T5EncoderModel(t5.config)
    body.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="load it with AutoModelForSeq2SeqLM, or choose"):
        AutoModelForSeq2SeqLMWithValueHead(body)


def test_a_model_without_a_start_token_is_named():
    t5 = seq2seq_models.language_model(decoder_start_token_id=None)
    t5.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match=r"T5For.* names no decoder_start_token_id"):
        layout_of(t5)
    t5.generation_config.bos_token_id = 7  # what generate then begins with
    assert layout_of(t5).start == 7


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_comes_back(policy, inputs, tmp_path):
    policy.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path)
    assert_same_weights(again, policy)
    for got, wanted in zip(outputs(again, inputs), outputs(policy, inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    alone = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(alone(**inputs).logits, outputs(policy, inputs)[0])


def test_a_checkpoint_of_trl_loads(inputs, tmp_path):
    """TRL 0.11 writes the language model's own names, once each, and v_head.summary.*."""
    policy = seq2seq_models.policy("t5_tied", perturbation=0.1)
    policy.pretrained_model.config.save_pretrained(tmp_path)
    weights = {k: v.clone() for k, v in policy.pretrained_model.named_parameters()}
    weights |= {f"v_head.{k}": v for k, v in policy.v_head.state_dict().items()}
    assert {"shared.weight", "v_head.summary.weight", "v_head.summary.bias"} <= set(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path)
    assert_same_weights(again, policy)
    for got, wanted in zip(outputs(again, inputs), outputs(policy, inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_an_adapter_is_saved_with_the_value_head_alone(inputs, tmp_path):
    torch.manual_seed(0)
    base = tmp_path / "base"
    seq2seq_models.language_model().save_pretrained(base)
    policy = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
        base, peft_config=seq2seq_models.lora()
    )
    policy.save_pretrained(tmp_path / "tuned")
    assert set(load_file(tmp_path / "tuned" / "value_head.safetensors")) == {
        "v_head.summary.weight",
        "v_head.summary.bias",
    }
    record = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(base)
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path / "tuned")
    assert_same_weights(again, policy)
    expected = outputs(policy, inputs)
    for got, wanted in zip(outputs(again, inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    with policy.disable_adapter():
        assert not torch.allclose(outputs(policy, inputs)[0], expected[0], atol=1e-3)
    plain = tiny.rule("v_head.summary.weight", (1, 16))
    assert not torch.equal(again.v_head.summary.weight, plain)
