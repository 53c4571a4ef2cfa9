"""Ready rewards that read texts: of good, bad and hostile responses, on each surface."""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrl import GRPOConfig
from fastrl.alignment import RewardAnnotator, load_annotator
from fastrl.compat.scripts import rewards as under_trls_names
from fastrl.rewards import json_reward, text_rewards
from fastrl.rewards.functions import READY, load_reward
from fastrl.rewards.text_rewards import get_soft_overlong_punishment, last_block
from fastrl.rewards.weighted import Rewards
from fastrl.trainers.groups.reward_functions import RewardFunctions

needs_jsonschema = pytest.mark.skipif(
    importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed"
)
HOSTILE = {
    "empty": "", "blank": " \r\n\u2028", "long": "a" * 10_000_000, "marks": "<think>" * 100_000,
    "the other way round": "<answer>4</answer><think>2 + 2</think>",
    "twice": "<think>a</think><answer>b</answer><answer>c</answer>",
    "within": "<think>a<answer>b</answer></think>",
    "fences": "```\n" * 100_001, "a fence that is open": "```json\n{}", "Arabic": "مرحبا",
    "emoji": "🙂" * 100, "half a surrogate": "\ud800", "NUL": "\0" * 1000,
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 1000 + "1" + "}" * 1000,
    "a huge number": "1" * 100_000, "beyond floats": "[1e999999, NaN]",
    "a key twice": '{"a": 1, "a": 2}', "backtracking": "b" + "a" * 40 + "!",
    "unequal items": "[" + ",".join(['{"x": []}'] * 30_000) + "]",
}  # fmt: skip
assert len(HOSTILE) == 20


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    text_rewards._CHILD._end()
    json_reward._CHILD._end()


def judged(name: str, completions: list[Any]) -> list[float]:
    ids = [[0] * min(len(x), 200) for x in completions]
    given = {"prompts": [""] * len(completions), "completions": completions}
    return load_reward(name)(**given, completion_ids=ids, other=completions)


@pytest.mark.parametrize(("name", "good"), [
    ("format", {"twice": 1.0, "within": 1.0}),
    ('format:{"tags": ["think", "answer"]}', {}),
    ('regex:{"pattern": "^b(a|a?)+$", "seconds": 0.2}', {}),
    ('regex:{"pattern": "(?s)^.*$"}', dict.fromkeys(HOSTILE, 1.0)),
    pytest.param('json_schema:{"schema": {"maxItems": 0}}', {}, marks=needs_jsonschema),
    pytest.param('json_schema:{"schema": {"type": "array", "uniqueItems": true}}', {},
     marks=needs_jsonschema),
])  # fmt: skip
def test_hostile_responses(name: str, good: dict[str, float], monkeypatch: Any) -> None:
    monkeypatch.setattr(json_reward, "SECONDS", 0.3)
    right = dict.fromkeys(HOSTILE, 0.0) | good
    assert dict(zip(HOSTILE, judged(name, list(HOSTILE.values())), strict=True)) == right


@pytest.mark.parametrize("name", [
    'length:{"target": 10}',
    'length:{"target": 10, "unit": "characters", "only_beyond": true}',
    'soft_overlong:{"max_completion_len": 100, "soft_punish_cache": 50}',
])  # fmt: skip
def test_lengths_of_hostile_responses(name: str) -> None:
    rewards = dict(zip(HOSTILE, judged(name, list(HOSTILE.values())), strict=True))
    assert all(-1 <= reward <= 1 for reward in rewards.values())
    assert rewards["long"] == (0.0 if name == 'length:{"target": 10}' else -1.0)


def test_a_form_of_tags() -> None:
    name = 'format:{"tags": ["think", "answer"]}'
    good = "\n<think>2 + 2 <b>is</b>\n4</think>\n<answer></answer> "
    chat = [{"role": "assistant", "content": good}]
    bad = ["x" + good, good.replace("</answer>", ""), good.replace("\n<answer>", "so <answer>")]
    assert judged(name, [good, chat, *bad]) == [1, 1, 0, 0, 0]
    assert load_reward("format") is under_trls_names.think_format_reward
    for tags in ('"think"', "[]", '["a", "a"]', '["<a>"]', "[1]"):
        with pytest.raises(ValueError, match="tag"):
            load_reward(f'format:{{"tags": {tags}}}')


