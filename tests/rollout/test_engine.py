"""Rollouts through ``model.generate``, and ``PPOTrainer.generate`` on top of them."""

import pytest
import torch

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    GenerateEngine,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    SamplingParams,
)
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

LENGTHS = (5, 1, 9, 3, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def policy(request):
    return tiny_models.policy(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return tiny_models.policy("gpt2")


@pytest.fixture
def engine(gpt2):
    return GenerateEngine(gpt2, tiny.tokenizer(), batch_size=2)


def unpadded(model, prompt, **settings):
    """What ``generate`` of the language model returns for one prompt by itself."""
    out = model.pretrained_model.generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        pad_token_id=tiny.PAD,
        **{**GREEDY, **settings},
    )
    return out[0, len(prompt) :]


class Scripted(torch.nn.Module):
    """Stands in for a model: ``generate`` appends what it was given, row after row."""

    def __init__(self, rows, eos_token_id=tiny.EOS):
        super().__init__()
        self.rows = torch.tensor(rows)
        self.device = torch.device("cpu")
        self.config = tiny_models.config("gpt2")
        self.generation_config = tiny_models.language_model().generation_config
        self.generation_config.eos_token_id = eos_token_id
        self.calls = []

    def generate(self, input_ids, attention_mask, **kwargs):
        self.calls.append((input_ids, attention_mask, kwargs, self.training))
        rows, self.rows = self.rows[: len(input_ids)], self.rows[len(input_ids) :]
        return torch.cat([input_ids, rows], dim=1)


def scripted_sequences(rows, prompts=None, model_stops_at=tiny.EOS, **generation_kwargs):
    """(sequences, finish reasons) where the model appends ``rows`` to the prompts."""
    engine = GenerateEngine(Scripted(rows, model_stops_at), tiny.tokenizer())
    out = engine.generate_with(prompts or tiny_models.prompts(*[2] * len(rows)), generation_kwargs)
    return [s.tolist() for s in out.sequences], out.finish_reasons


# ---------------------------------------------------------------------- sequences


def test_greedy_responses_are_those_of_each_prompt_alone(policy):
    prompts = tiny_models.prompts(*LENGTHS)
    engine = GenerateEngine(policy, tiny.tokenizer(), batch_size=3)
    out = engine.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0))
    assert len(out.sequences) == len(prompts)
    for prompt, got in zip(prompts, out.sequences, strict=True):
        assert torch.equal(got, unpadded(policy, prompt))


def test_prompts_may_be_lists_of_numbers(engine):
    prompts = tiny_models.prompts(3, 4)
    params = SamplingParams(max_new_tokens=4, temperature=0)
    expected = engine.generate(prompts, params).sequences
    got = engine.generate([p.tolist() for p in prompts], params).sequences
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_responses_end_with_their_first_eos():
    rows = [[7, tiny.EOS, 9, tiny.EOS], [7, 8, 9, 10], [tiny.EOS, 2, 2, 2], [7, 8, 9, tiny.EOS]]
    assert scripted_sequences(rows) == (
        [[7, tiny.EOS], [7, 8, 9, 10], [tiny.EOS], [7, 8, 9, tiny.EOS]],
        ["eos", "length", "eos", "eos"],
    )


def test_an_eos_in_the_prompt_does_not_end_the_response():
    prompts = [torch.tensor([5, tiny.EOS, 6]), torch.tensor([tiny.EOS])]
    sequences, reasons = scripted_sequences([[7, 8], [9, tiny.EOS]], prompts)
    assert sequences == [[7, 8], [9, tiny.EOS]]
    assert reasons == ["length", "eos"]


def test_pad_tokens_inside_a_response_are_kept():
    assert scripted_sequences([[7, tiny.PAD, 8]])[0] == [[7, tiny.PAD, 8]]


@pytest.mark.parametrize(
    "where", [{"model_stops_at": [20, 30]}, {"model_stops_at": 99, "eos_token_id": [20, 30]}]
)
def test_all_tokens_that_generate_stops_at_are_ends(where):
    rows = [[7, 20, 9], [7, 30, 9], [7, tiny.EOS, 9]]
    assert scripted_sequences(rows, **where) == ([[7, 20], [7, 30], [7, tiny.EOS]], ["eos"] * 3)


def test_batches_are_padded_on_the_left_in_order():
    model = Scripted([[7], [8], [9]])
    engine = GenerateEngine(model, tiny.tokenizer("right"), batch_size=2)
    a, b, c = tiny_models.prompts(1, 3, 2)
    out = engine.generate_with([a, b, c], {"max_new_tokens": 1})
    (ids, mask, kwargs, _), (last, last_mask, _, _) = model.calls
    assert ids.tolist() == [[tiny.PAD, tiny.PAD, *a.tolist()], b.tolist()]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert last.tolist() == [c.tolist()]
    assert last_mask.tolist() == [[1, 1]]
    assert kwargs.pop("logits_processor")  # which looks for NaN
    assert kwargs == {"max_new_tokens": 1, "pad_token_id": tiny.PAD}
    assert [s.tolist() for s in out.sequences] == [[7], [8], [9]]


