"""Which sample runs where, and when the host learns that samples have finished."""

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import engine as engine_module
from fastrl.rollout.kv_cache import Slots
from fastrl.rollout.scheduler import (
    POLL_STEPS,
    AsynchronousRead,
    FinishPoll,
    RolloutSample,
    Scheduler,
    SynchronousRead,
    bucket_sizes,
)
from fastrl_kernels.types import EOS, RUNNING
from tests import tiny_models
from tests.golden import tiny


def simulated(limits, slots):
    """Useful tokens over rows run, if every sample runs to its limit."""
    scheduler = Scheduler([RolloutSample(i, i, n) for i, n in enumerate(limits)], slots)
    lengths = [1] * len(limits)
    order = []
    while scheduler.waiting or scheduler.running:
        order += [sample.index for _, sample in scheduler.admit(lengths)[0]]
        scheduler.pack()
        scheduler.release(scheduler.advance(scheduler.steps(8)))
    assert order == sorted(order), "first in, first out"
    return sum(limits) / scheduler.rows_run


def lognormal(count, median, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = median * torch.randn(count, generator=generator).exp()
    return lengths.round().long().clamp(min=1).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_seldom_idle_with_lognormal_lengths(seed):
    assert simulated(lognormal(256, 60, seed), slots=16) >= 0.95


def test_the_engine_is_as_economical_as_its_schedule():
    model = tiny_models.policy("gpt2", n_positions=600)
    limits = [min(n, 500) for n in lognormal(256, 12, seed=0)]
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=16)
    params = SamplingParams(max_new_tokens=limits, suppress_tokens=[tiny.EOS], seed=0)
    out = engine.generate(tiny_models.prompts(*[3, 5, 1, 4] * 64), params)
    assert [len(s) for s in out.sequences] == limits
    assert out.stats["perf/slot_utilisation"] == pytest.approx(simulated(limits, 16))
    assert out.stats["perf/slot_utilisation"] >= 0.95


def test_running_samples_close_up():
    scheduler = Scheduler([RolloutSample(i, 0, 9) for i in range(6)], 6)
    scheduler.admit([4])
    scheduler.advance(2)
    freed = scheduler.release([0, 3, 4])
    assert [sample.index for _, sample in freed] == [0, 3, 4]
    assert scheduler.pack() == [(5, 0, 6)]
    assert scheduler.running == [0, 1, 2]
    assert scheduler.bucket == 3
    assert scheduler.span(1) == 6


def test_samples_move_only_where_fewer_rows_are_run_for_it():
    scheduler = Scheduler([RolloutSample(i, 0, 9) for i in range(8)], 8)
    scheduler.admit([4])
    scheduler.release([1])
    assert scheduler.pack() == []  # seven samples need eight rows
    assert scheduler.bucket == 8
    scheduler.release([0, 3])
    assert scheduler.pack() == [(6, 0, 4), (7, 1, 4)]  # five need six
    assert scheduler.running == [0, 1, 2, 4, 5]
    assert scheduler.bucket == 6


def admitted(scheduler):
    new, held = scheduler.admit([4] * 9)
    return [(slot, sample.prompt) for slot, sample in new], held


def test_a_prompt_is_found_where_its_last_sample_ran_or_runs():
    scheduler = Scheduler([RolloutSample(i, i // 3, 9) for i in range(9)], 2)
    assert admitted(scheduler) == ([(0, 0), (1, 0)], {})
    scheduler.advance(1)
    scheduler.release([1])
    assert admitted(scheduler) == ([(1, 0)], {0: 0})
    scheduler.advance(1)
    scheduler.release([0, 1])
    assert admitted(scheduler) == ([(0, 1), (1, 1)], {0: 1})
    scheduler.release([0, 1])
    assert admitted(scheduler) == ([(0, 1), (1, 2)], {1: 1}), "in a slot that another prompt gets"


def test_where_steps_overwrite_what_prompts_left_none_is_found():
    scheduler = Scheduler([RolloutSample(i, 0, 9) for i in range(4)], 2, keeps_prompts=False)
    admitted(scheduler)
    scheduler.release([0])
    assert admitted(scheduler) == ([(0, 0)], {})


def test_a_prompt_that_has_to_be_run_waits_until_a_pass_has_been_idled_away():
    """Two steps of four slots are worth a pass: eight of one that is free, or four of two."""
    samples = [RolloutSample(i, prompt, 99) for i, prompt in enumerate([0, 0, 0, 0, 0, 1, 2, 3])]
    scheduler = Scheduler(samples, 4, patience=2)
    assert admitted(scheduler)[0] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    scheduler.advance(1)
    scheduler.release([3])
    assert admitted(scheduler)[0] == [(3, 0)], "its prompt is there"
    scheduler.release([1])
    for _ in range(2):
        assert admitted(scheduler)[0] == []
        scheduler.advance(2)
    scheduler.release([2])
    assert admitted(scheduler)[0] == []
    scheduler.advance(2)
    assert admitted(scheduler)[0] == [(1, 1), (2, 2)]
    scheduler.release([1])
    assert admitted(scheduler)[0] == []
    scheduler.release([0, 2, 3])
    assert admitted(scheduler)[0] == [(0, 3)], "nothing runs meanwhile"


def test_buckets_grow_by_half():
    assert bucket_sizes(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(21) == [1, 2, 3, 4, 6, 8, 12, 16, 21]


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


@pytest.mark.parametrize("kind", [SynchronousRead, AsynchronousRead])
def test_a_look_comes_every_few_steps_however_they_are_cut(kind):
    state, _, poll = polled(kind, 2, 2)
    state.state.reason[1] = EOS
    looks = []
    for _ in range(3 * POLL_STEPS):
        assert poll.due >= 1
        looks.append(bool(poll.after(1)))
    first = POLL_STEPS if kind is SynchronousRead else 2 * POLL_STEPS
    assert looks.index(True) == first - 1
    assert sum(looks) == (3 if kind is SynchronousRead else 2)


def test_a_late_look_follows_samples_to_their_new_slots():
    state, scheduler, poll = polled(AsynchronousRead, 3, 3)
    state.state.reason[2] = EOS
    assert poll.after(POLL_STEPS) == []
    scheduler.release([0])
    assert [(a, b) for a, b, _ in scheduler.pack()] == [(2, 0)]
    state.state.reason[:] = torch.tensor([EOS, RUNNING, RUNNING])
    assert poll.after(POLL_STEPS) == [0]


def test_a_late_look_spares_who_took_the_slot_meanwhile():
    state, scheduler, poll = polled(AsynchronousRead, 3, 2)
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
    for kind in (SynchronousRead, AsynchronousRead):
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


@pytest.mark.parametrize("eos", [True, False])
def test_the_host_reads_at_most_once_in_eight_steps(eos, monkeypatch):
    engine = RolloutEngine(tiny_models.policy("gpt2"), tiny.tokenizer(), max_slots=4)
    prompts = tiny_models.prompts(*[3, 5, 1, 4, 2, 6] * 4)
    suppressed = [] if eos else [tiny.EOS]
    params = SamplingParams(max_new_tokens=40, seed=0, suppress_tokens=suppressed)
    engine.generate(prompts, params)
    looks = []
    look = SynchronousRead.__call__

    def counted(self):
        looks.append(1)
        return look(self)

    monkeypatch.setattr(SynchronousRead, "__call__", counted)
    out = engine.generate(prompts, params)
    steps = out.stats["perf/decode_steps"]
    assert steps > 60
    assert 0 < len(looks) <= steps / 8
