"""Keyword arguments of ``model.generate``, as the engine takes them."""

import pytest
import torch
from transformers import LogitsProcessorList

from fastrl import SamplingParams
from fastrl.rollout import RolloutEngine, sampling_params
from fastrl.rollout.generation_kwargs import check_names
from tests import tiny_models
from tests.golden import tiny
from tests.together import together


@pytest.fixture
def model():
    return tiny_models.policy("gpt2")


@pytest.fixture
def configured(model):
    """Sets generation_config."""

    def configure(**settings):
        model.pretrained_model.generation_config.update(**settings)
        return model

    return configure


def translate(kwargs, model):
    return sampling_params(kwargs, model)


GREEDY = {"max_new_tokens": 20, "temperature": 0.0}

TRANSLATIONS = [
    ({}, GREEDY),
    ({"max_new_tokens": 7}, GREEDY | {"max_new_tokens": 7}),
    # Sampling cuts at 50 unless told otherwise.
    ({"do_sample": True}, {"max_new_tokens": 20, "top_k": 50}),
    (
        # What classic scripts pass.
        {
            "min_length": -1,
            "top_k": 0.0,
            "top_p": 1.0,
            "do_sample": True,
            "pad_token_id": tiny.PAD,
            "max_new_tokens": 32,
            "eos_token_id": -1,
        },
        {"eos_token_ids": ()},
    ),
    (
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 1.0},
        {"max_new_tokens": 20, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 1.0},
    ),
    (
        {"do_sample": True, "temperature": None, "top_k": None, "top_p": None, "min_p": None},
        {"max_new_tokens": 20},
    ),
    # Greedy decoding looks at none of these.
    ({"temperature": 0.7, "top_k": 5, "top_p": 0.1, "typical_p": 0.3}, GREEDY),
    ({"min_new_tokens": 4, "min_length": 9}, GREEDY | {"min_new_tokens": 4}),
    ({"min_length": 0, "repetition_penalty": 1.2}, GREEDY | {"repetition_penalty": 1.2}),
    ({"max_length": 9, "max_new_tokens": 3}, GREEDY | {"max_new_tokens": 3}),
    ({"eos_token_id": 7}, GREEDY | {"eos_token_ids": (7,)}),
    ({"eos_token_id": [7, -1, 4000]}, GREEDY | {"eos_token_ids": (7,)}),
    ({"eos_token_id": torch.tensor([7, 8])}, GREEDY | {"eos_token_ids": (7, 8)}),
    ({"eos_token_id": None}, GREEDY),
    ({"suppress_tokens": [9, 5, 4000]}, GREEDY | {"suppress_tokens": (5, 9)}),
    # Ends are never barred as bad words.
    (
        {"bad_words_ids": [[9], [5], [tiny.EOS]], "suppress_tokens": [7]},
        GREEDY | {"suppress_tokens": (5, 7, 9)},
    ),
    (
        {
            "use_cache": True,
            "synced_gpus": False,
            "return_dict_in_generate": False,
            "num_return_sequences": 1,
            "num_beams": 1,
            "output_scores": True,
            "logits_processor": LogitsProcessorList(),
            "stopping_criteria": None,
            "no_repeat_ngram_size": 0,
            "cache_implementation": "static",
            "renormalize_logits": True,
        },
        GREEDY,
    ),
    ({"num_return_sequences": None, "penalty_alpha": 0.0}, GREEDY),
]


@pytest.mark.parametrize(("kwargs", "expected"), TRANSLATIONS, ids=lambda x: str(x)[:60])
def test_translations(kwargs, expected, model):
    assert translate(kwargs, model) == SamplingParams(**expected)


REFUSALS = [
    ({"max_length": 20}, "max_length"),
    ({"min_length": 5}, "min_length"),
    ({"num_beams": 2}, "num_beams"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
    ({"do_sample": True, "eta_cutoff": 0.1}, "eta_cutoff"),
    ({"do_sample": True, "top_h": 0.4}, "top_h"),
    ({"do_sample": True, "temperature": 0.0}, "temperature"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
    ({"bad_words_ids": [[5], [5, 6]]}, "bad_words_ids"),
    ({"logits_processor": [print]}, "logits_processor"),
    ({"stopping_criteria": [print]}, "stopping_criteria"),
    ({"prefix_allowed_tokens_fn": print}, "prefix_allowed_tokens_fn"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"stop_strings": ["w5"]}, "stop_strings"),
    ({"exponential_decay_length_penalty": (3, 1.1)}, "exponential_decay_length_penalty"),
    ({"remove_invalid_values": True}, "remove_invalid_values"),
    ({"cache_implementation": "quantized"}, "cache_implementation"),
    ({"attention_mask": None}, "attention_mask"),
    ({"top_q": 0.5}, "top_q"),
    ({"max_new_tokens": 4, "num_beams": 2, "no_repeat_ngram_size": 3}, "num_beams"),
    ({"max_new_tokens": 4, "no_repeat_ngram_size": 3, "num_beams": 2}, "no_repeat_ngram_size"),
]


@together(("kwargs", "name"), REFUSALS)
def test_the_first_argument_without_an_equivalent_is_named(kwargs, name, model):
    assert translate(kwargs, model) == name


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("top_k", -1, "must be an integer, 0 .off. or positive, got -1"),
    ("top_k", 2.5, "must be an integer, 0 .off. or positive, got 2.5"),
    ("top_p", 0.0, r"must be in \(0, 1\], got 0"),
    ("min_p", 1.1, r"must be in \[0, 1\], got 1.1"),
])  # fmt: skip
def test_cuts_that_leave_no_token_are_an_error(name, value, rule, model):
    with pytest.raises(ValueError, match=f"{name} {rule}"):
        translate({"do_sample": True, name: value}, model)
    translate({"do_sample": False, name: value}, model)  # it draws nothing


