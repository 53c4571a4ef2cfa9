"""Importance weights of another sampler, on several processes: the step of the joined batch."""

import pytest
import torch

from tests import tiny_models
from tests.ppo.test_sampler_correction import CASES, in_float64, weighted_loss
from tests.processes.corrected import STEPS, batch_of_all, run
from tests.processes.launch import assert_close, fork, kept


@pytest.fixture(scope="module")
def done(tmp_path_factory, count):
    """A folder with what each step did, of one process and of several."""
    folder = tmp_path_factory.mktemp("corrected")
    for processes in (1, count):
        ended = fork(run, folder, *STEPS, processes=processes)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def exact_step(case):
    """The gradients of all samples by the formula in float64, and the weights [t] of each."""
    batch, _, sampled, old = batch_of_all()
    settings = CASES[case]
    bounds = settings.get("sampler_correction_min"), settings.get("sampler_correction_max", 3.0)
    weights = []
    for lp, s in zip(old, sampled, strict=True):
        mask = torch.ones(1, len(lp), dtype=torch.bool)
        kind = settings["sampler_correction"]
        weights.append(in_float64(lp[None], s[None], mask, kind, *bounds)[0])
    model = tiny_models.language_model("gpt2").double()
    weighted_loss(model, old, old, weights, batch, settings).backward()
    return {name: p.grad for name, p in model.named_parameters()}, weights


@pytest.mark.parametrize("case", STEPS)
def test_a_step_of_several_processes_is_the_joined_batchs_in_float64(done, count, case):
    gradients, weights = exact_step(case)
    used = torch.cat(weights)
    if CASES[case]["sampler_correction"].startswith("sequence"):
        used = torch.stack([w[0] for w in weights])
    for each in (*kept(done, case, 1), *kept(done, case, count)):
        for name, exact in gradients.items():
            # parameters of size 1 are rounded to 6e-8
            moved = each["moved"][name].double()
            torch.testing.assert_close(moved, exact, rtol=1e-4, atol=1e-6, msg=name)
        found = {k: each["statistics"][f"sampler/weight_{k}"] for k in ("mean", "min", "max")}
        exact = {"mean": used.mean(), "min": used.min(), "max": used.max()}
        assert found == pytest.approx({k: float(x) for k, x in exact.items()}, rel=1e-5)


@pytest.mark.parametrize("case", STEPS)
def test_statistics_are_of_all_processes_samples(done, count, case):
    (one,) = kept(done, case, 1)
    assert one["statistics"]["sampler/unknown_share"] > 0
    for other in kept(done, case, count):
        assert_close(one, other)
