"""fastrl computes what TRL 0.11.4 computed (see tests/golden/README.md)."""

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastrl import PPOConfig, PPOTrainer
from fastrl.core import logprobs_from_logits
from tests.golden import tiny
from tests.golden.reader import CASES, Batch, GoldenCase, case_paths, read_case

# TRL's own eager and fused attention differ by up to a seventh of this on the cases here, and by up
# to 3e-4 on figures near 0 of larger ones.
RELATIVE, ABSOLUTE = 1e-3, 1e-5

FOLDERS = [CASES] + [Path(folder) for folder in [os.environ.get("FASTRL_GOLDEN")] if folder]
RUNS = [
    pytest.param((path, side), id=f"{folder.name}-{path.stem}-{side}")
    for folder in FOLDERS
    for path in case_paths(folder)
    for side in ("right", "left")
]


# The responses are random tokens, not samples of the policy: the KL estimate may be anything.
pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


@dataclass
class Run:
    """What fastrl computed for a golden case."""

    case: GoldenCase
    mask: Tensor
    figures: dict[str, Tensor]
    statistics: list[dict[str, float]]
    final: dict[str, Tensor]


def play(case: GoldenCase, padding_side: str, **changes: float) -> Run:
    """Runs a golden case on fastrl; `changes` are made to its settings."""
    policy, reference = case.models()
    trainer = PPOTrainer(
        config=PPOConfig(**(case.config | changes)),
        model=policy,
        ref_model=reference,
        tokenizer=tiny.tokenizer(padding_side),
    )
    mask, figures = per_token_figures(trainer, case.batches[0])
    statistics = [trainer.step(b.queries, b.responses, b.scores) for b in case.batches]
    final = {name: p.detach().cpu() for name, p in tiny.named_parameters(policy).items()}
    figures = {name: figure.cpu() for name, figure in figures.items()}
    return Run(case, mask.cpu(), figures, statistics, final)


@torch.no_grad()
def per_token_figures(trainer: PPOTrainer, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The mask and the figures of a first step, through the methods that TRL's users override."""
    full = trainer.config.kl_penalty == "full"
    inputs = trainer.prepare_model_inputs(batch.queries, batch.responses)
    (logprobs, logits, values, mask), (ref_logprobs, ref_logits, _, _) = (
        trainer.batched_forward_pass(
            model, batch.queries, batch.responses, inputs, return_logits=full
        )
        for model in (trainer.model, trainer.ref_model)
    )
    if full:
        logprobs = logprobs_from_logits(logits, None, gather=False)
        ref_logprobs = logprobs_from_logits(ref_logits, None, gather=False)
    scores = first_scores(batch, trainer.config)
    rewards, non_score, kls = trainer.compute_rewards(scores, logprobs, ref_logprobs, mask)
    values, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    figures = {
        "values": values, "rewards": rewards, "non_score": non_score, "kls": kls,
        "advantages": advantages, "returns": returns,
    }  # fmt: skip
    return mask.bool(), figures


def first_scores(batch: Batch, config: PPOConfig) -> Tensor:
    """The scores as a first step sees them: scaled by the moments of this batch alone, clipped."""
    scores = torch.stack(batch.scores)
    if config.use_score_scaling:
        if config.use_score_norm:
            scores = scores - scores.mean()
        scores = scores / scores.std()
    if config.score_clip is not None:
        scores = scores.clip(-config.score_clip, config.score_clip)
    return scores


@functools.cache
def play_once(path: Path, padding_side: str) -> Run:
    return play(read_case(path), padding_side)


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return play_once(*request.param)


def test_statistics(run: Run) -> None:
    wrong = list(wrong_statistics(run))
    assert not wrong, "\n".join(wrong)


def test_per_token_figures_of_the_first_step(run: Run) -> None:
    golden_mask = run.case.mask
    assert run.mask.shape == golden_mask.shape
    assert run.mask.sum(1).tolist() == golden_mask.sum(1).tolist()
    for name, expected in run.case.figures.items():
        figure = run.figures[name]
        # The counted entries of a row keep their order whichever side is padded.
        torch.testing.assert_close(
            figure[run.mask],
            expected[golden_mask],
            rtol=RELATIVE,
            atol=ABSOLUTE,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        assert not figure[~run.mask].any(), f"{name} is not 0 outside the mask"


def test_final_parameters(run: Run) -> None:
    # A head that is tied to the embeddings may be listed a second time there.
    assert run.case.final.keys() - run.final.keys() <= {"lm_head.weight"}
    for name, parameter in run.final.items():
        found = without_key_bias(name, parameter)
        expected = without_key_bias(name, run.case.final[name])
        error = (found - expected).abs()
        strays = error[~(error <= ABSOLUTE + RELATIVE * expected.abs())]  # NaN too
        # Where a gradient is as small as Adam's epsilon (1e-8), its rounding decides how large a
        # step is: that befalls an element in thousands, and moves it by a fraction of each step.
        config = PPOConfig(**run.case.config)
        steps = len(run.statistics) * config.ppo_epochs
        steps *= config.batch_size // config.backward_batch_size
        assert len(strays) <= error.numel() // 1000, f"{name}: {len(strays)} elements are off"
        assert (strays < 0.1 * steps * config.learning_rate).all(), f"{name}: off by {strays}"


@pytest.mark.parametrize("changes", [
    {"cliprange": 0.21}, {"cliprange_value": 0.21}, {"lam": 0.94}, {"vf_coef": 0.11}, {"seed": 1},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_a_changed_setting_shows(changes: dict[str, float]) -> None:
    """The comparison is sharp enough to notice what it is there to notice."""
    case = read_case(CASES / "minibatch_gpt2.json")
    assert list(wrong_statistics(play(case, "right", **changes)))


def wrong_statistics(run: Run) -> Iterator[str]:
    """A line for each scalar statistic that is missing or off."""
    for step, (found, expected) in enumerate(zip(run.statistics, run.case.statistics, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif key == "ppo/policy/advantages_mean" and abs(value) < 1e-6:
                # Whitened advantages have mean 0: what is left is rounding.
                if abs(found[key]) >= 1e-6:
                    yield f"step {step}: {key} is {found[key]}, expected a residue around 0"
            elif not math.isclose(
                found[key], value, rel_tol=0, abs_tol=ABSOLUTE + RELATIVE * abs(value)
            ):
                yield f"step {step}: {key} is {found[key]}, expected {value}"


def without_key_bias(name: str, parameter: Tensor) -> Tensor:
    """Leaves out attention's key biases: their true gradient is 0, and Adam turns the rounding of
    it into steps."""
    if name.endswith("c_attn.bias"):
        query, _, value = parameter.chunk(3)
        return torch.cat([query, value])
    if name.endswith(("k_proj.bias", "query_key_value.bias")):
        return parameter[:0]
    return parameter