@pytest.mark.parametrize("most", [0, -3])
def test_no_new_tokens_are_an_error(most, model):
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        translate({"max_new_tokens": most}, model)


def test_the_generation_config_gives_defaults(configured):
    model = configured(do_sample=True, top_k=7, temperature=0.5, max_new_tokens=9, top_p=0.8)
    expected = {"max_new_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.8}
    assert translate({}, model) == SamplingParams(**expected)
    assert translate({"top_k": 0, "temperature": 1.0}, model) == SamplingParams(
        max_new_tokens=9, top_p=0.8
    )
    assert translate({"do_sample": False}, model) == SamplingParams(
        max_new_tokens=9, temperature=0.0
    )


def test_what_the_generation_config_sets_is_named_unless_overridden(configured):
    model = configured(num_beams=3)
    assert translate({"do_sample": True}, model) == "num_beams"
    assert isinstance(translate({"num_beams": 1}, model), SamplingParams)
    configured(num_beams=1, max_length=30)
    assert translate({}, model) == "max_length"
    assert translate({"max_new_tokens": 5}, model).max_new_tokens == 5


def test_a_bare_model():
    model = tiny_models.language_model("gpt2")
    got = translate({"eos_token_id": 7, "min_new_tokens": 3}, model)
    assert got == SamplingParams(
        max_new_tokens=20, temperature=0.0, min_new_tokens=3, eos_token_ids=(7,)
    )


@pytest.mark.parametrize("kwargs", [
    {"max_new_tokens": 8},
    {"max_new_tokens": 8, "repetition_penalty": 1.7},
    {"max_new_tokens": 8, "min_new_tokens": 6},
    {"max_new_tokens": 8, "bad_words_ids": [[i] for i in range(30, 97)]},
    {"max_new_tokens": 8, "suppress_tokens": list(range(3, 60)), "eos_token_id": [70, 80]},
    {"max_new_tokens": 8, "do_sample": True, "top_k": 1},
    {},
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize("prompt", tiny_models.prompts(4, 1, 7), ids=len)
def test_the_engine_then_does_what_generate_does(kwargs, prompt, model):
    params = translate(kwargs, model)
    (got,) = RolloutEngine(model, tiny.tokenizer(), 1).generate([prompt], params).sequences
    expected = model.generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        pad_token_id=tiny.PAD,
        **kwargs,
    )[0, len(prompt) :]
    ends = {tiny.EOS, *([70, 80] if "eos_token_id" in kwargs else [])}
    cut = next((i + 1 for i, t in enumerate(expected.tolist()) if t in ends), len(expected))
    assert torch.equal(got, expected[:cut])


@pytest.mark.parametrize(("given", "message"), [
    ({"do_sample": "False"}, "do_sample='False': it must be True or False"),
    ({"temperature": "1"}, "temperature='1': it must be a number"),
    ({"top_p": float("nan")}, "top_p=nan"),
    ({"pad_token_id": -5}, "pad_token_id=-5: pass the id of a token"),
])  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(given, message, model):
    with pytest.raises((TypeError, ValueError), match=message):
        translate(given, model)


def test_what_generate_does_not_take_is_refused_in_advance(model):
    check_names({"max_new_tokens": 3, "attention_mask": None, "no_repeat_ngram_size": 2}, model)
    with pytest.raises(ValueError, match="'max_new_token': did you mean max_new_tokens"):
        check_names({"max_new_token": 3}, model)


def test_an_end_outside_the_vocabulary_is_named(model):
    with pytest.warns(UserWarning, match="eos_token_id=99999 is not in the model's vocabulary"):
        assert translate({"eos_token_id": 99999}, model).eos_token_ids == ()
