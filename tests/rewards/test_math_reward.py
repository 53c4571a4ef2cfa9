"""The ready reward `math`."""

import importlib.util
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastrl import GRPOConfig
from fastrl.rewards import math_reward as module
from fastrl.rewards import timed_worker
from fastrl.rewards.functions import load_reward
from fastrl.rewards.math_reward import math_reward
from fastrl.rewards.timed import TimedChild
from fastrl.trainers.groups.reward_functions import RewardFunctions
from tests.patience import PATIENCE
from tests.rewards.test_ready_rewards import HOSTILE

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
# Products of integers that hold the interpreter: neither a thread nor a handler could end them.
ENDLESS = r"\boxed{7^{7^{7^{7^{7}}}} - 1}"


CASES: list[tuple[Any, Any, float | None]] = [
    (r"first $5$, then \boxed{\frac{2}{6}}", r"$\frac{1}{3}$", 1.0),
    (r"\boxed{12}", 12, 1.0),
    (r"\boxed{0.00001}", 1e-5, 1.0),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0),
    ("", "4", 0.0),
    ([{"role": "assistant", "content": r"The final answer is $x = 7$."}], "7", 1.0),
    (r"\boxed{4}", None, None),
]
GUIDE = Path(__file__).parents[2] / "docs" / "ready_rewards.md"
PAIR = re.compile(r"\| `(.+)` \| `(.+)` \| (0|1|None) \|")


def pairs_of_the_guide() -> list[tuple[str, str, float | None]]:
    """The rows of the guide's table of solutions, responses and rewards."""
    found = filter(None, map(PAIR.fullmatch, GUIDE.read_text().splitlines()))
    return [(x[2], x[1], None if x[3] == "None" else float(x[3])) for x in found]


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Any:
    yield
    module._PROCESS._end()


def judged(completions: list, solution: list, **columns: Any) -> list[float | None]:
    prompts = ["How many?"] * len(completions)
    ids = [[1]] * len(completions)
    return math_reward(prompts, completions, ids, solution=solution, **columns)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (lambda: load_reward("math"), lambda: judged(["1"], ["1"])):
        with pytest.raises(ImportError, match=r"math-verify.*pip install 'math-verify>="):
            call()


@needs_math_verify
def test_answers_are_right_wrong_or_not_judged() -> None:
    pairs = pairs_of_the_guide()
    assert len(pairs) > 60
    for completion, solution, expected in pairs + CASES:
        assert (solution, completion, *judged([completion], [solution])) == (
            solution, completion, expected,
        )  # fmt: skip


@needs_math_verify
def test_rewards_are_those_of_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    texts = [case for case in CASES if isinstance(case[0], str) and isinstance(case[1], str)]
    chats = [[{"role": "assistant", "content": text}] for text, *_ in texts]
    solutions = [solution for _, solution, _ in texts]
    assert judged(chats, solutions) == rewards.accuracy_reward(chats, solutions)


@needs_math_verify
def test_what_was_parsed_is_noted() -> None:
    noted: dict[str, list] = {}
    judged([r"\boxed{4}", "?", r"\boxed{4}"], ["4", "4", "not 4 \\pi"], log_extra=noted.__setitem__)
    assert noted["solution"] == ["4", "4", "not 4 \\pi"]
    assert noted["gold_parsed"][2] == "[unparseable]"
    assert "4" in noted["gold_parsed"][0]
    assert noted["answer_parsed"][1:] == ["[unparseable]", "[skipped]"]


@needs_math_verify
def test_an_answer_that_takes_too_long_is_wrong_in_every_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SECONDS", 2)
    found: list = []
    task = lambda: found.extend(judged([ENDLESS, r"\boxed{4}"], ["4", "4"]))  # noqa: E731
    begin = time.monotonic()
    thread = threading.Thread(target=task)
    thread.start()
    thread.join(PATIENCE)
    assert found == [0.0, 1.0]
    assert time.monotonic() - begin > 2  # it did take too long
    assert judged([r"\boxed{4}"], [ENDLESS]) == [None]


BOXES = {
    "tower": r"\boxed{10^{10^{10}}}",
    "braces": r"\boxed{" + "{" * 20_000 + "4" + "}" * 20_000 + "}",
    "open boxes": r"\boxed{" * 100_000,
    "a program": r"\boxed{\text{__import__('os').abort()}}",
    "digits": r"\boxed{" + "9" * 100_000 + "}",
    "dollars": "$" * 1_000_000,
}


@needs_math_verify
def test_hostile_responses_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 1)
    for response in (HOSTILE | BOXES).values():
        (reward,) = judged([response], ["4"])
        assert reward in (0.0, None)  # None: the solution took a second, on a slow machine
    # What they may take is known.
    child = module._PROCESS._started()
    assert resource.prlimit(child.pid, resource.RLIMIT_AS)[1] == timed_worker.MEMORY


CRASHES = """
import os, signal
def make_judge():
    return lambda how: os.kill(os.getpid(), signal.SIGSEGV) if how == "signal" else os._exit(3)
"""


def test_a_judge_that_crashes_is_as_one_that_takes_too_long(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(CRASHES)
    child = TimedChild(str(tmp_path / "judge.py"), "a judge")
    with pytest.warns(UserWarning, match="a judge judges ended by signal 11"):
        assert child.ask(PATIENCE, how="signal") is None
    with pytest.raises(RuntimeError, match=r"by itself \(exit code 3\) at"):
        child.ask(PATIENCE, how="exit")


@needs_math_verify
def test_a_call_that_is_broken_off_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged([r"\boxed{4}"], ["4"]) == [1.0]
    read = TimedChild._read

    def interrupted(child: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimedChild, "_read", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        judged([r"\boxed{5}"], ["4"])
    monkeypatch.setattr(TimedChild, "_read", staticmethod(read))
    assert judged([r"\boxed{4}"], ["4"]) == [1.0]


@needs_math_verify
def test_it_is_a_reward_by_name(tmp_path: Path) -> None:
    assert load_reward("math") is math_reward
    by_name = RewardFunctions("math", None, {}, (), GRPOConfig(str(tmp_path), use_cpu=True))
    columns = {"solution": ["4", "4"]}
    rewards = by_name(["q"] * 2, [r"\boxed{4}", r"\boxed{3}"], [[1]] * 2, columns)
    assert rewards.total.tolist() == [1.0, 0.0]
    assert by_name.names == ["math_reward"]
