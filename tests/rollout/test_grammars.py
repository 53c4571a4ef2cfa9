"""Responses of a given form: schemas, regular expressions, choices and grammars."""

import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout.grammars import Grammars, checked_format
from fastrl_kernels import TokenSets
from tests import chat_tokenizer
from tests.golden import tiny
from tests.kernels.draws import z_score

TOKENIZER = chat_tokenizer.tokenizer()
END = TOKENIZER.eos_token_id
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "array": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 4},
    "union": {"anyOf": [{"type": "integer", "minimum": 7, "maximum": 12}, {"const": "none"}]},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
    "nested": {
        "type": "object",
        "properties": {"of": {"$ref": "#/$defs/pair"}},
        "required": ["of"],
        "additionalProperties": False,
        "$defs": {
            "pair": {
                "type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1.5, 2]}],
                "minItems": 2, "maxItems": 2,
            }
        },
    },
}  # fmt: skip
PROMPTS = [torch.arange(3, 3 + n) for n in (3, 7, 5, 9, 4)]


def model(vocabulary: int = 300) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024, eos_token_id=END, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


MODEL = model()


def drawn(form: Any, slots: int = 7, **options: Any) -> Any:
    options = {"max_new_tokens": 100, "n": 4, "seed": 1, **options}
    engine = RolloutEngine(MODEL, TOKENIZER, max_slots=slots)
    return engine.generate(PROMPTS, SamplingParams(**options, response_format=form))


def texts(samples: Any) -> list[str]:
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in samples.sequences]


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_responses_validate_by_the_schema(schema):
    found = drawn({"json_schema": schema, "whitespace": False}, n=50)
    assert found.finish_reasons == ["eos"] * 250
    for text, ids in zip(texts(found), found.sequences, strict=True):
        jsonschema.validate(json.loads(text), schema)
        assert ids[-1] == END
        assert (ids == END).sum() == 1
    assert len(set(texts(found))) > 3