def test_samples_of_a_prompt_stand_together(engine):
    prompts = tiny_models.prompts(3, 5)
    greedy = SamplingParams(max_new_tokens=4, temperature=0)
    single = engine.generate(prompts, greedy).sequences
    params = SamplingParams(max_new_tokens=4, temperature=0, n=3)
    several = engine.generate(prompts, params).sequences
    assert len(several) == 6
    for i, got in enumerate(several):
        assert torch.equal(got, single[i // 3])


def test_samples_of_a_prompt_differ(engine):
    out = engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=6, n=4, seed=0))
    assert len({tuple(s.tolist()) for s in out.sequences}) > 1


def test_an_output_reports_tokens_per_second_and_no_logprobs(engine):
    out = engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=4, temperature=0))
    tokens = sum(len(s) for s in out.sequences)
    speed = out.stats["perf/rollout_tokens_per_second"]
    assert speed == pytest.approx(tokens / out.stats["time/rollout"])
    assert out.logprobs is out.values is out.entropies is None


# ---------------------------------------------------------------------- state


def test_a_seed_reproduces_and_leaves_the_global_generator_alone(engine):
    prompts = tiny_models.prompts(3, 4)

    def sample(seed):
        params = SamplingParams(max_new_tokens=8, seed=seed)
        return [s.tolist() for s in engine.generate(prompts, params).sequences]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = sample(11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert sample(11) == first
    assert sample(12) != first


def test_without_a_seed_the_global_generator_is_drawn_on(engine):
    before = torch.get_rng_state()
    engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=2))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_comes_back(training):
    model = Scripted([[7], [8]]).train(training)
    engine = GenerateEngine(model, tiny.tokenizer(), batch_size=1)
    engine.generate_with(tiny_models.prompts(2, 2), {})
    assert [call[3] for call in model.calls] == [False, False]
    assert model.training == training


def test_the_mode_comes_back_after_an_error(gpt2):
    model = Scripted([[7]]).train()
    model.generate = lambda **_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        GenerateEngine(model, tiny.tokenizer()).generate_with(tiny_models.prompts(2), {})
    assert model.training


def test_the_autocast_context_is_open_during_generation():
    model = Scripted([[7]])
    seen = []
    model.register_buffer("probe", torch.ones(1))
    original = model.generate
    model.generate = lambda **kw: (seen.append(torch.is_autocast_enabled("cpu")), original(**kw))[1]
    engine = GenerateEngine(
        model, tiny.tokenizer(), autocast=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    engine.generate_with(tiny_models.prompts(2), {})
    assert seen == [True]
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([], dtype=torch.long), r"prompts\[1\] must be a 1-D tensor of at least one"),
        (torch.ones(1, 3, dtype=torch.long), r"prompts\[1\] must be a 1-D.*got shape \(1, 3\)"),
        (torch.ones(3), r"prompts\[1\] must hold integer token ids, got torch.float32"),
        (torch.ones(45, dtype=torch.long), r"prompts\[1\] has 45 tokens; with 4 new .* of 48"),
    ],
)
def test_a_bad_prompt_is_named_by_its_index(engine, bad, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(tiny_models.prompts(3)[:1] + [bad], SamplingParams(max_new_tokens=4))


def test_a_prompt_may_fill_the_context_to_the_last_token(engine):
    (prompt,) = tiny_models.prompts(44)
    params = SamplingParams(max_new_tokens=4, temperature=0)
    assert len(engine.generate([prompt], params).sequences) == 1


def test_no_prompts_are_refused(engine):
    with pytest.raises(ValueError, match="prompts is empty"):
        engine.generate([], SamplingParams())


def test_prompts_of_two_lengths_need_a_pad_token(gpt2):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    engine = GenerateEngine(gpt2, tokenizer, batch_size=2)
    params = SamplingParams(max_new_tokens=2, temperature=0)
    with pytest.raises(ValueError, match=r"no pad token.*tokenizer\.pad_token"):
        engine.generate(tiny_models.prompts(2, 3), params)
    one_each = GenerateEngine(gpt2, tokenizer, batch_size=1)
    assert len(one_each.generate(tiny_models.prompts(2, 3), params).sequences) == 2
    with_keyword = engine.generate_with(
        tiny_models.prompts(2, 3), {"pad_token_id": tiny.EOS, **GREEDY}
    )
    assert len(with_keyword.sequences) == 2


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n must"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(setting, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**setting)


def test_sampling_parameters_as_keywords_of_generate():
    assert SamplingParams(max_new_tokens=5, temperature=0, top_k=3).generation_kwargs() == {
        "max_new_tokens": 5,
        "do_sample": False,
    }
    assert SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1).generation_kwargs() == {
        "max_new_tokens": 32,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.1,
    }
    assert "min_p" not in SamplingParams().generation_kwargs()


# ---------------------------------------------------------------------- PPOTrainer.generate


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
        expected = torch.cat([query, unpadded(trainer.model, query)])
        assert torch.equal(got, expected)


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
    assert torch.equal(of_reference[0], unpadded(base, query))
    assert not torch.equal(response[0], of_reference[0])
    assert torch.equal(trainer.generate(query, **settings), response)  # the adapter is back
    assert trainer.model.training


def test_queries_that_are_no_tensors_are_refused(trainer):
    with pytest.raises(ValueError, match=r"prompts\[1\] must be a 1-D tensor, got list"):
        trainer.generate([torch.tensor([5]), [5, 6]], **GREEDY)


def test_an_eos_in_the_query_is_kept_with_it(trainer):
    query = torch.tensor([5, tiny.EOS, 6, 7])
    got = trainer.generate([query], **GREEDY)[0]
    assert torch.equal(got, torch.cat([query, unpadded(trainer.model, query)]))
