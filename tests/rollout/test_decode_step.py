"""The decode step as a function of static buffers, and what its draws are distributed as."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl_kernels
from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout.decode_step import DecodeStep, LogitsProcessors, _with_barred
from tests import tiny_models
from tests.golden import tiny

READS = ("_local_scalar_dense", "item", "equal", "is_nonzero")
DATA_DEPENDENT = ("nonzero", "masked_select", "unique", "_unique2", "unique_dim", "bincount")

EVERYTHING = {
    "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 2,
    "repetition_penalty": 1.2, "suppress_tokens": [3], "stop": [[5, 6], [7]],
}  # fmt: skip
RULES = [{}, {"temperature": 0}, {"top_p": 0.9, "temperature": 0.7}, EVERYTHING]


class Watch(TorchDispatchMode):
    """Counts reads of the device by the host; refuses shapes that depend on data."""

    def __init__(self, forbid_reads: bool):
        super().__init__()
        self.forbid_reads, self.reads, self.operators = forbid_reads, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.operators += 1
        index = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1] if x is not None
        )
        if name in READS:
            self.reads += 1
            assert not self.forbid_reads, f"the host reads: {name}"
        if self.forbid_reads:
            assert name not in DATA_DEPENDENT, name
            assert not index, "indexed by a mask"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def each_step(monkeypatch):
    """Wraps the decode step; what the wrapper does is up to the test."""

    def use(wrapper):
        original = DecodeStep.__call__
        monkeypatch.setattr(
            DecodeStep, "__call__", lambda self, *args: wrapper(original, self, *args)
        )

    return use


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3"])
def test_a_step_reads_nothing_and_has_shapes_of_its_own(family, rules, each_step):
    steps = []

    def watched(step, self, *args):
        with Watch(forbid_reads=True) as watch:
            step(self, *args)
        steps.append(watch.operators)

    each_step(watched)
    engine = RolloutEngine(tiny_models.policy(family), tiny.tokenizer(), max_slots=3)
    engine.generate(tiny_models.prompts(3, 5, 1, 4), SamplingParams(max_new_tokens=6, **rules))
    assert len(steps) >= 6
    assert min(steps) > 50, "the watch saw nothing"


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_a_step_runs_on_tensors_without_data(rules, each_step):
    ran = []

    def faked(step, self, bucket, span):
        with FakeTensorMode(allow_non_fake_inputs=True):
            step(self, bucket, span)
        ran.append(bucket)
        step(self, bucket, span)

    each_step(faked)
    engine = RolloutEngine(tiny_models.policy("llama"), tiny.tokenizer(), max_slots=2)
    engine.generate(tiny_models.prompts(3, 5), SamplingParams(max_new_tokens=3, **rules))
    assert len(ran) >= 1


def test_a_step_writes_to_the_same_addresses(each_step):
    """Which is what a captured step does, whatever Python does."""
    addresses = set()

    def watched(step, self, *args):
        step(self, *args)
        held = [*self.slots.tensors(), *self.kv_cache.keys, *self.kv_cache.values]
        addresses.add(tuple(x.data_ptr() for x in held))

    engine = RolloutEngine(tiny_models.policy("gpt2"), tiny.tokenizer(), max_slots=4)
    each_step(watched)
    for seed in range(2):
        engine.generate(
            tiny_models.prompts(3, 5, 1, 4, 2, 6), SamplingParams(max_new_tokens=9, seed=seed)
        )
    assert len(addresses) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("height", [-60.0, 0.0, 12.0, 300.0], ids="barred logits {}".format)
def test_figures_are_the_models_where_tokens_were_barred(height, temperature):
    """Barred tokens may have almost all of the probability or almost none."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 40, generator=generator)
    logits[:, [3, 7, 9]] += height
    logits[0, 7] = -math.inf
    model = logits.double()
    params = SamplingParams(temperature=temperature, min_new_tokens=2, suppress_tokens=[3, 7])
    ends, num_generated = torch.tensor([7, 9, 99]), torch.tensor([0, 1, 2, 1, 5, 2])
    processors = LogitsProcessors.of(params, ends, 40)
    barred = processors.bar_(logits, num_generated)
    hidden = torch.zeros(6, 40, dtype=torch.bool)
    hidden[:, [3, 7]] = True
    hidden[[0, 1, 3], 9] = True
    assert torch.equal(logits, model.masked_fill(hidden, -math.inf).float())

    keys = fastrl_kernels.sample_keys(0, torch.arange(6), 0)
    draw = fastrl_kernels.sample_tokens(logits, keys, temperature=temperature)
    found = _with_barred(draw, logits, barred, temperature)
    exact = (model / (temperature or 1.0)).log_softmax(-1)
    at = draw.tokens[:, None]
    for got, right in (
        (found.logprobs, exact.gather(1, at)[:, 0]),
        (found.logprobs_t1, model.log_softmax(-1).gather(1, at)[:, 0]),
        (found.entropies, torch.special.entr(exact.exp()).sum(-1)),
    ):
        torch.testing.assert_close(got.double(), right, rtol=1e-6, atol=2e-6)


CUTS = [
    {}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.85, "min_p": 0.03},
]  # fmt: skip
DRAWS = 100_000


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution in float64, as transformers' own warpers make it."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    return scores.softmax(-1)[0]


class NoEnd:
    eos_token_id = pad_token_id = None


@pytest.fixture(scope="module")
def constant():
    """A model whose distribution is the same after every text: all tokens are embedded alike."""
    model = tiny_models.policy("llama", vocab_size=48, eos_token_id=None)
    with torch.no_grad():
        embedding = model.pretrained_model.get_input_embeddings().weight
        embedding.copy_(embedding[:1].expand_as(embedding).clone())
        model.get_output_embeddings().weight.mul_(3.0)
    return model


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_draws_are_distributed_as_the_model_says(constant, cuts):
    prompt = torch.tensor([11, 5, 40])
    with torch.no_grad():
        logits = constant.eval()(input_ids=prompt[None], attention_mask=torch.ones(1, 3).long())[0]
    expected = exact(logits[:, -1].double(), **cuts)
    engine = RolloutEngine(constant, NoEnd(), max_slots=4096)
    params = SamplingParams(max_new_tokens=DRAWS // 4096 + 1, n=4096, seed=1, **cuts)
    drawn = torch.cat(engine.generate([prompt], params).sequences)
    assert len(drawn) >= DRAWS
    counts = torch.bincount(drawn, minlength=48).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = len(drawn) * expected[possible]
    statistic = ((counts[possible] - wanted).square() / wanted).sum().item()
    freedom = int(possible.sum()) - 1
    assert freedom >= 2
    # χ² is about normal in its cube root (Wilson and Hilferty, 1931).
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4.5