@pytest.mark.parametrize("slots", [1, 7, 32])
def test_draws_depend_on_no_slot_and_have_log_probs_over_what_the_grammar_allows(slots):
    form = {"json_schema": PERSON, "whitespace": False}
    found = drawn(form, slots, policy_support="sampled", top_p=0.9, temperature=0.8)
    full = drawn(form, slots, top_p=0.9, temperature=0.8)
    assert texts(found) == texts(drawn(form, 3, top_p=0.9, temperature=0.8)) == texts(full)
    for i, sequence in enumerate(found.sequences):
        prompt, sets = PROMPTS[i // 4], found.supports[i]
        assert sets.has(sequence).all()
        with torch.no_grad():
            logits = MODEL(torch.cat([prompt, sequence])[None]).logits[0, len(prompt) - 1 : -1]
        at = sequence[:, None]
        over_sets = (logits.masked_fill(~sets.mask(), -torch.inf) / 0.8).log_softmax(-1)
        expected = over_sets.gather(1, at)[:, 0], (logits / 0.8).log_softmax(-1).gather(1, at)[:, 0]
        for samples, column in zip((found, full), expected, strict=True):
            torch.testing.assert_close(samples.logprobs[i], column, rtol=0, atol=1e-5)
        entropies = torch.special.entr(over_sets.exp()).sum(-1)
        torch.testing.assert_close(found.entropies[i], entropies, rtol=0, atol=1e-5)


def test_answers_are_as_frequent_as_the_model_has_them():
    """Of two answers of one token each, renormalised."""
    prompt = PROMPTS[:1]
    engine = RolloutEngine(MODEL, TOKENIZER, max_slots=32)
    params = SamplingParams(
        max_new_tokens=4, n=2000, seed=5, response_format={"regex": "[KQ]"},
        policy_support="sampled",
    )  # fmt: skip
    found = engine.generate(prompt, params)
    answers = [TOKENIZER.encode(x, add_special_tokens=False)[0] for x in "KQ"]
    counts = [sum(int(ids[0]) == answer for ids in found.sequences) for answer in answers]
    assert sum(counts) == 2000
    with torch.no_grad():
        expected = MODEL(prompt[0][None]).logits[0, -1, answers].double().softmax(-1)
    assert z_score(torch.tensor(counts), expected) < 2.33  # χ², p > 0.01
    assert {len(ids) for ids in found.sequences} == {2}
    ends = torch.stack([x[1] for x in found.logprobs])
    assert (ends == 0).all()  # nothing but the end is allowed


def test_each_prompt_may_have_a_form_of_its_own():
    forms = [
        {"regex": "[0-9]{3}"}, {"choices": ["yes", "no"]}, None,
        {"lark": 'start: "<" NUMBER ">"\nNUMBER: /[1-3]+/'}, '{"regex": "ab?"}',
    ]  # fmt: skip
    found = texts(drawn(forms, max_new_tokens=12))
    patterns = [r"[0-9]{3}", r"yes|no", r"(?s).*", r"<[1-3]+>?|<", r"ab?"]
    for i, text in enumerate(found):
        assert re.fullmatch(patterns[i // 4], text), text
    assert not re.fullmatch(r"[0-9a-z<>]*", found[8])


def test_choices_may_hold_tokens_that_were_added_to_the_vocabulary():
    """llguidance's first set of such a literal is that token, which it then refuses."""
    found = drawn({"choices": ["<tool_call>a", "b</tool_call>c<tool_call>"]}, max_new_tokens=9)
    assert found.finish_reasons == ["eos"] * 20
    assert {*texts(found)} == {"<tool_call>a", "b</tool_call>c<tool_call>"}
    literal = drawn({"regex": "<tool_call>a"}, max_new_tokens=9)
    assert literal.finish_reasons == ["grammar"] * 20


@pytest.mark.parametrize("vocabulary", [256, 261, 288, 320])
def test_a_model_may_have_more_logits_than_the_tokenizer_has_tokens_or_fewer(vocabulary):
    params = SamplingParams(
        max_new_tokens=9, n=3, seed=1, response_format={"regex": "[ab]{4}"}, eos_token_ids=[7],
        policy_support="sampled",
    )  # fmt: skip
    found = RolloutEngine(model(vocabulary), TOKENIZER, max_slots=4).generate(PROMPTS, params)
    assert all(re.fullmatch("[ab]{4}", TOKENIZER.decode(ids[:-1])) for ids in found.sequences)
    assert {sets.vocabulary for sets in found.supports} == {vocabulary}


def test_an_end_token_that_texts_hold_ends_them_where_they_are_complete():
    letter = TOKENIZER.encode("b", add_special_tokens=False)[0]
    found = drawn({"regex": "a[bc]{4}"}, eos_token_ids=[letter])
    for ids in found.sequences:
        assert len(TOKENIZER.decode(ids[:-1])) == 5
        assert int(ids[-1]) in (END, letter)


def test_a_dead_end_ends_its_sample_with_that_reason():
    """Its grammar allows tokens that are barred; one that nothing can begin has no token."""
    barred = TOKENIZER.encode("bc", add_special_tokens=False)
    found = drawn({"regex": "a[bc]d"}, suppress_tokens=barred, max_new_tokens=9)
    assert found.finish_reasons == ["grammar"] * 20
    assert texts(found) == ["a"] * 20
    assert found.stats["perf/grammar_dead_ends"] == 20
    assert found.stats["perf/nan_samples"] == 0
    some = drawn({"regex": "a[bc]d|x"}, suppress_tokens=barred, max_new_tokens=9)
    assert {*some.finish_reasons} == {"grammar", "eos"}


def test_a_cut_response_has_the_reason_of_its_length():
    found = drawn({"json_schema": PERSON}, max_new_tokens=3)
    assert found.finish_reasons == ["length"] * 20
    assert found.stats["perf/grammar_made_seconds"] > 0


def test_white_space_stands_between_tokens_unless_said_otherwise():
    grammars = Grammars(TOKENIZER, 300, [END])
    space = TOKENIZER.encode(" ", add_special_tokens=False)[0]
    for whitespace in (True, False):
        matcher = grammars.matcher({"json_schema": {"type": "object"}, "whitespace": whitespace})
        matcher.consume_token(TOKENIZER.encode("{", add_special_tokens=False)[0])
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        allowed = TokenSets.of_words(words[None, :10], 300).mask()[0]
        assert bool(allowed[space]) == whitespace


OPENAI = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def test_forms_are_read_as_others_write_them():
    assert checked_format(OPENAI) == {"json_schema": PERSON}
    untyped = {"json_schema": OPENAI["json_schema"]}
    assert checked_format(untyped) == {"json_schema": PERSON}
    assert checked_format({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    assert checked_format({"type": "text"}) is None
    assert checked_format({"json_schema": json.dumps(PERSON)}) == {"json_schema": PERSON}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "a", "lark": "b"}, "must have one of json_schema, regex, choices, lark"),
        ({"regexp": "a"}, "must have one of"),
        ({"type": "xml"}, "has the type 'xml'"),
        ({"type": "object", "properties": {}}, "a schema itself is passed as"),
        ({"type": "json_object", "schema": {"type": "integer"}}, "has schema beside its type"),
        ({"type": "text", "regex": "a"}, "has regex beside its type"),
        ({**OPENAI, "regex": "a"}, "has regex beside its type"),
        ({"choices": "yes"}, "choices must be texts"),
        ({"choices": []}, "choices must be texts"),
        ({"regex": 7}, "regex must be a text"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": 7}, "must be a schema"),
        ({"regex": "a", "whitespace": False}, "whitespace is True or False, beside a json_schema"),
        ("{", "response_format is no JSON"),
        (7, "must be a mapping"),
        ({"lark": "x" * (1 << 20)}, "more than 524288: shorten it"),
        ({"json_schema": {"enum": ["x" * 1000 + str(i) for i in range(1000)]}}, "more than"),
    ],
)
def test_bad_forms_are_named(form, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(response_format=form)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json_schema": {"enum": []}}, "Unsatisfiable schema"),
        ({"json_schema": False}, "schema is false"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "allows no text"),
        ({"regex": r"[^\s\S]"}, "allows no text"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"lark": 'start: "a" b'}, "unknown name"),
    ],
)
def test_grammars_that_cannot_be_honoured_are_named(form, said):
    with pytest.raises(ValueError, match=said):
        drawn(form)


def test_what_stands_in_the_way_is_named():
    with pytest.raises(ValueError, match=r"llguidance does not know the bytes of the tokens"):
        Grammars(tiny.tokenizer(), tiny.VOCABULARY, [tiny.EOS])
    with pytest.raises(ValueError, match="no token ends a response"):
        Grammars(TOKENIZER, 300, [])
    with pytest.raises(ValueError, match="min_new_tokens=3 bars the end"):
        SamplingParams(response_format={"regex": "a"}, min_new_tokens=3)
    with pytest.raises(ValueError, match="response_format has 2 entries for 5 prompts"):
        drawn([{"regex": "a"}, None])
    engine = RolloutEngine(MODEL, None)
    with pytest.raises(ValueError, match="response_format needs a tokenizer"):
        engine.generate(PROMPTS, SamplingParams(response_format={"regex": "a"}, eos_token_ids=[3]))
