"""Rollouts on a GPU: captured decode steps give what plain ones give, whatever happens between."""

import gc
import warnings

import pytest
import torch

from fastrl import GenerateEngine, RolloutEngine, SamplingParams
from fastrl.rollout import choose_engine
from tests import tiny_models
from tests.golden import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = (5, 1, 9, 3, 7, 2)
LIMITS = [9, 2, 5, 7, 3, 6]  # slots drain one by one
SLOTS, BUCKETS = 4, 4  # 4, 3, 2 and 1 rows
GREEDY = SamplingParams(max_new_tokens=LIMITS, temperature=0, suppress_tokens=[tiny.EOS])
SAMPLED = SamplingParams(max_new_tokens=LIMITS, seed=0, suppress_tokens=[tiny.EOS])
FIELDS = ("logprobs", "logprobs_t1", "entropies", "values")
MODELS = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "a window": ("mistral", {"sliding_window": 4}),
    "a softcap": ("gemma2", {}),
    **{f"{family}'s layers": (family, {}) for family in tiny_models.KINDS},
}


@pytest.fixture
def device():
    return torch.device("cuda")


@pytest.fixture
def gpt2(device):
    return tiny_models.policy("gpt2").to(device)


def engine_of(model, **options):
    return RolloutEngine(model, tiny.tokenizer(), **{"max_slots": SLOTS, **options})


def plain_engine_of(model, **options):
    return engine_of(model, cuda_graphs=False, **options)


def rollout(engine, params, lengths=LENGTHS):
    return engine.generate(tiny_models.prompts(*lengths), params)


def captures(out):
    """How many steps a rollout captured; all of its steps were replays."""
    assert out.stats["perf/graph_replays"] == out.stats["perf/decode_steps"] > 0
    return out.stats["perf/graph_captures"]


def assert_same(out, expected, atol=1e-4):
    assert out.finish_reasons == expected.finish_reasons
    for a, b in zip(out.sequences, expected.sequences, strict=True):
        assert torch.equal(a, b)
    for field in FIELDS:
        for a, b in zip(getattr(out, field), getattr(expected, field), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def differs(out, other):
    return any(
        len(a) != len(b) or not torch.allclose(a, b, rtol=0, atol=1e-2)
        for a, b in zip(out.logprobs, other.logprobs, strict=True)
    )


def update(model, device):
    """A step of Adam that changes what is likely, in place and in one kernel."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", MODELS)
def test_captured_steps_give_what_plain_ones_give(device, kind, params):
    family, changes = MODELS[kind]
    model = tiny_models.policy(family, **changes).to(device)
    plain = rollout(plain_engine_of(model), params)
    assert "perf/graph_replays" not in plain.stats
    engine = engine_of(model)
    out = rollout(engine, params)
    assert captures(out) == BUCKETS
    assert_same(out, plain)
    again = rollout(engine, params)
    assert captures(again) == 0
    assert_same(again, plain)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_figures_are_those_of_plain_forwards(device, kind):
    family, changes = MODELS[kind]
    model = tiny_models.policy(family, **changes).to(device)
    out = rollout(engine_of(model), SAMPLED)
    assert captures(out)
    for i, (prompt, sequence) in enumerate(
        zip(tiny_models.prompts(*LENGTHS), out.sequences, strict=True)
    ):
        ids = torch.cat([prompt, sequence])[None].to(device)
        logits, _, values = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        here = slice(len(prompt) - 1, -1)
        every = logits[0, here].double().log_softmax(-1).cpu()
        expected = {
            "logprobs": every.gather(1, sequence[:, None])[:, 0],
            "entropies": -(every.exp() * every).sum(-1),
            "values": values[0, here].double().cpu(),
        }
        for name, right in expected.items():
            got = getattr(out, name)[i].double()
            torch.testing.assert_close(got, right, rtol=0, atol=1e-4, msg=name)


def test_a_bucket_is_captured_when_it_is_first_needed(gpt2):
    engine, plain = engine_of(gpt2), plain_engine_of(gpt2)
    rollout(engine, GREEDY)  # makes all slots
    one = SamplingParams(max_new_tokens=4, temperature=0.7, seed=0)
    many = SamplingParams(**{**vars(SAMPLED), "temperature": 0.7, "suppress_tokens": ()})
    for params, lengths, new in ((one, (5,), 1), (many, LENGTHS, BUCKETS - 1), (one, (5,), 0)):
        out = rollout(engine, params, lengths)
        assert captures(out) == new
        assert_same(out, rollout(plain, params, lengths))


def test_samples_that_end_when_they_like(gpt2):
    """Nobody's end is known beforehand, and there are more samples than slots."""
    params = SamplingParams(max_new_tokens=30, n=5, seed=0, eos_token_ids=range(8))
    engine = engine_of(gpt2)
    out = rollout(engine, params)
    assert captures(out)
    assert {"eos", "length"} <= set(out.finish_reasons)
    assert_same(out, rollout(plain_engine_of(gpt2), params))


def test_the_self_check_finds_nothing_to_say(gpt2):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = choose_engine(gpt2, tiny.tokenizer(), max_slots=SLOTS)
    assert isinstance(engine, RolloutEngine)
    assert captures(rollout(engine, GREEDY)) == BUCKETS


FREE = {"max_new_tokens": 12, "suppress_tokens": (tiny.EOS,)}


def assert_same_under_rules(model, **settings):
    """Two rollouts that differ in the seed, against plain ones; returns the first."""
    engine, plain = engine_of(model), plain_engine_of(model)
    outs = []
    for seed in (0, 1):
        params = SamplingParams(**FREE, **settings, seed=seed)
        outs.append(rollout(engine, params))
        assert_same(outs[-1], rollout(plain, params))
    assert 0 < sum(map(captures, outs)) <= BUCKETS, "none twice"
    return outs[0]


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.8}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}],
    ids=str,
)
def test_rules_under_graphs(gpt2, settings):
    out = assert_same_under_rules(gpt2, **settings)
    assert differs(out, rollout(plain_engine_of(gpt2), SamplingParams(**FREE, seed=0)))


