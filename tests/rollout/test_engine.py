"""The rollout engine: its samples and figures against plain, unpadded forwards."""

import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

from fastrl import GenerateEngine, RolloutEngine, SamplingParams
from fastrl.models.attention import NAME
from fastrl.rollout.model_runner import ModelRunner
from tests import tiny_models
from tests.golden import tiny

LENGTHS = (5, 1, 9, 3, 7, 2)
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=8, seed=3)


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def policy(request):
    return tiny_models.policy(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return tiny_models.policy("gpt2")


def engine_of(model, **options):
    return RolloutEngine(model, tiny.tokenizer(), **{"max_slots": 3, **options})


@torch.no_grad()
def unpadded(model, prompt, sequence):
    """Log-softmax [T, V] before each token of the sequence, and values, from a plain forward."""
    model.eval()
    ids = torch.cat([prompt, sequence])[None]
    logits, _, values = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    here = slice(len(prompt) - 1, -1)
    return logits[0, here].double(), values[0, here]


def check_figures(model, prompts, params, out, atol=1e-5):
    for i, sequence in enumerate(out.sequences):
        logits, values = unpadded(model, prompts[i // params.n], sequence)
        at = sequence[:, None]
        at_one = logits.log_softmax(-1)
        tempered = (logits / (params.temperature or 1.0)).log_softmax(-1)
        expected = {
            "logprobs": tempered.gather(1, at)[:, 0],
            "logprobs_t1": at_one.gather(1, at)[:, 0],
            "entropies": -(tempered.exp() * tempered).sum(-1),
            "values": values.double(),
        }
        for name, right in expected.items():
            got = getattr(out, name)[i]
            assert got.dtype == torch.float32
            assert (got - right).abs().max() <= atol, name


def test_greedy_responses_are_those_of_generate_for_each_prompt_alone(policy):
    prompts = tiny_models.prompts(*LENGTHS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = engine_of(policy).generate(prompts, GREEDY)
    for prompt, sequence in zip(prompts, out.sequences, strict=True):
        expected = tiny_models.generated(policy, prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(sequence, expected)
    check_figures(policy, prompts, GREEDY, out)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_figures_of_samples_are_those_of_a_plain_forward(policy, temperature):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=8, temperature=temperature, n=2, seed=1)
    out = engine_of(policy).generate(prompts, params)
    assert len(out.sequences) == 2 * len(prompts)
    check_figures(policy, prompts, params, out)
    assert out.sample_ids == [i for i in range(len(prompts)) for _ in range(2)]


def test_a_sliding_window_is_kept_over_its_end():
    model = tiny_models.policy("mistral", sliding_window=4)
    prompts = tiny_models.prompts(11, 3, 6)
    params = SamplingParams(max_new_tokens=12, seed=0)
    out = engine_of(model).generate(prompts, params)
    check_figures(model, prompts, params, out)
    wide = tiny_models.policy("mistral", sliding_window=None)
    different = engine_of(wide).generate(prompts, params)
    assert not torch.equal(out.logprobs[0], different.logprobs[0])


def test_a_bare_language_model_has_no_values(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    bare = engine_of(gpt2.pretrained_model).generate(prompts, SAMPLED)
    whole = engine_of(gpt2).generate(prompts, SAMPLED)
    assert bare.values is None
    for a, b in zip(bare.logprobs, whole.logprobs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_figures_are_of_the_whole_distribution_where_draws_are_truncated(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=6, temperature=0.8, top_k=5, top_p=0.9, seed=0)
    out = engine_of(gpt2).generate(prompts, params)
    check_figures(gpt2, prompts, params, out)
    for i, sequence in enumerate(out.sequences):
        logits, _ = unpadded(gpt2, prompts[i], sequence)
        lowest = logits.topk(5).values[:, -1:]
        assert (logits.gather(1, sequence[:, None]) >= lowest - 1e-6).all()


def test_ends_are_reported_and_kept(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=30, n=8, seed=0)
    out = engine_of(gpt2, max_slots=5).generate(prompts, params)
    for sequence, reason in zip(out.sequences, out.finish_reasons, strict=True):
        ends = (sequence == tiny.EOS).nonzero().flatten().tolist()
        assert ends == ([len(sequence) - 1] if reason == "eos" else [])
        assert reason == "eos" or len(sequence) == 30
    assert {"eos", "length"} == set(out.finish_reasons)


def test_every_prompt_may_have_a_limit_of_its_own(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    limits = [1, 7, 3, 12, 2, 5]
    params = SamplingParams(max_new_tokens=limits, suppress_tokens=[tiny.EOS], seed=0)
    out = engine_of(gpt2).generate(prompts, params)
    assert [len(s) for s in out.sequences] == limits
    assert out.finish_reasons == ["length"] * 6


def test_stop_sequences_end_a_response_and_stay_in_it(gpt2):
    prompts = tiny_models.prompts(4, 6)
    free = SamplingParams(max_new_tokens=16, seed=5, suppress_tokens=[tiny.EOS])
    whole = engine_of(gpt2).generate(prompts, free).sequences
    stop = [whole[0][4:6].tolist(), [whole[1][2].item()]]
    params = SamplingParams(max_new_tokens=16, seed=5, suppress_tokens=[tiny.EOS], stop=stop)
    out = engine_of(gpt2).generate(prompts, params)

    def first_end(tokens):
        return next(
            i + 1
            for i in range(len(tokens))
            if any(tokens[max(0, i + 1 - len(s)) : i + 1] == s for s in stop)
        )

    for got, free_sequence in zip(out.sequences, whole, strict=True):
        assert got.tolist() == free_sequence.tolist()[: first_end(free_sequence.tolist())]
    assert out.finish_reasons == ["stop", "stop"]


@pytest.mark.parametrize("settings", [
    {"min_new_tokens": 5}, {"repetition_penalty": 1.8}, {"suppress_tokens": [3, 7, 9, 12]},
    {"min_new_tokens": 3, "repetition_penalty": 0.7, "suppress_tokens": [11]},
], ids=str)  # fmt: skip
def test_changes_to_logits_are_those_of_generate(gpt2, settings):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=9, temperature=0, **settings)
    out = engine_of(gpt2).generate(prompts, params)
    for prompt, sequence in zip(prompts, out.sequences, strict=True):
        expected = tiny_models.generated(
            gpt2, prompt, max_new_tokens=9, do_sample=False, **settings
        )
        assert torch.equal(sequence, expected)
    check_figures(gpt2, prompts, params, out)  # of the model's own distribution


def same(a, b, order=None):
    order = range(len(a.sequences)) if order is None else order
    for i, j in enumerate(order):
        assert torch.equal(a.sequences[i], b.sequences[j])
        # Products of other numbers of rows differ in last bits, of log-probs up to about 8.
        torch.testing.assert_close(a.logprobs[i], b.logprobs[j], rtol=0, atol=3e-6)


@pytest.mark.parametrize("slots", [1, 2, 4, 5, 64])
def test_samples_do_not_depend_on_the_number_of_slots(gpt2, slots):
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=12, n=3, seed=7)
    same(
        engine_of(gpt2, max_slots=slots).generate(prompts, params),
        engine_of(gpt2, max_slots=3).generate(prompts, params),
    )


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_a_prompt_is_run_once_whatever_the_slots(gpt2, slots, monkeypatch):
    passes, own = [], ModelRunner.prefill

    def counted(self, tokens, *args):
        passes.append(len(tokens))
        own(self, tokens, *args)

    monkeypatch.setattr(ModelRunner, "prefill", counted)
    engine = engine_of(gpt2, max_slots=slots)
    params = SamplingParams(max_new_tokens=20, n=16, seed=3)
    passes.clear()  # those of the self-check
    prompt, *others = tiny_models.prompts(13, 1, 6)
    engine.generate([prompt], params)
    assert passes == [12]  # without the last token, which the decode step takes
    found = engine.generate([prompt, *others], params)
    assert sum(passes) == 12 + 12 + 0 + 5
    wide = engine_of(gpt2, max_slots=48)
    same(found, wide.generate([prompt, *others], params))


def test_samples_do_not_depend_on_the_order_of_prompts(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    order = [3, 0, 5, 1, 4, 2]
    ids = [10 + i for i in range(6)]
    straight = engine_of(gpt2).generate(prompts, SAMPLED, sample_ids=ids)
    mixed = engine_of(gpt2).generate(
        [prompts[i] for i in order], SAMPLED, sample_ids=[ids[i] for i in order]
    )
    same(mixed, straight, order)
    assert mixed.sample_ids == [ids[i] for i in order]


def test_prompts_may_be_shared_among_processes(gpt2):
    prompts = tiny_models.prompts(*LENGTHS)
    whole = engine_of(gpt2).generate(prompts, SAMPLED)
    for part in (range(0, 6, 2), range(1, 6, 2)):
        mine = engine_of(gpt2, max_slots=2).generate(
            [prompts[i] for i in part], SAMPLED, sample_ids=list(part)
        )
        same(mine, whole, part)


def test_another_seed_and_another_sample_are_other_draws(gpt2):
    prompt = tiny_models.prompts(4) * 2
    engine = engine_of(gpt2)
    params = SamplingParams(max_new_tokens=20, n=2, seed=1, suppress_tokens=[tiny.EOS])
    out = engine.generate(prompt, params)
    other = engine.generate(prompt, SamplingParams(**{**vars(params), "seed": 2}))
    rows = [tuple(s.tolist()) for s in out.sequences + other.sequences]
    assert len(set(rows)) == 8


def test_without_a_seed_torchs_generator_decides(gpt2):
    prompts, engine = tiny_models.prompts(*LENGTHS), engine_of(gpt2)
    params = SamplingParams(max_new_tokens=10)
    torch.manual_seed(0)
    first, second = (engine.generate(prompts, params) for _ in range(2))
    torch.manual_seed(0)
    same(engine.generate(prompts, params), first)
    assert any(
        not torch.equal(a, b) for a, b in zip(first.sequences, second.sequences, strict=True)
    )


def test_long_lists_of_prompts_are_prefilled_in_parts(gpt2, monkeypatch):
    prompts = tiny_models.prompts(*LENGTHS * 3)
    whole = engine_of(gpt2, max_slots=18).generate(prompts, SAMPLED)
    monkeypatch.setattr("fastrl.rollout.engine.PREFILL_TOKENS", 7)
    same(engine_of(gpt2, max_slots=18).generate(prompts, SAMPLED), whole)


@pytest.mark.parametrize("lengths", [(6, 6, 6), (6, 2, 9)], ids=str)
def test_prefill_ends_with_the_last_layers_keys_and_values(gpt2, lengths):
    blocks = gpt2.pretrained_model.transformer.h
    engine, rows = engine_of(gpt2), []
    prompts, params = tiny_models.prompts(*lengths), SamplingParams(max_new_tokens=1)
    engine.generate(prompts, params)  # which finds the layers' shapes
    hooks = [
        block.mlp.register_forward_hook(lambda _, x, out, i=i: rows.append((i, x[0].shape[:2])))
        for i, block in enumerate(blocks)
    ]
    try:
        engine.generate(prompts, params)
    finally:
        for hook in hooks:
            hook.remove()
    packed = (1, sum(lengths) - 3)  # without the last tokens, which the decode step takes
    assert rows == [(i, packed) for i in range(len(blocks) - 1)] + [
        (i, (3, 1)) for i in range(len(blocks))
    ]


def test_dropout_is_off_and_all_is_put_back():
    model = tiny_models.policy("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    before = model.config._attn_implementation
    prompts = tiny_models.prompts(*LENGTHS)
    out = engine_of(model).generate(prompts, SAMPLED)
    assert model.training
    assert model.pretrained_model.training
    assert model.config._attn_implementation == before != NAME
    assert not model.get_output_embeddings()._forward_pre_hooks
    check_figures(model, prompts, SAMPLED, out)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_all_is_put_back_after_an_exception(gpt2, error, monkeypatch):
    from fastrl.rollout.decode_step import DecodeStep

    calls = []

    def fail(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise error

    engine = engine_of(gpt2)
    gpt2.train()
    before = gpt2.config._attn_implementation
    with monkeypatch.context() as patched:
        patched.setattr(DecodeStep, "__call__", fail)
        with pytest.raises(error):
            engine.generate(tiny_models.prompts(3), SAMPLED)
    assert gpt2.training
    assert gpt2.config._attn_implementation == before
    assert not gpt2.get_output_embeddings()._forward_pre_hooks
    prompts = tiny_models.prompts(*LENGTHS)
    same(engine.generate(prompts, SAMPLED), engine_of(gpt2).generate(prompts, SAMPLED))


def test_new_weights_are_used_at_once():
    model = tiny_models.policy("llama")
    prompts, engine = tiny_models.prompts(*LENGTHS), engine_of(model)
    engine.generate(prompts, SAMPLED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    check_figures(model, prompts, SAMPLED, engine.generate(prompts, SAMPLED))


def test_nan_ends_its_sample_alone(gpt2):
    """A NaN in the embedding of one token poisons the samples that contain it, and their slots'
    next tenants not at all."""
    model = tiny_models.policy("llama")
    bad = 17
    prompts = tiny_models.prompts(5, 4, 6, 3, 5, 7)
    for prompt in prompts:
        prompt[prompt == bad] = bad + 1
    params = SamplingParams(max_new_tokens=8, seed=0, suppress_tokens=[bad])
    expected = engine_of(model, max_slots=2).generate(prompts, params)
    poisoned = [p.clone() for p in prompts]
    poisoned[1][2] = poisoned[2][0] = bad
    with torch.no_grad():
        model.get_output_embeddings()
        model.pretrained_model.get_input_embeddings().weight[bad] = torch.nan
    out = engine_of(model, max_slots=2).generate(poisoned, params)
    assert out.finish_reasons[1] == out.finish_reasons[2] == "nan"
    assert len(out.sequences[1]) == len(out.sequences[2]) == 0
    for i in (0, 3, 4, 5):
        assert torch.equal(out.sequences[i], expected.sequences[i])
        assert out.finish_reasons[i] == expected.finish_reasons[i]
    assert out.stats["perf/nan_samples"] == 2


def test_memory_is_kept_grows_and_is_released(gpt2):
    engine = engine_of(gpt2, max_slots=4)
    engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=4))
    small = engine._kv_cache
    engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=4))
    assert engine._kv_cache is small
    prompts = tiny_models.prompts(*LENGTHS)
    engine.generate(prompts, SAMPLED)
    assert engine._kv_cache.slots == 4 > small.slots
    engine.sleep()
    assert engine._kv_cache is None
    same(engine.generate(prompts, SAMPLED), engine_of(gpt2).generate(prompts, SAMPLED))


@pytest.fixture(scope="module")
def wide():
    """Wide enough for products whose last bits depend on the number of rows."""
    return tiny_models.policy("gpt2", n_embd=64, n_positions=256)


def bits(out):
    per_token = (out.sequences, out.logprobs, out.logprobs_t1, out.entropies, out.values)
    return [x.numpy().tobytes() for column in per_token for x in column]


def test_an_engine_with_the_room_of_another_computes_the_same_bits(wide):
    """Of one that earlier calls have grown."""
    prompts, params = tiny_models.prompts(*LENGTHS, 4, 4, 4), SamplingParams(max_new_tokens=9, n=1)
    grown = engine_of(wide, max_slots=64)
    grown.generate(tiny_models.prompts(*[60] * 14), SamplingParams(max_new_tokens=9, seed=1))
    room = grown.room()
    assert room == (14, 128)
    params = replace(params, seed=2)
    expected = grown.generate(prompts, params)
    assert expected.room == room
    fresh = engine_of(wide, max_slots=64)
    fresh.reserve(*room)
    assert fresh.room() == room
    found = fresh.generate(prompts, params)
    assert found.room == fresh.room() == room
    assert bits(found) == bits(expected)
    assert found.stats["perf/slot_utilisation"] == expected.stats["perf/slot_utilisation"]
    small = engine_of(wide, max_slots=64).generate(prompts, params)
    assert small.room == (9, 64)
    assert small.stats["perf/slot_utilisation"] > expected.stats["perf/slot_utilisation"]


def test_reserved_room_replaces_what_is_there_and_is_forgotten_in_sleep(gpt2):
    engine = engine_of(gpt2, max_slots=4, max_length=40)
    assert engine.room() == (0, 0)
    engine.generate(tiny_models.prompts(3, 3, 3), SAMPLED)
    assert engine.room() == (3, 40)
    engine.reserve(2, 16)
    out = engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=4))
    assert out.room == engine.room() == (2, 16)
    engine.sleep()
    assert engine.room() == (0, 0)
    engine.reserve(2, 16)
    engine.sleep()
    assert engine.room() == (0, 0)
    for room, name in (((-1, 0), "slots"), ((0, -1), "length")):
        with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
            engine.reserve(*room)
    engine.reserve(9, 900)  # no more than the engine may have
    assert engine.room() == (4, 40)


def test_reserved_room_is_there_under_autocast_too(gpt2):
    engine = engine_of(gpt2, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    engine.reserve(3, 32)
    for _ in range(2):
        assert engine.generate(tiny_models.prompts(3), SAMPLED).room == (3, 32)


def test_samples_come_with_what_keyed_their_draws(gpt2):
    prompts, params = tiny_models.prompts(*LENGTHS), SamplingParams(max_new_tokens=8, n=2)
    first = engine_of(gpt2).generate(prompts, params)
    assert first.numbers == [0, 1] * len(prompts)
    again = engine_of(gpt2).generate(prompts, replace(params, seed=first.seed))
    same(again, first)
    assert again.seed == first.seed
    # One of them alone, by its prompt's id and its number.
    i = 7
    chosen = engine_of(gpt2).generate(
        [prompts[i // 2]], replace(params, seed=first.seed), [first.sample_ids[i]]
    )
    assert torch.equal(chosen.sequences[first.numbers[i]], first.sequences[i])


def test_nobody_holds_keys_and_values_that_were_released(gpt2):
    engine = engine_of(gpt2)
    engine.generate(tiny_models.prompts(*LENGTHS), SAMPLED)
    layers = [weakref.ref(x) for x in (*engine._kv_cache.keys, *engine._kv_cache.values)]
    engine.sleep()
    gc.collect()
    assert not any(layer() is not None for layer in layers)


def test_a_budget_bounds_the_slots(gpt2):
    engine = engine_of(gpt2, max_slots=6, max_length=32, kv_cache_bytes=3 * 32 * 2 * 2 * 16 * 4 + 9)
    prompts = tiny_models.prompts(*LENGTHS)
    same(engine.generate(prompts, SAMPLED), engine_of(gpt2).generate(prompts, SAMPLED))
    assert engine._kv_cache.slots == 3
    first = engine._kv_cache
    engine.generate(prompts, SAMPLED)
    assert engine._kv_cache is first


@pytest.mark.parametrize(("prompts", "params", "message"), [
    ([], {}, "prompts is empty"),
    ([[1, 2], []], {}, r"prompts\[1\] must be .*at least one token"),
    ([[1, 2], [1] * 45], {"max_new_tokens": 4}, r"prompts\[1\] has 45 tokens.*context of 48"),
    ([[1, 2], [3]], {"max_new_tokens": [50, 1]}, r"prompts\[0\] has 2 tokens; with 50"),
    ([[1, 2]], {"max_new_tokens": [3, 4]}, "2 numbers for 1 prompts"),
    ([[1, tiny.VOCABULARY]], {}, r"prompts\[0\] holds token id"),
    ([[1.5]], {}, r"prompts\[0\] must hold integer"),
], ids=lambda x: str(x)[:30])  # fmt: skip
def test_prompts_that_cannot_be_continued_are_refused_by_name(gpt2, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        engine_of(gpt2).generate(prompts, SamplingParams(**{"max_new_tokens": 4, **params}))


def test_an_engine_without_a_tokenizer_says_what_it_needs_one_for(gpt2):
    prompts, params = tiny_models.prompts(3, 5), SamplingParams(max_new_tokens=20, seed=1, n=4)
    engine = RolloutEngine(gpt2, None, max_slots=8)
    same(engine.generate(prompts, params), engine_of(gpt2, max_slots=8).generate(prompts, params))
    with pytest.raises(ValueError, match=r"prompts\[0\] is a text, but there is no tokenizer"):
        engine.generate(["text"], params)
    endless = tiny_models.policy("gpt2", eos_token_id=None)
    engine = RolloutEngine(endless, None, max_slots=8)
    with pytest.raises(ValueError, match=r"pass the engine a tokenizer, or SamplingParams\(eos_to"):
        engine.generate(prompts, params)
    out = engine.generate(prompts, replace(params, eos_token_ids=[]))
    assert set(out.finish_reasons) == {"length"}


def test_a_prompt_that_no_slot_holds_is_refused(gpt2):
    with pytest.raises(ValueError, match=r"prompts\[1\] has 9 tokens.*max_length of 12"):
        engine_of(gpt2, max_length=12).generate(
            tiny_models.prompts(8, 9), SamplingParams(max_new_tokens=4)
        )


@pytest.mark.parametrize(("options", "message"), [
    ({"max_slots": 0}, "max_slots must be at least 1"),
    ({"max_length": 0}, "max_length must be at least 1"),
    ({"kv_cache_bytes": 0}, "kv_cache_bytes must be at least 1"),
])  # fmt: skip
def test_an_engine_without_room_is_refused(gpt2, options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(gpt2, **options)


def test_a_budget_for_no_slot_is_refused(gpt2):
    with pytest.raises(ValueError, match="leaves no room for a slot"):
        engine_of(gpt2, kv_cache_bytes=100).generate(tiny_models.prompts(3), GREEDY)


def test_a_model_on_two_devices_is_refused(gpt2):
    model = tiny_models.policy("gpt2")
    model.v_head.to("meta")
    with pytest.raises(ValueError, match="several devices"):
        engine_of(model)


def written(engine, prompts):
    return [sequence.tolist() for sequence in engine.generate(prompts, GREEDY).sequences]


@pytest.mark.parametrize("kind", [RolloutEngine, GenerateEngine])
def test_texts_are_tokenised(gpt2, kind):
    engine = kind(gpt2, tiny.tokenizer())
    texts = ["w5 w6 w7", "w9"]
    ids = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    assert written(engine, texts) == written(engine, ids)


@pytest.mark.parametrize("kind", [RolloutEngine, GenerateEngine])
def test_chats_go_through_the_template(gpt2, kind):
    tokenizer = tiny.tokenizer()
    chat = [{"role": "user", "content": "w5 w6"}]
    with pytest.raises(ValueError, match=r"prompts\[0\] holds chat messages.* no chat template"):
        kind(gpt2, tokenizer).generate([chat])
    tokenizer.chat_template = (
        "{% for m in messages %}w3 {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}w4{% endif %}"
    )
    engine = kind(gpt2, tokenizer)
    assert written(engine, [chat]) == written(engine, [torch.tensor([3, 5, 6, 4])])
    with pytest.raises(ValueError, match=r"got a single one: pass \[prompt\]"):
        engine.generate(chat)
    with pytest.raises(ValueError, match=r"got a single one: pass \[prompt\]"):
        engine.generate("w5")
