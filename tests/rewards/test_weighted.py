"""Several reward functions with weights, time limits and retries."""

import asyncio
import copy
import functools
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastrl.rewards import calls, weighted
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.functions import load_function
from fastrl.rewards.weighted import Rewards
from fastrl.run.processes import OneProcess
from fastrl.trainers.groups.response_log import ResponseLog
from fastrl.user_code import fault_of
from tests.golden import tiny
from tests.patience import LONG, PATIENCE
from tests.together import together
from tests.trainers.conftest import reward_model

PROMPTS = ["w3", "w4", "w5", "w6", "w7"]
COMPLETIONS = [" a", " bb", " ccc", " dddd", " eeeee"]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) - 1) for text in completions]


async def half(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [(len(text) - 1) / 2 for text in completions]


def ask(rewards: Rewards, **given: Any) -> weighted.RewardBatch:
    return rewards(PROMPTS, COMPLETIONS, **given)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted, "_FIRST_PAUSE", 0.0)


class Failing:
    """Raises in its first calls, each an error of its own."""

    __name__ = "failing"

    def __init__(self, times: int, error: type[BaseException] = ConnectionError):
        self.times, self.error, self.calls = times, error, 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error(f"refused {self.calls}")
        return length(completions)


class FailingAsync(Failing):
    async def __call__(self, completions: list[str], **_: Any) -> list[float]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__call__(completions)


_over = threading.Event()  # the test


@pytest.fixture
def hangs_end() -> Iterator[None]:
    """No thread that hangs outlives its test."""
    _over.clear()
    yield
    _over.set()


def hanging(**_: Any) -> list[float]:
    _over.wait(LONG)
    return []


async def hanging_async(**_: Any) -> list[float]:
    await asyncio.sleep(LONG)
    return []


async def blocking(**_: Any) -> list[float]:
    return hanging()


def test_the_reward_is_the_weighted_sum() -> None:
    found = ask(Rewards([length, half], [3.0, -1.0]))
    assert found.total.tolist() == [2.5, 5.0, 7.5, 10.0, 12.5]
    assert {name: x.tolist() for name, x in found.by_function.items()} == {
        "length": [1, 2, 3, 4, 5],
        "half": [0.5, 1, 1.5, 2, 2.5],
    }
    numbers = found.statistics()
    assert (numbers["reward/mean"], numbers["reward/length/mean"]) == (7.5, 3)
    assert numbers["reward/half/std"] == pytest.approx(math.sqrt(10 / 4) / 2)
    assert numbers["time/reward/half"] > 0


def test_a_single_function_has_no_statistics_of_its_own() -> None:
    assert ask(Rewards(length)).statistics() == {
        "reward/mean": 3.0,
        "reward/std": pytest.approx(math.sqrt(2.5)),
        "reward/nonfinite": 0.0,
        "reward/retries": 0.0,
    }


def test_none_leaves_a_function_out_of_a_samples_sum() -> None:
    def odd(completions: list[str], **_: Any) -> list[float | None]:
        return [10.0 if len(text) % 2 else None for text in completions]

    found = ask(Rewards([odd, length]))
    assert found.total.tolist() == [1, 12, 3, 14, 5]
    assert found.statistics()["reward/odd/mean"] == 10
    assert found.by_function["odd"].isnan().tolist() == [True, False, True, False, True]
    with pytest.raises(ValueError, match=r"completion 0 \(prompt 'w3'\): odd returned None"):
        ask(Rewards(odd))


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_function_of_weight_0_decides_nothing(on_nonfinite: str) -> None:
    def judges(**_: Any) -> list[Any]:
        return [1.0, None, 3.0, 4.0, 5.0]

    def metric(**_: Any) -> list[Any]:
        return [math.nan, 7.0, None, math.inf, 2.0]

    options: dict[str, Any] = {"on_nonfinite": on_nonfinite, "judges_all": False}
    rewards = Rewards([judges, metric], [2.0, 0.0], **options)
    with pytest.warns(UserWarning, match="metric returned nan.*left out of its mean.*weight is 0"):
        found = ask(rewards)
    assert found.total[[0, 2, 3, 4]].tolist() == [2.0, 6.0, 8.0, 10.0]
    assert found.total.isnan().tolist() == [False, True, False, False, False]
    assert (found.unjudged, found.nonfinite) == ([1], 0)
    assert found.statistics()["reward/metric/mean"] == 4.5
    with pytest.raises(ValueError, match="no reward function judges completion 1"):
        ask(Rewards([judges, metric], [2.0, 0.0], on_nonfinite=on_nonfinite))
    alone = Rewards([length], [0.0])  # a run of its KL alone
    assert ask(alone).total.tolist() == [0.0] * 5


