"""Sampling parameters: their ranges, as keywords of ``generate``, and which change the draw."""

import pytest

from fastrl import RolloutEngine, SamplingParams
from tests import tiny_models
from tests.golden import tiny
from tests.together import together


@together(("arguments", "message"), [
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": [3, 0]}, r"max_new_tokens\[1\] must be at least 1"),
    ({"n": 0}, "n must be at least 1"),
    ({"top_k": -1}, "top_k must be at least 0"),
    ({"temperature": -0.1}, "temperature must be at least 0"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": 1.1}, r"min_p must lie in \[0, 1\]"),
    ({"min_p": -0.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty must be positive"),
    ({"stop": "END"}, "stop must be a list of token sequences"),
    ({"stop": [[1], []]}, "stop holds an empty sequence"),
    ({"stop": [[-1]]}, r"stop\[0\] must hold token ids"),  # it would stop at any token
    ({"stop": [[3], [1.7]]}, r"stop\[1\] must hold token ids"),
    ({"stop": [["a"]]}, r"stop\[0\] must hold token ids"),
    ({"suppress_tokens": [1.7]}, "suppress_tokens must hold token ids"),
    ({"suppress_tokens": [-1]}, "suppress_tokens must hold token ids"),
    ({"suppress_tokens": "5"}, "suppress_tokens must hold token ids"),
    ({"suppress_tokens": 5}, "suppress_tokens must hold token ids"),
    ({"eos_token_ids": [True]}, "eos_token_ids must hold token ids"),
    ({"eos_token_ids": [1.7]}, "eos_token_ids must hold token ids"),
])  # fmt: skip
def test_parameters_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_tokens_that_the_model_does_not_have_cannot_be_suppressed():
    engine = RolloutEngine(tiny_models.language_model(), tiny.tokenizer(), 1)
    with pytest.raises(ValueError, match="suppress_tokens has 97, outside the vocabulary of 97"):
        engine.generate(["w5"], SamplingParams(suppress_tokens=[3, 97]))


def test_sampling_parameters_as_keywords_of_generate():
    assert SamplingParams(max_new_tokens=5, temperature=0, top_k=3).generation_kwargs() == {
        "max_new_tokens": 5,
        "do_sample": False,
    }
    assert SamplingParams(temperature=0.7, top_p=0.9, min_p=1.0).generation_kwargs() == {
        "max_new_tokens": 32,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 1.0,
    }
    assert "min_p" not in SamplingParams().generation_kwargs()
    assert SamplingParams(eos_token_ids=2).generation_kwargs()["eos_token_id"] == [2]


def test_changes_of_the_draw_are_what_differs_from_the_policy():
    assert (
        SamplingParams(suppress_tokens=[], temperature=0.7, stop=[[3]]).changes_of_the_draw() == {}
    )
    changed = SamplingParams(top_p=0.9, min_new_tokens=2, suppress_tokens=(5,))
    assert changed.changes_of_the_draw() == {
        "top_p": 0.9,
        "min_new_tokens": 2,
        "suppress_tokens": [5],
    }
