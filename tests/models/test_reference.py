"""References are frozen, apart from the policy, and score as they did at the start."""

import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, create_reference_model
from fastrl.models.reference import AdapterReference, CopyReference
from fastrl.models.scoring import ScoringRequest
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

ROWS = torch.tensor([2, 3, 8, 9])


@pytest.fixture(scope="module")
def inputs():
    return {"input_ids": torch.stack(tiny_models.prompts(6, 6))}


@pytest.fixture
def policy():
    return tiny_models.policy("gpt2").train()


def adapted():
    torch.manual_seed(1)
    base = tiny_models.language_model()
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=tiny_models.lora()
    ).eval()


def request(inputs):
    return ScoringRequest(ROWS, inputs["input_ids"].roll(-1, 1).flatten()[ROWS])


def expected_logprobs(language_model, inputs):
    logits = language_model(**inputs).logits.flatten(0, 1)[ROWS]
    return logits.log_softmax(-1).gather(1, request(inputs).labels[:, None])[:, 0]


def test_a_reference_is_a_frozen_copy_in_evaluation_mode(policy):
    reference = create_reference_model(policy)
    assert not any(module.training for module in reference.modules())
    assert not any(p.requires_grad for p in reference.parameters())
    assert policy.training
    assert all(p.requires_grad for p in policy.parameters())
    copies = dict(reference.named_parameters())
    for name, p in policy.named_parameters():
        assert torch.equal(copies[name], p), name
        assert copies[name].data_ptr() != p.data_ptr(), name


@torch.no_grad()
def test_a_reference_stays_when_the_policy_moves(policy, inputs):
    reference = CopyReference(create_reference_model(policy))
    before = reference.score(inputs, request(inputs))
    for p in policy.parameters():
        p.add_(1.0)
    torch.testing.assert_close(reference.score(inputs, request(inputs)), before, atol=0, rtol=0)


def test_tied_embeddings_stay_tied_in_the_copy(policy):
    language_model = create_reference_model(policy).pretrained_model
    assert language_model.lm_head.weight is language_model.transformer.wte.weight


def test_shared_layers_and_peft_models_are_refused(policy):
    with pytest.raises(ValueError, match="num_shared_layers is not available yet"):
        create_reference_model(policy, num_shared_layers=1)
    with pytest.raises(ValueError, match="num_shared_layers is not available yet"):
        create_reference_model(policy, pattern="transformer.h.{layer}")
    with pytest.raises(ValueError, match=r"its own reference.*ref_model=None"):
        create_reference_model(adapted())


def test_a_copy_scores_without_gradients(policy, inputs):
    reference = CopyReference(tiny_models.policy("gpt2", perturbation=0.05))
    scores = reference.score(inputs, request(inputs))
    assert not scores.logprobs.requires_grad
    language_model = reference.model.pretrained_model
    torch.testing.assert_close(
        scores.logprobs, expected_logprobs(language_model, inputs), atol=1e-5, rtol=1e-5
    )
    with reference.as_policy() as model:
        assert model is reference.model
    assert not any(p.requires_grad for p in reference.model.parameters())


def test_an_adapter_reference_scores_as_the_base_and_restores_the_adapter(inputs):
    model = adapted()
    reference = AdapterReference(model, model)
    before = model(**inputs)[0]
    base = tiny_models.language_model()
    torch.testing.assert_close(
        reference.score(inputs, request(inputs)).logprobs,
        expected_logprobs(base, inputs),
        atol=1e-5,
        rtol=1e-5,
    )
    assert torch.equal(model(**inputs)[0], before)
    with reference.as_policy() as as_reference:
        torch.testing.assert_close(as_reference(**inputs)[0], base(**inputs).logits)
    assert torch.equal(model(**inputs)[0], before)


def test_the_adapter_comes_back_after_an_error(inputs):
    model = adapted()
    before = model(**inputs)[0]
    wrong = request(inputs)._replace(rows=torch.tensor([999]))
    reference = AdapterReference(model, model)
    reference.score(inputs, request(inputs))  # the head is chosen
    with pytest.raises(IndexError):
        reference.score(inputs, wrong)
    assert torch.equal(model(**inputs)[0], before)
