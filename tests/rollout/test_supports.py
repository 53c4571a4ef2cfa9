"""The sets that a rollout's tokens were drawn from, and log-probs over them."""

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import supports
from fastrl_kernels import TokenSets
from tests import tiny_models
from tests.golden import tiny

PROMPTS = tiny_models.prompts(5, 3, 9, 4, 6)
CUTS = {
    "top-p": {"top_p": 0.7},
    "all": {"top_p": 0.9, "top_k": 15, "min_p": 0.02, "temperature": 0.8},
    "banned": {"suppress_tokens": [5, 6, 7], "min_new_tokens": 3, "temperature": 1.3},
    "greedy": {"temperature": 0.0, "suppress_tokens": [5]},
    "nothing": {"temperature": 0.9},
}


def model():
    policy = tiny_models.language_model()
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(3)
    return policy


def drawn(slots: int, support: str = "sampled", **options):
    params = SamplingParams(
        max_new_tokens=13, n=3, seed=3, eos_token_ids=[tiny.EOS, *range(20, 40)],
        policy_support=support, **options,
    )  # fmt: skip
    return RolloutEngine(model(), None, max_slots=slots).generate(PROMPTS, params)


@pytest.mark.parametrize("slots", [1, 7, 32])
@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS)
def test_log_probs_and_entropies_are_those_of_plain_forwards_over_the_sets(options, slots):
    found, full = drawn(slots, **options), drawn(slots, "full", **options)
    assert full.supports is None
    policy, temperature = model(), options.get("temperature", 1.0) or 1.0
    ended = set()
    for i, sequence in enumerate(found.sequences):
        assert torch.equal(sequence, full.sequences[i])
        prompt, sets = PROMPTS[i // 3], found.supports[i]
        assert len(sets) == len(sequence)
        assert sets.has(sequence).all()
        ids = torch.cat([prompt, sequence])[None]
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1]
        logits = logits.masked_fill(~sets.mask(), -torch.inf)
        tempered = (logits / temperature).log_softmax(-1)
        at = sequence[:, None]
        expected = {
            "logprobs": tempered.gather(1, at)[:, 0],
            "logprobs_t1": logits.log_softmax(-1).gather(1, at)[:, 0],
            "entropies": torch.special.entr(tempered.exp()).sum(-1),
        }
        for name, column in expected.items():
            torch.testing.assert_close(getattr(found, name)[i], column, rtol=0, atol=1e-5)
        ended.add(found.finish_reasons[i])
    assert ended == {"eos", "length"} or "suppress_tokens" in options


def test_the_sets_are_what_the_settings_leave():
    found = drawn(4, **CUTS["banned"])
    for sequence, sets in zip(found.sequences, found.supports, strict=True):
        mask = sets.mask()
        assert not mask[:, [5, 6, 7]].any()
        ends = torch.tensor([tiny.EOS, *range(20, 40)])
        assert not mask[:3, ends].any()
        assert mask[3:, ends].all()
        assert len(sequence) >= 3
    cut = drawn(4, **CUTS["all"])
    assert max(int(sets.sizes().max()) for sets in cut.supports) <= 15


def test_the_same_sets_whatever_the_slots(monkeypatch):
    one = drawn(1, **CUTS["all"])
    monkeypatch.setattr(supports, "AT_A_TIME", 5)
    for x, y in zip(one.supports, drawn(7, **CUTS["all"]).supports, strict=True):
        assert torch.equal(x.mask(), y.mask())


def test_nothing_is_recorded_where_nothing_is_cut():
    found, full = drawn(4, temperature=0.9), drawn(4, "full", temperature=0.9)
    for name in ("logprobs", "logprobs_t1", "entropies"):
        assert all(map(torch.equal, getattr(found, name), getattr(full, name)))
    whole = TokenSets.joined(found.supports)
    assert (whole.sizes() == tiny.VOCABULARY).all()
    assert whole.data.numel() == 0


def test_what_changes_the_odds_is_refused():
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.2 changes the odds"):
        SamplingParams(policy_support="sampled", repetition_penalty=1.2)
    with pytest.raises(ValueError, match="policy_support must be one of full, sampled"):
        SamplingParams(policy_support="all")
