"""When the host learns that samples have ended: at once, or one look late."""

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import engine as engine_module
from fastrl.rollout.kv_cache import EOS, RUNNING, Slots
from fastrl.rollout.scheduler import (
    POLL_STEPS,
    FinishPoll,
    LookLate,
    LookNow,
    RolloutSample,
    Scheduler,
)
from tests import tiny_models
from tests.golden import tiny


class Event:
    """Refuses to be waited for twice, or before it was recorded."""

    def __init__(self):
        self.recorded = self.waited = False

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded
        assert not self.waited
        self.waited = True


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)


def polled(kind, samples, slots):
    state = Slots(slots, 64, torch.device("cpu"))
    scheduler = Scheduler([RolloutSample(i, i, 64) for i in range(samples)], slots)
    scheduler.admit([1] * samples)
    state.state.reason.fill_(RUNNING)
    return state, scheduler, FinishPoll(kind(state, scheduler))


@pytest.mark.parametrize("kind", [LookNow, LookLate])
def test_a_look_comes_every_few_steps_however_they_are_cut(kind):
    state, _, poll = polled(kind, 2, 2)
    state.state.reason[1] = EOS
    looks = []
    for _ in range(3 * POLL_STEPS):
        assert poll.due >= 1
        looks.append(bool(poll.after(1)))
    first = POLL_STEPS if kind is LookNow else 2 * POLL_STEPS
    assert looks.index(True) == first - 1
    assert sum(looks) == (3 if kind is LookNow else 2)


def test_a_late_look_follows_samples_to_their_new_slots():
    state, scheduler, poll = polled(LookLate, 3, 3)
    state.state.reason[2] = EOS
    assert poll.after(POLL_STEPS) == []
    scheduler.release([0])
    assert [(a, b) for a, b, _ in scheduler.pack()] == [(2, 0)]
    state.state.reason[:] = torch.tensor([EOS, RUNNING, RUNNING])
    assert poll.after(POLL_STEPS) == [0]


def test_a_late_look_spares_who_took_the_slot_meanwhile():
    state, scheduler, poll = polled(LookLate, 3, 2)
    state.state.reason[0] = EOS
    assert poll.after(POLL_STEPS) == []
    scheduler.release([0])  # its limit came first
    scheduler.admit([1] * 3)
    state.state.reason[0] = RUNNING
    assert poll.after(POLL_STEPS) == []


def test_looking_late_changes_no_sample(monkeypatch):
    prompts = tiny_models.prompts(*[3, 5, 1, 4, 2, 6] * 3)
    params = SamplingParams(max_new_tokens=40, seed=0, eos_token_ids=range(8))
    outputs = []
    for kind in (LookNow, LookLate):
        monkeypatch.setattr(
            engine_module, "make_finish_poll", lambda *x, kind=kind: FinishPoll(kind(*x))
        )
        engine = RolloutEngine(tiny_models.policy("gpt2"), tiny.tokenizer(), max_slots=4)
        outputs.append(engine.generate(prompts, params))
    at_once, late = outputs
    assert "eos" in at_once.finish_reasons
    assert at_once.finish_reasons == late.finish_reasons
    for a, b in zip(at_once.sequences, late.sequences, strict=True):
        assert torch.equal(a, b)
    assert late.stats["perf/decode_steps"] > at_once.stats["perf/decode_steps"]
