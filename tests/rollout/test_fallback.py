"""Rollouts through ``model.generate`` return what the engine returns."""

import contextlib

import pytest
import torch

from fastrl import GenerateEngine, SamplingParams
from fastrl.rollout import RolloutEngine
from fastrl.rollout.kv_cache import FIELDS
from tests import tiny_models
from tests.golden import tiny

LENGTHS = (5, 1, 9, 3, 7)
FAMILIES = ("gpt2", "llama", "gemma2", *tiny_models.WITHOUT_INTERFACE)
SAMPLINGS = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "cut": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "bent": {"repetition_penalty": 1.4, "suppress_tokens": (10, 11), "min_new_tokens": 3},
    "bent_and_cut": {"repetition_penalty": 0.7, "top_p": 0.8, "min_new_tokens": 8},
    "bent_greedy": {"temperature": 0.0, "repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def gpt2():
    return tiny_models.policy("gpt2")


def scored(model, **options):
    return GenerateEngine(model, tiny.tokenizer(), scores=True, **options)


def unpadded(model, prompt, sequence):
    """Logits and values in front of each token of a response, by a plain forward."""
    model = model.double()
    ids = torch.cat([prompt, sequence])[None]
    with torch.no_grad():
        out = model.pretrained_model(input_ids=ids, output_hidden_states=True)
        values = model.v_head(out.hidden_states[-1])
    model.float()
    part = slice(len(prompt) - 1, -1)
    return out.logits[0, part], values[0, part, 0].float()


def bend(logits, prompt, sequence, params):
    """Row by row, as transformers describes its processors."""
    logits = logits.clone()
    for t, row in enumerate(logits):
        seen = torch.cat([prompt, sequence[:t]]).unique()
        x = row[seen]
        row[seen] = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        if t < params.min_new_tokens:
            row[tiny.EOS] = -torch.inf
        row[list(params.suppress_tokens)] = -torch.inf
    return logits


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_those_of_an_unpadded_forward(family, sampling):
    model = tiny_models.policy(family)
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=8, n=2, seed=3, **SAMPLINGS[sampling])
    out = scored(model, batch_size=4).generate(prompts, params)
    temperature = params.temperature or 1.0
    bends = sampling.startswith("bent")
    for i, sequence in enumerate(out.sequences):
        prompt = prompts[i // 2]
        logits, values = unpadded(model, prompt, sequence)
        every = (logits / temperature).log_softmax(-1)

        def of_tokens(x, sequence=sequence):
            return x.gather(1, sequence[:, None])[:, 0].float()

        expected = {
            "logprobs": of_tokens(every),
            "logprobs_t1": of_tokens(logits.log_softmax(-1)),
            "entropies": -(every.exp() * every).sum(-1).float(),
            "values": values,
        }
        for name, x in expected.items():
            torch.testing.assert_close(getattr(out, name)[i], x, atol=1e-5, rtol=0)
        if bends or truncates(params):
            drawn_from = bend(logits, prompt, sequence, params) if bends else logits
            kept, cutoff = cut(drawn_from, temperature, params)
            truncated = of_tokens(
                (drawn_from / temperature).where(kept, -torch.inf).log_softmax(-1)
            )
            torch.testing.assert_close(out.truncated_logprobs[i], truncated, atol=1e-5, rtol=0)
            torch.testing.assert_close(out.cutoffs[i], cutoff, atol=1e-5, rtol=1e-6)
        else:
            assert out.truncated_logprobs is out.cutoffs is None


def truncates(params):
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def cut(logits, temperature, params):
    """Which logits are kept, token by token, and the lowest of them."""
    kept = logits > -torch.inf
    possible = kept.clone()
    if truncates(params):
        p = (logits / temperature).softmax(-1)
        for row, probabilities in enumerate(p):
            order = probabilities.argsort(descending=True)
            if params.top_k:
                kept[row, order[params.top_k :]] = False
            mass = (probabilities * kept[row]).sum()
            above = 0.0
            for token in order:
                if above >= params.top_p * mass:
                    kept[row, token] = False
                above += float(probabilities[token] * kept[row, token])
            kept[row] &= probabilities >= params.min_p * probabilities.max()
    lowest = logits.where(kept, torch.inf).amin(-1)
    return kept, torch.where((possible & ~kept).any(-1), lowest, -torch.inf).float()


@pytest.mark.parametrize("sampling", ["greedy", "bent", "bent_greedy"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_fields_are_those_of_the_engine(family, sampling):
    model = tiny_models.policy(family)
    prompts = tiny_models.prompts(*LENGTHS)
    settings = SAMPLINGS[sampling] | {"temperature": 0.0, "max_new_tokens": [3, 6, 1, 8, 2]}
    whole = scored(model).generate(prompts, SamplingParams(**settings))
    stop = [whole.sequences[3][2:4].tolist(), [9]]
    params = SamplingParams(**settings, stop=stop, n=2)
    ids = [7, 3, 9, 1, 4]
    expected = RolloutEngine(model, tiny.tokenizer(), 4).generate(prompts, params, ids)
    got = scored(model).generate(prompts, params, ids)
    assert [s.tolist() for s in got.sequences] == [s.tolist() for s in expected.sequences]
    assert got.finish_reasons == expected.finish_reasons
    assert {"stop", "length"} <= set(got.finish_reasons)
    assert got.sample_ids == expected.sample_ids == [i for i in ids for _ in range(2)]
    for name in FIELDS:
        a, b = getattr(got, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        for x, y in zip(a or [], b or [], strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("family", tiny_models.WITHOUT_INTERFACE)
def test_greedy_tokens_are_those_of_each_prompt_alone(family):
    model = tiny_models.policy(family)
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    for prompt, got in zip(prompts, scored(model).generate(prompts, params).sequences, strict=True):
        alone = model.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=8,
            do_sample=False,
        )
        assert torch.equal(got, alone[0, len(prompt) :])


def test_a_model_without_a_value_head_has_no_values(gpt2):
    prompts = tiny_models.prompts(3, 4)
    params = SamplingParams(max_new_tokens=4, temperature=0)
    expected = scored(gpt2).generate(prompts, params)
    got = scored(gpt2.pretrained_model).generate(prompts, params)
    assert got.values is None
    assert expected.values is not None
    for a, b in zip(got.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_samples_are_scored_in_several_forwards(gpt2, monkeypatch):
    prompts = tiny_models.prompts(*LENGTHS, *LENGTHS)
    params = SamplingParams(max_new_tokens=6, top_p=0.9, seed=1)
    expected = scored(gpt2).generate(prompts, params)
    monkeypatch.setattr("fastrl.rollout.rescoring.SCORED_TOKENS", 1)
    got = scored(gpt2).generate(prompts, params)
    for name in FIELDS:
        for a, b in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_figures_are_made_in_evaluation_mode_and_under_autocast():
    model = tiny_models.policy("gpt2", resid_pdrop=0.5).train()
    prompts = tiny_models.prompts(3, 4)
    params = SamplingParams(max_new_tokens=4, temperature=0)
    rounded = scored(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    (a, _), (b, _) = (
        rounded.generate(prompts, params).logprobs,
        rounded.generate(prompts, params).logprobs,
    )
    (c, _) = scored(model).generate(prompts, params).logprobs
    assert model.training
    assert torch.equal(a, b)
    assert not torch.equal(a, c[: len(a)])


# ---------------------------------------------------------------------- where responses end


def test_each_prompt_has_a_limit_of_its_own(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    limits = [3, 1, 6, 2, 4]
    longest = GenerateEngine(gpt2, tiny.tokenizer()).generate(
        prompts, SamplingParams(max_new_tokens=6, temperature=0, eos_token_ids=[])
    )
    got = GenerateEngine(gpt2, tiny.tokenizer(), batch_size=2).generate(
        prompts, SamplingParams(max_new_tokens=limits, temperature=0, eos_token_ids=[])
    )
    for a, b, limit in zip(got.sequences, longest.sequences, limits, strict=True):
        assert torch.equal(a, b[:limit])


def test_a_limit_may_be_at_the_models_context_where_anothers_is_higher(gpt2):
    short, long = tiny_models.prompts(2, tiny_models.CONTEXT - 2)
    params = SamplingParams(max_new_tokens=[40, 2], temperature=0)
    out = scored(gpt2).generate([short, long], params)
    assert len(out.sequences[1]) <= 2
    (alone,) = (
        scored(gpt2).generate([long], SamplingParams(max_new_tokens=2, temperature=0)).logprobs
    )
    torch.testing.assert_close(out.logprobs[1], alone, atol=1e-6, rtol=0)


def test_a_stop_sequence_ends_a_response_that_keeps_it(gpt2):
    prompts = tiny_models.prompts(4, 6)
    whole = GenerateEngine(gpt2, tiny.tokenizer()).generate(
        prompts, SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0)
    )
    stop = whole.sequences[0][2:4].tolist()
    params = SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0, stop=[[95], stop])
    out = scored(gpt2).generate(prompts, params)
    assert out.finish_reasons[0] == "stop"
    assert len(out.sequences[0]) <= 4
    assert out.sequences[0].tolist()[-2:] == stop
    assert len(out.logprobs[0]) == len(out.sequences[0])


@contextlib.contextmanager
def counted(model):
    """The model's forwards while open."""
    calls = []
    handle = model.pretrained_model.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


STOPPED = {"max_new_tokens": 12, "min_new_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("at", [(1, 2, 3, 4, 5), (9, 1, 1, 4, 2), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("width", [1, 2])
def test_a_batch_ends_when_its_rows_are_at_their_stop_sequences(gpt2, width, at):
    """A forward per token of the longest response; the same responses."""
    prompts = tiny_models.prompts(*LENGTHS)
    engine = GenerateEngine(gpt2, tiny.tokenizer())
    whole = [s.tolist() for s in engine.generate(prompts, SamplingParams(**STOPPED)).sequences]
    stops = [s[max(0, end - width) : end] for s, end in zip(whole, at, strict=True)]
    expected = [first_stop(tokens, stops) for tokens in whole]
    assert max(map(len, expected)) < 12
    with counted(gpt2) as calls:
        out = engine.generate(prompts, SamplingParams(**STOPPED, stop=stops))
    assert [s.tolist() for s in out.sequences] == expected
    assert len(calls) == max(map(len, expected))


def first_stop(tokens, stops):
    for end in range(1, len(tokens) + 1):
        if any(tokens[:end][-len(stop) :] == stop for stop in stops):
            return tokens[:end]
    return tokens


@pytest.mark.parametrize("how", ["stop", "eos"])
def test_a_batch_does_not_wait_for_rows_beyond_their_own_limits(gpt2, how):
    """The one of the longest limit ends before another's limit, which the batch then ends at."""
    prompts = tiny_models.prompts(*LENGTHS)
    engine = GenerateEngine(gpt2, tiny.tokenizer())
    greedy = {"temperature": 0, "eos_token_ids": []}
    whole = engine.generate(prompts, SamplingParams(max_new_tokens=12, **greedy)).sequences
    last = whole[1][4:6].tolist() if how == "stop" else whole[1][4:5].tolist()
    end = {"stop": [last]} if how == "stop" else {"eos_token_ids": last}
    params = SamplingParams(**{"max_new_tokens": [3, 12, 2, 7, 1], **greedy, **end})
    with counted(gpt2) as calls:
        out = engine.generate(prompts, params)
    lengths = [3, 6 if how == "stop" else 5, 2, 7, 1]
    assert [s.tolist() for s in out.sequences] == [
        tokens[:n].tolist() for tokens, n in zip(whole, lengths, strict=True)
    ]
    assert out.finish_reasons == ["length", how, "length", "length", "length"]
    assert len(calls) == 7


def test_rows_at_stop_sequences_and_at_ends_end_a_batch_together(gpt2):
    prompts = tiny_models.prompts(*LENGTHS[:2])
    engine = GenerateEngine(gpt2, tiny.tokenizer())
    greedy = {"max_new_tokens": 12, "temperature": 0, "eos_token_ids": []}
    whole = [s.tolist() for s in engine.generate(prompts, SamplingParams(**greedy)).sequences]
    end, stop = whole[0][1], whole[1][4:6]
    assert end not in whole[0][:1] + whole[1][:6]
    params = SamplingParams(**greedy | {"eos_token_ids": [end]}, stop=[stop])
    with counted(gpt2) as calls:
        out = engine.generate(prompts, params)
    assert out.finish_reasons == ["eos", "stop"]
    assert [len(s) for s in out.sequences] == [2, 6]
    assert len(calls) == 6


def test_the_prompt_is_no_part_of_a_stop_sequence(gpt2):
    (prompt,) = tiny_models.prompts(4)
    greedy = {"max_new_tokens": 2, "min_new_tokens": 2, "temperature": 0}
    engine = GenerateEngine(gpt2, tiny.tokenizer())
    first = engine.generate([prompt], SamplingParams(**greedy)).sequences[0]
    stop = [int(prompt[-1]), int(first[0])]
    out = engine.generate([prompt], SamplingParams(**greedy, stop=[stop]))
    assert out.finish_reasons == ["length"]


def test_an_end_that_was_asked_for_is_barred_with_the_tokenizers_own(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=30, min_new_tokens=20, eos_token_ids=[50], seed=0)
    out = GenerateEngine(gpt2, tiny.tokenizer()).generate(prompts, params)
    assert all(len(s) >= 20 for s in out.sequences)
    assert not any({50, tiny.EOS} & set(s[:20].tolist()) for s in out.sequences)


def poisoned(token):
    """A model in which the token makes everything after it NaN, and the head is not tied to it."""
    model = tiny_models.policy("gpt2", tie_word_embeddings=False)
    model.pretrained_model.transformer.wte.weight.data[token] = torch.nan
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after", [0, 1])
def test_a_nan_ends_its_sample_alone(temperature, after):
    prompts = tiny_models.prompts(4, 3)
    clean = poisoned([])
    params = SamplingParams(max_new_tokens=4, temperature=temperature, seed=0)
    first = scored(clean).generate(prompts, SamplingParams(max_new_tokens=1, temperature=0))
    token = int(first.sequences[0][0] if after else prompts[0][-1])
    others = [*prompts[0][:-1], *prompts[1], *first.sequences[1]]
    assert token not in others
    model = poisoned(token)
    if temperature:
        params = SamplingParams(max_new_tokens=4, seed=0, top_k=1)
    engine = scored(model)
    engine.generate(prompts[1:], SamplingParams(max_new_tokens=1, temperature=0))
    out = engine.generate(prompts, params)
    assert out.finish_reasons[0] == "nan"
    assert out.finish_reasons[1] != "nan"
    assert out.sequences[0].tolist() == ([token] if after else [])
    assert len(out.logprobs[0]) == len(out.values[0]) == after
    assert out.logprobs[1].isfinite().all()
    same = RolloutEngine(model, tiny.tokenizer()).generate(prompts, params)
    assert out.finish_reasons == same.finish_reasons
    assert [s.tolist() for s in out.sequences] == [s.tolist() for s in same.sequences]


# ---------------------------------------------------------------------- what else holds


def test_parameters_hold_whatever_the_generation_config_says():
    model = tiny_models.policy("gpt2")
    prompts = tiny_models.prompts(*LENGTHS)

    def sample():
        return [
            scored(model).generate(prompts, SamplingParams(max_new_tokens=8, seed=0, **settings))
            for settings in SAMPLINGS.values()
        ]

    expected = sample()
    config = model.pretrained_model.generation_config
    config.update(
        repetition_penalty=3.0, top_k=2, top_p=0.1, min_p=0.5, temperature=0.1, max_length=9,
        suppress_tokens=list(range(3, 60)), no_repeat_ngram_size=1, min_new_tokens=7,
        typical_p=0.1, num_beams=2, bad_words_ids=[[70], [71, 72]], do_sample=True,
    )  # fmt: skip
    for a, b in zip(sample(), expected, strict=True):
        assert [s.tolist() for s in a.sequences] == [s.tolist() for s in b.sequences]


def test_sample_ids_are_one_per_prompt(gpt2):
    with pytest.raises(ValueError, match="sample_ids has 1 entries for 2 prompts"):
        scored(gpt2).generate(tiny_models.prompts(2, 3), SamplingParams(), [0])


def test_without_scores_there_is_no_forward_for_them(gpt2):
    out = GenerateEngine(gpt2, tiny.tokenizer()).generate(tiny_models.prompts(3))
    assert all(getattr(out, name) is None for name in FIELDS)


def test_an_end_outside_the_vocabulary_never_matches_here_either():
    model = tiny_models.policy("gpt2")
    params = SamplingParams(
        max_new_tokens=4, min_new_tokens=3, temperature=0, eos_token_ids=[tiny.VOCABULARY + 5]
    )
    prompts = tiny_models.prompts(3, 5)
    for engine in (
        GenerateEngine(model, tiny.tokenizer(), scores=True),
        RolloutEngine(model, tiny.tokenizer()),
    ):
        assert all(len(s) >= 3 for s in engine.generate(prompts, params).sequences)
