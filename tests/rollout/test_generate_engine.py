"""The engine on ``model.generate``: its samples, what it says of them, and where they end."""

import contextlib
import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastrl import GenerateEngine, RolloutEngine, SamplingParams
from fastrl.rollout.backends import GenerateBackend, Request
from fastrl.rollout.kv_cache import FIELDS
from tests import tiny_models
from tests.golden import tiny

LENGTHS = (5, 1, 9, 3, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False}
FAMILIES = ("gpt2", "llama", "gemma2", *tiny_models.WITHOUT_INTERFACE)
SAMPLINGS = {
    "plain": {}, "tempered": {"temperature": 0.7}, "greedy": {"temperature": 0.0, "top_k": 3},
    "cut": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "bent": {"repetition_penalty": 1.4, "suppress_tokens": (10, 11), "min_new_tokens": 3},
    "bent_and_cut": {"repetition_penalty": 0.7, "top_p": 0.8, "min_new_tokens": 8},
    "bent_greedy": {"temperature": 0.0, "repetition_penalty": 1.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt2():
    return tiny_models.policy("gpt2")


@pytest.fixture
def engine(gpt2):
    return GenerateEngine(gpt2, tiny.tokenizer(), batch_size=2)


def alone(model, prompt, **settings):
    return tiny_models.generated(model, prompt, **{**GREEDY, **settings})


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


@pytest.mark.parametrize("family", ["gpt2", "llama", *tiny_models.WITHOUT_INTERFACE])
def test_greedy_responses_are_those_of_each_prompt_alone(family):
    policy = tiny_models.policy(family)
    prompts = tiny_models.prompts(*LENGTHS)
    engine = GenerateEngine(policy, tiny.tokenizer(), batch_size=3)
    out = engine.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0))
    assert len(out.sequences) == len(prompts)
    for prompt, got in zip(prompts, out.sequences, strict=True):
        assert torch.equal(got, alone(policy, prompt))


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


def test_samples_of_a_prompt_differ(engine):
    out = engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=6, n=4, seed=0))
    assert len({tuple(s.tolist()) for s in out.sequences}) > 1


def test_an_output_reports_tokens_per_second_and_no_logprobs(engine):
    out = engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=4, temperature=0))
    tokens = sum(len(s) for s in out.sequences)
    speed = out.stats["perf/rollout_tokens_per_second"]
    assert speed == pytest.approx(tokens / out.stats["time/rollout"])
    assert all(getattr(out, name) is None for name in FIELDS)


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


@pytest.mark.parametrize(("bad", "message"), [
    (torch.tensor([], dtype=torch.long), r"prompts\[1\] must be a 1-D tensor of at least one"),
    (torch.ones(1, 3, dtype=torch.long), r"prompts\[1\] must be a 1-D.*got shape \(1, 3\)"),
    (torch.ones(3), r"prompts\[1\] must hold integer token ids, got torch.float32"),
    (torch.ones(45, dtype=torch.long), r"prompts\[1\] has 45 tokens; with 4 new .* of 48"),
])  # fmt: skip
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


def test_prompts_of_two_lengths_need_a_token_that_pads(gpt2):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    found, expected = (
        GenerateEngine(gpt2, each, batch_size=2).generate_with(tiny_models.prompts(2, 3), GREEDY)
        for each in (tokenizer, tiny.tokenizer())
    )
    assert all(map(torch.equal, found.sequences, expected.sequences))
    tokenizer.eos_token = None
    engine = GenerateEngine(gpt2, tokenizer, batch_size=2)
    params = SamplingParams(max_new_tokens=2, temperature=0)
    with pytest.raises(ValueError, match=r"no pad token and no EOS.*tokenizer\.pad_token"):
        engine.generate(tiny_models.prompts(2, 3), params)
    one_each = GenerateEngine(gpt2, tokenizer, batch_size=1)
    assert len(one_each.generate(tiny_models.prompts(2, 3), params).sequences) == 2
    with_keyword = engine.generate_with(
        tiny_models.prompts(2, 3), {"pad_token_id": tiny.EOS, **GREEDY}
    )
    assert len(with_keyword.sequences) == 2


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
        drawn_from = bend(logits, prompt, sequence, params) if bends else logits
        kept = keep(drawn_from, temperature, params)
        assert kept.gather(1, sequence[:, None]).all()


def truncates(params):
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def keep(logits, temperature, params):
    """Which logits are kept, token by token."""
    kept = logits > -torch.inf
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
    return kept


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


def test_a_limit_may_be_at_the_models_context_where_anothers_is_higher(gpt2):
    short, long = tiny_models.prompts(2, tiny_models.CONTEXT - 2)
    params = SamplingParams(max_new_tokens=[40, 2], temperature=0)
    out = scored(gpt2).generate([short, long], params)
    assert len(out.sequences[1]) <= 2
    (alone,) = (
        scored(gpt2).generate([long], SamplingParams(max_new_tokens=2, temperature=0)).logprobs
    )
    torch.testing.assert_close(out.logprobs[1], alone, atol=1e-6, rtol=0)


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


