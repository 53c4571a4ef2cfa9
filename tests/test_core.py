"""The helpers of ``fastrl.core`` against values worked out by hand or the naive way."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from fastrl import core
from tests import tiny_models
from tests.golden import tiny

VALUES = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 60.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])  # counts 1, 2 and 4


def test_masked_mean_of_all_or_along_an_axis():
    assert float(core.masked_mean(VALUES, MASK)) == pytest.approx(7 / 3)
    torch.testing.assert_close(core.masked_mean(VALUES, MASK, axis=1), torch.tensor([1.5, 4.0]))
    torch.testing.assert_close(
        core.masked_mean(VALUES, MASK, axis=0), torch.tensor([2.5, 2.0, 0.0])
    )


def test_what_is_masked_does_not_matter():
    poisoned = torch.where(MASK.bool(), VALUES, torch.nan)
    assert float(core.masked_mean(poisoned, MASK)) == pytest.approx(7 / 3)
    assert core.masked_mean(poisoned, MASK, axis=1).isfinite().all()
    assert float(core.masked_var(poisoned, MASK)) == pytest.approx(7 / 3)


def test_masked_mean_of_nothing_is_zero():
    nothing = torch.zeros_like(MASK)
    assert float(core.masked_mean(VALUES, nothing)) == 0
    assert core.masked_mean(VALUES, nothing, axis=1).tolist() == [0, 0]


def test_masked_var_with_and_without_bessels_correction():
    # 1, 2, 4: squares of the deviations sum to 14/3.
    assert float(core.masked_var(VALUES, MASK)) == pytest.approx(14 / 3 / 2)
    assert float(core.masked_var(VALUES, MASK, unbiased=False)) == pytest.approx(14 / 3 / 3)


def test_masked_var_of_one_value_is_zero():
    one = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert float(core.masked_var(VALUES, one)) == 0


@pytest.mark.parametrize("shift", [True, False])
def test_masked_whiten(shift):
    got = core.masked_whiten(VALUES, MASK, shift_mean=shift)[MASK.bool()]
    numbers = np.array([1.0, 2.0, 4.0])
    expected = (numbers - numbers.mean()) / np.sqrt(numbers.var(ddof=1) + 1e-8)
    expected += 0 if shift else numbers.mean()
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("shift", [True, False])
def test_whiten_counts_all(shift):
    numbers = VALUES.double().numpy()
    expected = (numbers - numbers.mean()) / np.sqrt(numbers.var(ddof=1) + 1e-8)
    expected += 0 if shift else numbers.mean()
    np.testing.assert_allclose(core.whiten(VALUES, shift_mean=shift), expected, rtol=1e-5)


def test_clip_by_value_takes_numbers_and_tensors():
    x = torch.tensor([-3.0, 0.5, 3.0])
    assert core.clip_by_value(x, -1, 1.0).tolist() == [-1.0, 0.5, 1.0]
    low, high = torch.tensor([-4.0, 1.0, 0.0]), torch.tensor([-3.5, 2.0, 1.0])
    assert core.clip_by_value(x, low, high).tolist() == [-3.5, 1.0, 1.0]


def test_clip_by_value_with_crossed_bounds_ends_at_the_minimum():
    assert core.clip_by_value(torch.tensor([0.0, 9.0]), 2.0, 1.0).tolist() == [2.0, 2.0]


def test_logprobs_from_logits_gathers_the_labels():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(4.0), 0.0]]])
    got = core.logprobs_from_logits(logits, torch.tensor([[1, 1]]))
    torch.testing.assert_close(got.exp(), torch.tensor([[0.75, 0.2]]))


def test_logprobs_from_logits_ungathered():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    got = core.logprobs_from_logits(logits, None, gather=False)
    torch.testing.assert_close(got, logits - logits.exp().sum(-1, keepdim=True).log())


def test_logprobs_from_logits_are_differentiable():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([0, 4, 2, 2])
    (got,) = torch.autograd.grad(core.logprobs_from_logits(logits, labels).sum(), logits)
    expected = torch.nn.functional.one_hot(labels, 5) - logits.detach().softmax(-1)
    torch.testing.assert_close(got, expected)


def test_gathering_without_labels_is_refused():
    with pytest.raises(ValueError, match="labels are needed"):
        core.logprobs_from_logits(torch.zeros(1, 2), None)


def test_entropy_from_logits():
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf]]])
    of_quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected = torch.tensor([[math.log(4.0), of_quarter]])
    torch.testing.assert_close(core.entropy_from_logits(logits), expected)


def test_top_k_and_top_p_filtering_by_hand():
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = probabilities.log()
    kept = {
        "k": core.top_k_top_p_filtering(logits, top_k=2),
        "p": core.top_k_top_p_filtering(logits, top_p=0.7),
        "both": core.top_k_top_p_filtering(logits, top_k=1, top_p=0.9),
        "neither": core.top_k_top_p_filtering(logits),
        "at least 3": core.top_k_top_p_filtering(logits, top_p=0.1, min_tokens_to_keep=3),
    }
    counts = {name: int(t.isfinite().sum()) for name, t in kept.items()}
    assert counts == {"k": 2, "p": 2, "both": 1, "neither": 4, "at least 3": 3}
    filled = core.top_k_top_p_filtering(logits, top_k=1, filter_value=-9.0)
    assert filled[0, 1:].tolist() == [-9.0] * 3


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (0, 0.8), (9, 0.6)])
def test_filtering_is_that_of_transformers(top_k, top_p):
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = core.top_k_top_p_filtering(logits.clone(), top_k, top_p)
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_respond_to_batch_returns_responses_and_the_models_mode():
    model = tiny_models.policy("gpt2").train()
    queries = torch.stack(tiny_models.prompts(4, 4, 4))
    seen = []
    handle = model.register_forward_hook(lambda module, *_: seen.append(module.training))
    got = core.respond_to_batch(model, queries, txt_len=5)
    handle.remove()
    assert got.shape == (3, 5)
    assert got.dtype == torch.long
    assert model.training
    assert seen == [False] * 5


def test_respond_to_batch_with_one_candidate_is_greedy():
    model = tiny_models.policy("gpt2")
    queries = torch.stack(tiny_models.prompts(4, 4))
    got = core.respond_to_batch(model, queries, txt_len=6, top_k=1)
    expected = model.generate(
        input_ids=queries, attention_mask=torch.ones_like(queries), max_new_tokens=6,
        min_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=tiny.PAD,
    )  # fmt: skip
    assert torch.equal(got, expected[:, 4:])


def test_respond_to_batch_restores_the_mode_after_an_error():
    model = tiny_models.policy("gpt2").train()
    with pytest.raises(IndexError):
        core.respond_to_batch(model, torch.full((1, 3), tiny.VOCABULARY + 5))
    assert model.training


def test_length_sampler_leaves_its_maximum_out():
    np.random.seed(0)
    sampler = core.LengthSampler(3, 6)
    drawn = [sampler() for _ in range(200)]
    assert set(drawn) == {3, 4, 5}
    assert all(isinstance(n, int) for n in drawn)


@pytest.mark.parametrize("bounds", [(4, 4), (5, 4)])
def test_an_empty_range_of_lengths_is_refused(bounds):
    with pytest.raises(ValueError, match=r"max_value \(4\) is exclusive"):
        core.LengthSampler(*bounds)


def test_flatten_dict():
    assert core.flatten_dict({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {
        "a/b": 1,
        "a/c/d": 2,
        "e": [3],
    }
    assert core.flatten_dict({"a": {"b": 1}}, sep=".") == {"a.b": 1}


@pytest.mark.parametrize("nested", [{"a/b": 1}, {"a": {"b/c": 1}}])
def test_flatten_dict_refuses_the_separator_in_a_key(nested):
    with pytest.raises(ValueError, match="separator '/' not allowed"):
        core.flatten_dict(nested)


def test_stack_dicts_pads_with_minus_one():
    stacked = core.stack_dicts(
        [
            {"x": torch.tensor([[1, 2], [3, 4]]), "y": torch.tensor(5)},
            {"x": torch.tensor([6]), "y": torch.tensor(7)},
        ]
    )
    assert stacked["x"].tolist() == [[1, 2, 3, 4], [6, -1, -1, -1]]
    assert stacked["y"].tolist() == [[5], [7]]


def test_stats_to_np():
    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)
    got = core.stats_to_np({"half": half, "int": 3, "np": np.float32(0.5), "text": "x"})
    assert got["half"].dtype == np.float32
    assert got["half"].tolist() == [1.5, 2.5]
    assert isinstance(got["int"], float)
    assert isinstance(got["np"], float)
    assert got["text"] == "x"


def test_convert_to_scalar():
    array = np.arange(2)
    got = core.convert_to_scalar(
        {"a": torch.tensor(1.5), "b": torch.tensor([2]), "c": np.array([3.0]), "d": array, "e": "x"}
    )
    assert got == {"a": 1.5, "b": 2, "c": 3.0, "d": array, "e": "x"}
    assert not isinstance(got["a"], torch.Tensor)


def test_set_seed_seeds_all_three_generators():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    core.set_seed(3)
    first = draw()
    assert draw() != first
    core.set_seed(3)
    assert draw() == first


def test_randn_tensor_with_a_generator_per_sample():
    def generators(*seeds):
        return [torch.Generator().manual_seed(s) for s in seeds]

    got = core.randn_tensor((3, 4, 2), generators(5, 6, 5))
    torch.testing.assert_close(got[0], got[2], atol=0, rtol=0)
    assert not torch.equal(got[0], got[1])
    expected = torch.randn(1, 4, 2, generator=generators(6)[0])[0]
    torch.testing.assert_close(got[1], expected, atol=0, rtol=0)


def test_randn_tensor_with_one_generator_or_none():
    expected = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    for given in (torch.Generator().manual_seed(1), [torch.Generator().manual_seed(1)]):
        assert torch.equal(core.randn_tensor((2, 3), given), expected)
    torch.manual_seed(1)
    assert torch.equal(core.randn_tensor((2, 3)), expected)
    assert core.randn_tensor((2,), dtype=torch.float64).dtype == torch.float64


def test_randn_tensor_refuses_another_number_of_generators():
    with pytest.raises(ValueError, match="got 2 generators for a batch of 3"):
        core.randn_tensor((3, 1), [torch.Generator(), torch.Generator()])


def test_the_device_cache_is_emptied_only_when_asked(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    for wanted in (False, True):
        monkeypatch.setattr(core.PPODecorators, "optimize_device_cache", wanted)
        with core.PPODecorators.empty_device_cache():
            assert not emptied
        assert bool(emptied) == wanted


def test_fastrl_hides_what_bitsandbytes_says_of_kernels_that_it_never_takes():
    """From the moment that fastrl is imported, as transformers may import bitsandbytes next."""
    code = (
        "import logging, fastrl\n"
        "ours = 'Failed to load CPU gemm_4bit_forward from kernels-community: %s'\n"
        "trust = \"Skipping publisher trust check for '{}'\"\n"
        "repository = 'kernels-community/quantization-bitsandbytes'\n"
        "for log in ('bitsandbytes.backends.cpu.ops', 'kernels.hf_hub'):\n"
        "    logging.getLogger(log).warning(f'of another: {log}')\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning(ours, 'why')\n"
        "logging.getLogger('kernels.hf_hub').warning(trust.format(repository))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "of another: bitsandbytes.backends.cpu.ops\nof another: kernels.hf_hub\n"
    assert run.stderr == said