def test_stop_sequences_under_graphs(gpt2):
    free = rollout(plain_engine_of(gpt2), SamplingParams(**FREE, seed=0)).sequences
    stop = [free[0][1:3].tolist(), [int(free[2][4])]]
    out = assert_same_under_rules(gpt2, stop=stop)
    assert out.finish_reasons[0] == out.finish_reasons[2] == "stop"
    for got, whole in zip(out.sequences, free, strict=True):
        assert got.tolist() == whole[: len(got)].tolist()


def test_weights_that_are_updated_in_place_are_used_without_a_new_capture(device, gpt2):
    engine = engine_of(gpt2)
    before = rollout(engine, GREEDY)
    update(gpt2, device)
    after = rollout(engine, GREEDY)
    assert captures(after) == 0
    assert differs(after, before)
    assert_same(after, rollout(plain_engine_of(gpt2), GREEDY))


def test_parameters_that_have_moved_are_captured_anew(gpt2):
    engine = engine_of(gpt2)
    before = rollout(engine, GREEDY)
    weight = gpt2.pretrained_model.transformer.h[0].attn.c_attn.weight
    weight.data = weight.data.clone() * 1.5
    after = rollout(engine, GREEDY)
    assert captures(after) == BUCKETS
    assert differs(after, before)
    assert_same(after, rollout(plain_engine_of(gpt2), GREEDY))


def test_slots_that_have_grown_are_captured_anew(gpt2):
    engine = engine_of(gpt2, max_length=None)
    small = SamplingParams(max_new_tokens=3, seed=0)
    rollout(engine, small, lengths=(2, 3))
    out = rollout(engine, SAMPLED)
    assert captures(out) == BUCKETS
    assert_same(out, rollout(plain_engine_of(gpt2), SAMPLED))
    again = rollout(engine, small, lengths=(2, 3))
    assert_same(again, rollout(plain_engine_of(gpt2), small, lengths=(2, 3)))


def test_casts_are_those_of_the_new_weights(device, gpt2):
    """Autocast keeps casts of weights; a captured step that found them would go on with them."""

    def autocast():
        return torch.autocast(device.type, torch.bfloat16)

    engine = engine_of(gpt2, autocast=autocast)
    before = rollout(engine, SAMPLED)
    assert captures(before) == BUCKETS
    update(gpt2, device)
    after = rollout(engine, SAMPLED)
    assert captures(after) == 0
    assert differs(after, before)
    assert_same(after, rollout(engine_of(gpt2, autocast=autocast), SAMPLED))


def allocated():
    """Bytes, without what cuBLAS keeps for every stream."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "autocast"])
def test_sleep_gives_memory_back_and_changes_no_sample(device, half):
    length = 2048
    model = tiny_models.policy("gpt2", n_positions=length).to(device)
    options = {"autocast": lambda: torch.autocast(device.type, torch.bfloat16)} if half else {}
    engine = engine_of(model, max_length=length, **options)
    kv = SLOTS * length * 2 * 2 * 16 * (2 if half else 4)  # layers, keys and values, width
    first = rollout(engine, SAMPLED)
    engine.sleep()
    before = allocated()
    again = rollout(engine, SAMPLED)
    assert torch.cuda.memory_allocated() - before >= kv
    engine.sleep()
    assert allocated() - before <= kv // 16
    third = rollout(engine, SAMPLED)
    for out in (again, third):
        assert captures(out) == BUCKETS
        assert_same(out, first)


@torch.no_grad()
@pytest.mark.parametrize("family", tiny_models.WITHOUT_INTERFACE)
def test_models_that_fall_back_run_too(device, family):
    model = tiny_models.policy(family).to(device)
    with pytest.warns(UserWarning, match="rollouts go through model.generate.*interface"):
        engine = choose_engine(model, tiny.tokenizer(), max_slots=3)
    assert isinstance(engine, GenerateEngine)
    prompts = tiny_models.prompts(*LENGTHS)
    params = SamplingParams(max_new_tokens=6, seed=0)
    out = engine.generate(prompts, params)
    for i, (prompt, sequence) in enumerate(zip(prompts, out.sequences, strict=True)):
        ids = torch.cat([prompt, sequence])[None].to(device)
        logits, _, values = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        here = slice(len(prompt) - 1, -1)
        every = logits[0, here].float().log_softmax(-1).cpu()
        right = every.gather(1, sequence[:, None])[:, 0]
        torch.testing.assert_close(out.logprobs[i], right, rtol=0, atol=1e-4)
        torch.testing.assert_close(out.values[i], values[0, here].cpu(), rtol=0, atol=1e-4)
    again = engine.generate(prompts, params)
    assert all(map(torch.equal, out.sequences, again.sequences))