@pytest.mark.parametrize("scores", [False, True])
def test_a_response_ends_where_nothing_is_left_to_draw(gpt2, scores):
    prompts = tiny_models.prompts(3, 4)
    params = SamplingParams(max_new_tokens=3, suppress_tokens=range(tiny.VOCABULARY))
    out = GenerateEngine(gpt2, tiny.tokenizer(), scores=scores).generate(prompts, params)
    assert out.finish_reasons == ["nan", "nan"]
    assert [len(s) for s in out.sequences] == [0, 0]
    same = RolloutEngine(gpt2, tiny.tokenizer()).generate(prompts, params)
    assert out.finish_reasons == same.finish_reasons


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


def test_prompts_run_one_at_a_time_where_padding_changes_what_is_drawn(monkeypatch):
    model = tiny_models.policy("gpt2")
    plain = model.pretrained_model
    prepare = type(plain).prepare_inputs_for_generation

    def unmasked(self, *args, **kwargs):
        inputs = prepare(self, *args, **kwargs)
        return {k: x for k, x in inputs.items() if k not in ("attention_mask", "position_ids")}

    monkeypatch.setattr(type(plain), "prepare_inputs_for_generation", unmasked)
    engine = GenerateEngine(model, tiny.tokenizer(), batch_size=3)
    prompts = tiny_models.prompts(*LENGTHS)
    with pytest.warns(UserWarning, match="padding changes what model.generate draws"):
        out = engine.generate_with(prompts, GREEDY)
    for prompt, got in zip(prompts, out.sequences, strict=True):
        assert got.tolist() == alone(model, prompt)[: len(got)].tolist()


def family(name, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name, vocab_size=tiny.VOCABULARY, hidden_size=16, num_hidden_layers=2, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_prompts_of_one_length_run_one_at_a_time_where_a_batch_changes_what_is_drawn():
    model = family("rwkv", attention_hidden_size=16)
    prompts = tiny_models.prompts(5, 5)
    engine = GenerateEngine(model, tiny.tokenizer(), batch_size=2)
    with pytest.warns(UserWarning, match="the prompts of a batch change what model.generate draws"):
        out = engine.generate_with(prompts, GREEDY)
    for prompt, got in zip(prompts, out.sequences, strict=True):
        expected = model.generate(prompt[None], **GREEDY, pad_token_id=2)[0, len(prompt) :]
        assert got.tolist() == expected[: len(got)].tolist()


def test_a_model_whose_generate_is_not_its_forward_is_named():
    sizes = {"intermediate_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    model = family("roberta", is_decoder=True, initializer_range=0.2, **sizes)
    engine = GenerateEngine(model, tiny.tokenizer())
    with pytest.warns(UserWarning, match="RobertaForCausalLM: model.generate computes other"):
        engine.generate_with(tiny_models.prompts(5), GREEDY)


def test_a_model_that_transformers_cannot_generate_with_is_refused_by_name(monkeypatch):
    model = tiny_models.language_model("bloom")

    @functools.wraps(type(model).prepare_inputs_for_generation)
    def lacking(*_, **__):
        raise AttributeError("no attribute 'num_hidden_layers'")

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", lacking)
    with pytest.raises(ValueError, match=r"BloomForCausalLM: model.generate of transformers does"):
        GenerateEngine(model, tiny.tokenizer()).generate_with(tiny_models.prompts(3, 5), GREEDY)


def test_a_generate_in_the_classes_place_may_return_ids_alone(monkeypatch):
    model = tiny_models.language_model("gpt2")

    def own(self, input_ids, max_new_tokens, **_):
        return torch.cat([input_ids, input_ids.new_full((len(input_ids), max_new_tokens), 7)], 1)

    monkeypatch.setattr(type(model), "generate", own)
    engine = GenerateEngine(model, tiny.tokenizer(), batch_size=2)
    out = engine.generate_with(tiny_models.prompts(3, 5), GREEDY)
    assert [ids.tolist() for ids in out.sequences] == [[7] * 6] * 2


def test_each_response_to_a_prompt_has_the_prompts_limit(gpt2):
    kwargs = {"do_sample": True, "suppress_tokens": [tiny.EOS], "pad_token_id": tiny.EOS}
    backend = GenerateBackend(tiny.tokenizer(), contextlib.nullcontext)
    prompts = tiny_models.prompts(3, 2)
    request = Request(prompts, [0, 1], kwargs, 4, limits=[2, 5], samples=2, seed=1)
    assert [len(x) for x in backend(gpt2, request).sequences] == [2, 2, 5, 5]