def test_samples_that_are_left_out_are_not_asked_about() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, row: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, row))
        return [float(number) for number in row]

    ids = [[i] for i in range(5)]
    found = ask(Rewards(reward), completion_ids=ids, columns={"row": [5, 6, 7, 8, 9]}, left_out=[1])
    assert found.total[[0, 2, 3, 4]].tolist() == [5, 7, 8, 9]
    assert found.total.isnan().tolist() == [False, True, False, False, False]
    chosen = [0, 2, 3, 4]
    expected = [[column[i] for i in chosen] for column in (PROMPTS, COMPLETIONS, ids)]
    assert seen == [(*expected, [5, 7, 8, 9])]


@pytest.mark.parametrize("size", [None, 2])
def test_what_a_reward_notes_stands_beside_its_samples(size: int | None, no_pauses: None) -> None:
    """Also where samples are left out, and where a call is repeated."""
    log = ResponseLog(SimpleNamespace(generation_batch_size=5), ["r"], {}, OneProcess())
    failing = Failing(1)

    def reward(row: Any, log_extra: Any, **given: Any) -> list[float]:
        log_extra("row", list(row))
        return failing(**given)

    also = {"log_extra": log.note_column}
    with pytest.warns(UserWarning, match="called again"):
        ask(
            Rewards(reward, reward_batch_size=size, reward_retries=1),
            columns={"row": [5, 6, 7, 8, 9]},
            left_out=[1],
            also=also,
        )
    assert log.take_columns() == {"row": [5, None, 7, 8, 9]}


def test_calls_take_as_many_completions_as_they_are_allowed() -> None:
    sizes: list[int] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        return length(completions)

    found = ask(Rewards(reward, reward_batch_size=2))
    assert sizes == [2, 2, 1]
    assert found.total.tolist() == [1, 2, 3, 4, 5]


def test_a_classifier_keeps_its_own_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = ClassifierReward(reward_model(), tiny.tokenizer(), batch_size=3, name="clf")
    asked: list[int] = []
    score = reward._score
    monkeypatch.setattr(
        reward, "_score", lambda rows, of: asked.append(len(rows)) or score(rows, of)
    )
    found = ask(Rewards([reward, length], reward_batch_size=2))
    assert asked == [5]
    assert set(found.by_function) == {"clf", "length"}


def test_async_functions_and_their_calls_run_at_the_same_time() -> None:
    waiting = 0
    everyone: asyncio.Event | None = None

    async def meet(completions: list[str], **_: Any) -> list[float]:
        nonlocal waiting, everyone
        everyone = everyone or asyncio.Event()
        waiting += 1
        if waiting == 6:  # three calls of each of two functions
            everyone.set()
        await asyncio.wait_for(everyone.wait(), PATIENCE)
        return length(completions)

    class Object:
        async def __call__(self, **given: Any) -> list[float]:
            return await meet(**given)

    found = ask(Rewards([meet, functools.partial(Object())], reward_batch_size=2))
    assert found.total.tolist() == [2, 4, 6, 8, 10]
    assert list(found.by_function) == ["meet", "Object"]


