"""Classic ``PPOTrainer.generate``: what it returns for queries, keywords and the reference."""

import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

LENGTHS = (5, 1, 9, 3, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def unpadded(model, prompt, **settings):
    return tiny_models.generated(model, prompt, **{**GREEDY, **settings})


def make_trainer(model, reference=None):
    return PPOTrainer(PPOConfig(batch_size=2), model, reference, tiny.tokenizer())


@pytest.fixture(scope="module")
def trainer():
    """A policy that differs from its reference."""
    return make_trainer(tiny_models.policy(), tiny_models.policy(perturbation=0.2))


def test_a_list_gives_a_list_of_prompts_with_their_responses(trainer):
    queries = tiny_models.prompts(*LENGTHS)
    responses = trainer.generate(queries, batch_size=2, **GREEDY)
    assert isinstance(responses, list)
    for query, got in zip(queries, responses, strict=True):
        expected = [*query.tolist(), *unpadded(trainer.model, query).tolist()]
        assert got.tolist() == expected


def test_return_prompt_false_leaves_the_prompts_out(trainer):
    queries = tiny_models.prompts(*LENGTHS)
    responses = trainer.generate(queries, return_prompt=False, **GREEDY)
    for query, got in zip(queries, responses, strict=True):
        assert torch.equal(got, unpadded(trainer.model, query))


def test_one_query_gives_a_tensor_of_two_dimensions(trainer):
    (query,) = tiny_models.prompts(4)
    got = trainer.generate(query, return_prompt=False, **GREEDY)
    assert torch.equal(got, unpadded(trainer.model, query)[None])
    assert trainer.generate(query, **GREEDY).shape == (1, 4 + got.shape[1])


def test_without_do_sample_generation_is_greedy(trainer):
    (query,) = tiny_models.prompts(4)
    got = trainer.generate(query, return_prompt=False, max_new_tokens=6)
    assert torch.equal(got[0], unpadded(trainer.model, query))


def test_the_models_generation_config_holds_unless_overridden():
    model = tiny_models.policy()
    model.pretrained_model.generation_config.max_new_tokens = 3
    trainer = make_trainer(model)
    (query,) = tiny_models.prompts(4)
    assert trainer.generate(query, return_prompt=False).shape[1] <= 3
    longer = trainer.generate(query, return_prompt=False, max_new_tokens=5, min_new_tokens=5)
    assert longer.shape == (1, 5)


def test_a_length_sampler_is_drawn_once_per_call_of_the_model(trainer):
    lengths = iter([2, 5, 3])
    responses = trainer.generate(
        tiny_models.prompts(3, 3, 3, 3, 3),
        length_sampler=lambda: next(lengths),
        batch_size=2,
        return_prompt=False,
        eos_token_id=-1,
    )
    assert [len(r) for r in responses] == [2, 2, 5, 5, 3]
    drawn = trainer.generate(
        tiny_models.prompts(3)[0],
        length_sampler=LengthSampler(4, 5),
        return_prompt=False,
        eos_token_id=-1,
    )
    assert drawn.shape == (1, 4)


def test_responses_of_the_reference_come_second(trainer):
    queries = tiny_models.prompts(4, 6)
    settings = {"return_prompt": False, **GREEDY}
    responses, of_reference = trainer.generate(queries, generate_ref_response=True, **settings)
    for query, got, from_reference in zip(queries, responses, of_reference, strict=True):
        assert torch.equal(got, unpadded(trainer.model, query))
        assert torch.equal(from_reference, unpadded(trainer.ref_model, query))
    assert any(not torch.equal(a, b) for a, b in zip(responses, of_reference, strict=True))


def test_with_peft_the_reference_is_the_base_model():
    base = tiny_models.policy()
    torch.manual_seed(1)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora()
    )
    trainer = make_trainer(model)
    assert trainer.ref_model is None
    (query,) = tiny_models.prompts(6)
    settings = {"return_prompt": False, **GREEDY}
    response, of_reference = trainer.generate(query, generate_ref_response=True, **settings)
    assert torch.equal(of_reference[0].cpu(), unpadded(base, query))
    assert not torch.equal(response[0], of_reference[0])
    assert torch.equal(trainer.generate(query, **settings), response)  # the adapter is back
    assert trainer.model.training


def test_queries_that_are_no_tensors_are_refused(trainer):
    with pytest.raises(ValueError, match=r"prompts\[1\] must be a 1-D tensor, got list"):
        trainer.generate([torch.tensor([5]), [5, 6]], **GREEDY)


def test_an_eos_in_the_query_is_kept_with_it(trainer):
    query = torch.tensor([5, tiny.EOS, 6, 7])
    got = trainer.generate([query], **GREEDY)[0]
    assert got.tolist() == [*query.tolist(), *unpadded(trainer.model, query).tolist()]