def test_patterns_are_searched_for_or_match_all() -> None:
    said = ["it is 42.", "42", "forty"]
    assert judged(r'regex:{"pattern": "\\d+"}', said) == [1, 1, 0]
    assert judged(r'regex:{"pattern": "\\d+", "full": true}', said) == [0, 1, 0]
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression"):
        load_reward('regex:{"pattern": "("}')


def test_lengths_follow_their_equations() -> None:
    said = ["", "abcd", "a" * 6, "🙂" * 8, "a" * 99]
    close, beyond = 'length:{"target": 4%s}', 'length:{"target": 4, "only_beyond": true%s}'
    for unit in ("", ', "unit": "characters"'):
        assert judged(close % unit, said) == [0, 1, 0.5, 0, 0]
        assert judged(beyond % unit, said) == [0, 0, -0.5, -1, -1]
        assert judged(close % f'{unit}, "scale": 8', said) == [0.5, 1, 0.75, 0.5, 0]
    for wrong in ('"target": 0', '"target": 1, "scale": -1', '"target": 1, "unit": "words"'):
        with pytest.raises(ValueError, match="must be"):
            load_reward(f"length:{{{wrong}}}")
    with pytest.raises(ValueError, match="soft_punish_cache must be between 0 and"):
        get_soft_overlong_punishment(10, 11)


@needs_jsonschema
def test_json_is_that_of_the_last_block_and_valid(tmp_path: Path) -> None:
    said = [
        '{"answer": 4}',
        'First\n```json\n{}\n```\nno:\n```json\n{"answer": 4}\n```\nand ```python\nx\n```',
        '{"answer": "4"}', '{"answer": 4} ', '{"answer": 4}}', '[{"answer": NaN}]',
    ]  # fmt: skip
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["answer"], '
        '"properties": {"answer": {"type": "integer"}}}}}'
    )
    assert judged(f'json_schema:{{"schema": "{schema}"}}', said) == [1, 1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=r"refers to 'http://x/y'.*#/\$defs"):
        load_reward('json_schema:{"schema": {"items": [{"$ref": "http://x/y"}]}}')
    for wrong in ('{"type": "nothing"}', "3"):
        with pytest.raises(ValueError, match="no JSON Schema"):
            load_reward(f'json_schema:{{"schema": {wrong}}}')


def test_without_jsonschema_what_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"jsonschema.*pip install 'jsonschema>="):
        load_reward('json_schema:{"schema": {}}')


def test_the_last_block_of_a_language() -> None:
    text = "```python\na\n```\n ```py\nb\n\n```\n```sh\nc\n```\n```python\nd"
    assert last_block(text, ("python", "py")) == "b\n"
    assert last_block(text, ("",)) == text


def test_parameters_that_a_reward_does_not_take_are_refused() -> None:
    for name, said in (
        ('length:{"goal": 3}', "length takes target, unit, only_beyond, scale .*goal"),
        ("length", "length takes target.*missing a required argument: 'target'"),
        ('math:{"x": 1}', "math takes no parameters"),
        ('length:{"target": 3', "parameters of the reward .* are not JSON"),
    ):
        with pytest.raises(ValueError, match=said):
            load_reward(name)
    with pytest.raises(ImportError, match="has no function 'x'"):
        load_reward("code:x")  # the module's, as any other's


def test_every_surface_takes_the_name(tmp_path: Path) -> None:
    assert sorted(READY) == [
        *("code", "format", "json_schema", "length", "math", "regex", "soft_overlong")
    ]
    name = 'length:{"target": 4, "unit": "characters"}'
    said, ids = ["abcd", "ab"], [[1], [2]]
    by_name = RewardFunctions([name], None, {}, (), GRPOConfig(str(tmp_path), use_cpu=True))
    assert by_name(["q"] * 2, said, ids, {}).total.tolist() == [1.0, 0.5]
    for given in (name, [name, "format"], {"brief": name}):  # as of PPOTrainer.train
        rewards = Rewards(given)
        assert rewards(["q"] * 2, said, ids).total.tolist() == [1.0, 0.5]
    assert rewards.names == ("brief",)
    for annotator in (load_annotator(name), RewardAnnotator(name)):
        assert annotator.score(["q"] * 2, said) == [1.0, 0.5]
    with pytest.raises(TypeError, match="must be a function"):
        Rewards("no/such")
    assert math.isclose(judged(name, ["abc"])[0], 0.75)