def test_one_event_loop_serves_all_calls_also_within_another() -> None:
    loops, before = set(), {*threading.enumerate()}

    async def reward(completions: list[str], **_: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        return length(completions)

    def used() -> list[threading.Thread]:
        rewards = Rewards(reward)

        async def notebook() -> set[Any]:
            ask(rewards)
            return {asyncio.get_running_loop()}

        ask(rewards)
        assert asyncio.run(notebook()).isdisjoint(loops)
        assert len(loops) == 1
        return [x for x in {*threading.enumerate()} - before if x.name == "fastrl-rewards"]

    (thread,) = used()
    thread.join(PATIENCE)  # it ends with its Rewards
    assert not thread.is_alive()


def test_without_a_time_limit_functions_run_in_the_callers_thread() -> None:
    threads = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        threads.append(threading.current_thread())
        return length(completions)

    ask(Rewards(reward))
    ask(Rewards(reward, reward_timeout=PATIENCE))
    assert threads[0] is threading.current_thread() is not threads[1]


@pytest.mark.parametrize("function", [hanging, hanging_async, blocking])
@pytest.mark.usefixtures("hangs_end")
def test_a_function_that_hangs_ends_in_an_error(function: Any) -> None:
    with pytest.raises(
        TimeoutError, match=rf"function {function.__name__} did not .* reward_timeout=0\.1 s"
    ) as raised:
        ask(Rewards([length, function], reward_timeout=0.1))
    assert ("blocks the event loop" in str(raised.value)) == (function is blocking)


def test_a_process_ends_though_a_function_hangs() -> None:
    code = (
        "import runpy, sys, time\n"
        "calls = runpy.run_path(sys.argv[1])\n"
        "try:\n"
        f"    calls['call_within'](0.05, lambda: time.sleep({LONG}), 'hangs')\n"
        "except calls['TimeLimitExceeded']:\n"
        "    print('late')\n"
    )
    command = [sys.executable, "-c", code, calls.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.usefixtures("hangs_end")
def test_ctrl_c_acts_while_a_function_hangs(waits: bool) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupted(**_: Any) -> list[float]:
        signal.pthread_kill(main, signal.SIGINT)
        return hanging()

    async def interrupted_async(**_: Any) -> list[float]:
        signal.pthread_kill(main, signal.SIGINT)
        return await hanging_async()

    with pytest.raises(KeyboardInterrupt):
        ask(Rewards(interrupted_async if waits else interrupted, reward_timeout=PATIENCE))


@pytest.mark.parametrize("kind", [Failing, FailingAsync])
@pytest.mark.usefixtures("no_pauses")
def test_a_call_that_fails_is_repeated_and_counted(kind: Any) -> None:
    rewards = Rewards(kind(2), reward_retries=2, reward_batch_size=3)
    with pytest.warns(
        UserWarning, match="failing raised ConnectionError: refused 1: it is"
    ) as said:
        found = ask(rewards)
    assert len(said) == 1
    assert found.total.tolist() == [1, 2, 3, 4, 5]
    assert found.statistics()["reward/retries"] == 2
    assert ask(rewards).statistics()["reward/retries"] == 0


@pytest.mark.parametrize("kind", [Failing, FailingAsync])
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.filterwarnings("ignore:.*is called again")
def test_the_last_error_is_raised_with_the_functions_name(kind: Any) -> None:
    function = kind(9)
    with pytest.raises(ConnectionError, match="refused 3") as raised:
        ask(Rewards(function, reward_retries=2))
    assert function.calls == 3
    fault = fault_of(raised.value)
    assert fault is not None
    assert fault.message.startswith(
        "the reward function failing (attempt 3 of 3) raised ConnectionError: refused 3 ("
    )
    assert fault.where.rstrip().endswith('raise self.error(f"refused {self.calls}")')


@pytest.mark.usefixtures("no_pauses", "hangs_end")
def test_a_call_that_takes_too_long_is_repeated() -> None:
    calls = iter([hanging, length])

    def slow_at_first(completions: list[str], **_: Any) -> list[float]:
        return next(calls)(completions=completions)

    # The second call takes a thousandth of that.
    with pytest.warns(UserWarning, match=r"did not return within reward_timeout=1 s: it is call"):
        found = ask(Rewards(slow_at_first, reward_timeout=1, reward_retries=1))
    assert found.total.tolist() == [1, 2, 3, 4, 5]
    assert found.retries == 1


@pytest.mark.filterwarnings("ignore:.*is called again")
def test_pauses_between_attempts_double(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(weighted.time, "sleep", pauses.append)
    ask(Rewards(Failing(8), reward_retries=8))
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("kind", [Failing, FailingAsync])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("limit", [None, PATIENCE])
def test_an_interruption_is_not_an_attempt_that_failed(kind: Any, error: Any, limit: Any) -> None:
    function = kind(1, error)
    with pytest.raises(error):
        ask(Rewards(function, reward_retries=2, reward_timeout=limit))
    assert function.calls == 1


def test_the_first_error_of_an_async_function_ends_the_others() -> None:
    ended = threading.Event()

    async def patient(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.set()
        return []

    with pytest.raises(ConnectionError):
        ask(Rewards([patient, FailingAsync(1)]))
    assert ended.wait(PATIENCE)


def test_lines_of_an_async_function_that_was_loaded_are_shown(tmp_path: Any) -> None:
    path = tmp_path / "judge.py"
    path.write_text("async def judge(**columns):\n    return {}['missing']\n")
    function = load_function(f"{path}:judge")
    with pytest.raises(KeyError) as raised:
        ask(Rewards(function))
    fault = fault_of(raised.value)
    assert fault is not None
    assert fault.message == f"{path}:judge raised KeyError: 'missing' ({path}, line 2)"
    assert fault.where.count("File") == 1


@pytest.mark.parametrize(("returned", "said"), [
    ([1.0] * 4, "returned 4 rewards for 5 completions"),
    ([1.0] * 6, "returned 6 rewards for 5 completions"),
    (None, "returned None: it must return a list"),
    ({1: 2}, r"returned \{1: 2\}: it must return a list"),
    ([1.0, 1.0, "good", 1.0, 1.0], "returned 'good' for completion 2"),
    ([[1.0, 2.0]] * 5, "returned 2 numbers for completion 0"),
])  # fmt: skip
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_what_is_no_list_of_numbers_is_not_asked_for_again(
    returned: Any, said: str, on_nonfinite: str
) -> None:
    count = 0

    def wrong(**_: Any) -> Any:
        nonlocal count
        count += 1
        return returned

    with pytest.raises(ValueError, match=f"the reward function wrong {said}"):
        ask(Rewards(wrong, reward_retries=3, on_nonfinite=on_nonfinite))
    assert count == 1


def test_a_coroutine_of_a_function_that_is_not_async_is_refused() -> None:
    with pytest.raises(ValueError, match="<lambda> returned a coroutine"):
        ask(Rewards(lambda **given: half(**given)))


@pytest.mark.parametrize(("bad", "shown"), [
    (math.nan, "nan"),
    (torch.tensor(-math.inf), "-inf"),
    (1e39, r"1e\+39"),  # not in fp32, which scores are
])  # fmt: skip
def test_a_reward_that_is_not_finite_is_an_error_or_left_out(bad: Any, shown: str) -> None:
    def sick(completions: list[str], **_: Any) -> list[Any]:
        return [bad if text == " dddd" else float(len(text) - 1) for text in completions]

    where = rf"function sick returned {shown} for completion 3 \(prompt 'w6'\)"
    for left_out in ([], [0]):  # its number is that in the batch
        with pytest.raises(ValueError, match=f"{where}: rewards must be finite"):
            ask(Rewards(sick, on_nonfinite="raise"), left_out=left_out)
    rewards = Rewards([sick, length], on_nonfinite="skip")
    with pytest.warns(UserWarning, match=f"{where}: left out of the step") as said:
        found = [ask(rewards) for _ in range(2)]
    assert len(said) == 1
    assert found[1].total[[0, 1, 2, 4]].tolist() == [2, 4, 6, 10]
    assert found[1].total.isnan().tolist() == [False, False, False, True, False]
    numbers = found[1].statistics()
    assert numbers["reward/nonfinite"] == 1
    assert (numbers["reward/mean"], numbers["reward/sick/mean"]) == (5.5, 2.75)


def test_where_no_sample_is_left_it_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"sick returned nan .* and 4 more .* no completion is left"
    ):
        ask(Rewards({"sick": lambda **_: [math.nan] * 5}, on_nonfinite="skip"))
    some = {"some": lambda **_: [math.nan, 1, 2, 3, 4], "metric": lambda **_: [math.nan] * 5}
    with pytest.warns(UserWarning, match="left out of the step|its weight is 0"):
        found = ask(Rewards(some, [1, 0], on_nonfinite="skip"))
    assert found.total[1:].tolist() == [1, 2, 3, 4]


def test_equal_names_are_numbered() -> None:
    assert Rewards([length, half, length, length]).names == (
        "length",
        "half",
        "length_2",
        "length_3",
    )


def test_a_functions_lists_are_its_own() -> None:
    def careless(completions: list[str], **_: Any) -> list[float]:
        completions.clear()
        return [0.0] * 5

    assert ask(Rewards([careless, length])).total.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.filterwarnings("ignore:the reward function careless raised")
@pytest.mark.parametrize("retries", [0, 1])
def test_messages_ids_and_columns_are_a_functions_own_at_each_call(retries: int) -> None:
    prompts = [[{"role": "user", "content": "w5"}]]
    ids, columns = [[3, 4]], {"answer": [{"parts": [1]}]}
    seen: list[Any] = []

    def careless(prompts: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        seen.append(copy.deepcopy((prompts, completion_ids, answer)))
        prompts[0].append({"role": "assistant", "content": "w6"})
        prompts[0][0]["content"] = completion_ids[0].pop()
        answer[0]["parts"].clear()
        if len(seen) <= retries:
            raise ConnectionError
        return [1.0]

    given = copy.deepcopy((prompts, ids, columns["answer"]))
    rewards = Rewards([careless, careless], reward_retries=retries)
    assert rewards(prompts, ["w6"], ids, columns).total.tolist() == [2.0]
    assert seen == [given] * (2 + retries)
    assert (prompts, ids, columns["answer"]) == given


@together(("settings", "error", "message"), [
    ({"reward_fn": []}, ValueError, "reward_fn is empty"),
    ({"reward_fn": "f.py:g"}, TypeError, r"reward_fn must be a function.*got 'f\.py:g'"),
    ({"reward_fn": {"": length}}, TypeError, "names of reward functions must be texts, got ''"),
    ({"reward_weights": [1.0]}, ValueError, "reward_weights has 1 numbers for 2 reward func"),
    ({"reward_weights": 1.0}, ValueError, "reward_weights must be a list of numbers, got 1.0"),
    ({"reward_weights": [1, math.nan]}, ValueError, r"reward_weights\[1\] must be a finite"),
    ({"reward_timeout": 0}, ValueError, "reward_timeout must be a positive number"),
    ({"reward_timeout": math.inf}, ValueError, "reward_timeout must be a positive number"),
    ({"reward_timeout": "soon"}, ValueError, "reward_timeout must be a positive number"),
    ({"reward_retries": -1}, ValueError, "reward_retries must be 0 or more, got -1"),
    ({"reward_retries": 1.5}, ValueError, r"reward_retries must be 0 or more, got 1\.5"),
    ({"reward_batch_size": 0}, ValueError, "reward_batch_size must be positive, got 0"),
    ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be one of .*, got 'ignore'"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Rewards(**{"reward_fn": [length, half], **settings})
