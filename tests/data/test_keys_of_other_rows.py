"""Chat templates get the keys that a row was written with, not those that its table fills in."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value, disable_progress_bars, load_dataset

from fastrl.data.chat import render, templates_of, without_nulls
from fastrl.data.datas_loader import DatasLoader
from fastrl.data.preferences import prepare_completions_of_ids, prepare_pairs_of_ids
from fastrl.data.prepare import prepare_pairs, prepare_texts
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.data.prompts import Prompts, samples_of_rows
from fastrl.data.tables import as_dataset, is_stream, list_as_dataset, load_table
from fastrl.data.tool_calls import as_message
from fastrl.data.trl_rows import conversations_formatting_function, maybe_apply_chat_template
from tests.chat_tokenizer import tokenizer as byte_tokenizer

disable_progress_bars()
WRITES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for k, v in {'x': x, 'y': y, 'z': z}.items() "
    "if v is defined %}{{ k ~ (v | tojson) }}{% endfor %}"
    "{% for m in messages %}{{ m.role ~ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% if 'name' in m %}{{ m.name }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
GIVEN = "c.function.arguments"
CALLS = {
    "as JSON": f"{{{{ {GIVEN} | tojson }}}}",
    "by key": f"{{% for k, x in {GIVEN}.items() %}}{{{{ k ~ (x | tojson) }}}}{{% endfor %}}",
    "mappings alone": f"{{% if {GIVEN} is mapping %}}{{{{ {GIVEN} | tojson }}}}{{% endif %}}",
    "as text": f"{{{{ {GIVEN} if {GIVEN} is string else {GIVEN} | tojson }}}}",
}


def tokenizer(how: str) -> Any:
    made: Any = byte_tokenizer()
    made.chat_template = WRITES.replace("CALL", CALLS[how])
    return made


def called(name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    ask = {"role": "user", "content": "do"}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [ask, said, {"role": "tool", "content": "x", "name": name}]


def tool(name: str, **kinds: Any) -> dict[str, Any]:
    properties = {key: {"type": kind, "enum": ["a", None]} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": properties}}


def found_at_each_door(rows: list[dict[str, Any]], hold: Any, made: Any) -> dict[str, Any]:
    """The ids of each row's prompt and an answer "ok" behind it, by door.

    Args:
        hold: rows as the doors are to get them.
    """
    end, no = ([{"role": "assistant", "content": text}] for text in ("ok", "no"))
    answer = made("ok" + made.eos_token).input_ids

    def data(*names: str, **more: Any) -> Any:
        return hold(
            [{name: x for name, x in {**row, **more}.items() if name in names} for row in rows]
        )

    given = ("prompt", "tools", "chat_template_kwargs")
    whole = [
        {**row, "messages": [*row["prompt"], *end], "chosen": [*row["prompt"], *end]}
        | {"rejected": [*row["prompt"], *no]}
        for row in rows
    ]
    chats = hold([{x: row[x] for x in ("messages", *given[1:])} for row in whole])
    pairs = data(*given, "chosen", "rejected", chosen=end, rejected=no)
    longer = hold([{x: row[x] for x in (*given[1:], "chosen", "rejected")} for row in whole])
    labelled = data(*given, "completion", "label", completion=end, label=True)
    asked = data(*given)
    found = {
        "SFT, messages": [row["input_ids"] for row in prepare_texts(chats, made)],
        "SFT, completions": [row["input_ids"] for row in prepare_texts(labelled, made)],
        "reward model": [row["chosen_ids"] for row in prepare_pairs(pairs, made, None)],
        "reward model, whole": [row["chosen_ids"] for row in prepare_pairs(longer, made, None)],
    }
    for name, each in (("DPO", pairs), ("DPO, whole", longer)):
        of_pairs = prepare_pairs_of_ids(each, made, None, None)
        found[name] = [[*x["prompt_ids"], *x["chosen_ids"]] for x in of_pairs]
    for name, each in (("KTO", labelled), ("KTO, pairs", pairs), ("KTO, whole", longer)):
        of_rows = prepare_completions_of_ids(each, made, None, None)
        found[name] = [[*x["prompt_ids"], *x["completion_ids"]] for x in of_rows][: len(rows)]
    if is_stream(asked):
        return found
    encoded = Prompts.from_dataset(asked, "prompt", made).samples.prompt_ids
    found["PPO"] = [[*ids.tolist(), *answer] for ids in encoded]
    samples = list(list_as_dataset(asked))
    prompts = samples_of_rows(samples, [row["prompt"] for row in samples])
    templates = templates_of(prompts.prompts, prompts.columns, prompts.prompt_rows)
    online = ids_of_prompts(prompts.prompts, made, templates)
    found["GRPO"] = [[*ids.tolist(), *answer] for ids in online]
    loaded = DatasLoader(labelled, made, kind="answers")
    found["alignment"] = [[*x.prompt_ids, *x.responses[0].ids] for x in loaded]
    return found


TALKS = [called("f", {"a": "b"}), called("g", {"n": 1, "l": ["x"]})]
TOOLS = [[tool("f", a="string")], [tool("g", n="integer", l="array")]]
ROWS = [{"prompt": x, "tools": y} for x, y in zip(TALKS, TOOLS, strict=True)]
ROWS = [{**row, "chat_template_kwargs": {key: 1}} for row, key in zip(ROWS, "xy", strict=True)]


def wanted(rows: list[dict[str, Any]], made: Any) -> list[list[int]]:
    end = [{"role": "assistant", "content": "ok"}]
    texts = (
        made.apply_chat_template(
            [*x["prompt"], *end], tools=x["tools"], tokenize=False, **x["chat_template_kwargs"]
        )
        for x in rows
    )
    return [made(text).input_ids for text in texts]


@pytest.mark.parametrize("hold", [list, Dataset.from_list])
def test_each_door_writes_the_keys_of_a_row(hold: Any) -> None:
    made = tokenizer("as JSON")
    for door, ids in found_at_each_door(ROWS, hold, made).items():
        assert ids == wanted(ROWS, made), door


def in_json(rows: list[dict[str, Any]]) -> Dataset:
    """A table whose columns of mappings are JSON, those of messages in part."""
    text = Value("string")
    message = {"role": text, "content": text, "name": text, "tool_calls": List(Json())}
    kinds = {"prompt": List(message), "tools": List(Json()), "label": Value("bool")}
    return Dataset.from_list(rows, features=Features({x: kinds.get(x, Json()) for x in rows[0]}))


def written(rows: list[dict[str, Any]], tmp_path: Path) -> str:
    file = tmp_path / f"{'-'.join(rows[0])}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


HOLDS: dict[str, Callable[[Any, Path], Any]] = {
    "a list": lambda rows, _: rows,
    "JSON columns": lambda rows, _: in_json(rows),
    "a stream": lambda rows, _: in_json(rows).to_iterable_dataset(),
    "a file of ours": lambda rows, path: load_table(written(rows, path)),
    "a file": lambda rows, path: load_dataset(
        "json", data_files=written(rows, path), split="train", cache_dir=str(path / "cache")
    ),
}
NULLS: dict[str, Callable[[Any], None]] = {
    "none": lambda row: None,
    "default": lambda row: row["tools"][0]["function"]["parameters"]["a"].update(default=None),
    "enum": lambda row: row["tools"][0]["function"]["parameters"]["a"].update(enum=["b", None]),
    "argument": lambda row: row["prompt"][1]["tool_calls"][0]["function"]["arguments"].update(
        unit=None
    ),
    "of the template": lambda row: row["chat_template_kwargs"].update(z=None),
}


@pytest.mark.parametrize("held", HOLDS)
def test_a_null_that_is_meant_is_kept_at_each_door(held: str, tmp_path: Path) -> None:
    made, rows = tokenizer("as JSON"), [copy.deepcopy(ROWS[0]) for _ in NULLS]
    for row, mean in zip(rows, NULLS.values(), strict=True):
        mean(row)
    rows.append(ROWS[1])
    right = wanted(rows, made)
    assert len({*map(tuple, right)}) == len(rows)
    found = found_at_each_door(rows, lambda x: HOLDS[held](x, tmp_path), made)
    wrong = {
        (door, what)
        for door, ids in found.items()
        for what, of, to in zip([*NULLS, "other keys"], ids, right, strict=True)
        if of != to
    }
    assert not wrong


@pytest.mark.parametrize("held", ["a list", "a file of ours"])
def test_values_beside_nulls_are_those_that_were_written(held: str, tmp_path: Path) -> None:
    # Columns of JSON round numbers to ten digits, and read a text of "12" as a number.
    rows = [
        {"prompt": x, "said": y}
        for x, y in ((["12", {"a": 1e-12}], {"n": 2**60, "t": None}), ([{"b": "1"}], "7"))
    ]
    table = as_dataset(HOLDS[held](rows, tmp_path))
    assert list(table) == rows


def test_a_null_of_a_key_that_all_rows_of_a_file_have_is_kept(tmp_path: Path) -> None:
    rows = [{"x": {"z": None}, "y": [{"a": 1}]}, {"x": {"z": 1}, "y": [{"a": None}]}]
    table = as_dataset(load_table(written(rows, tmp_path)))
    assert [without_nulls(row) for row in table] == rows


def test_an_argument_that_a_policy_gives_as_null_is_kept() -> None:
    made, ask = tokenizer("as JSON"), {"role": "user", "content": "do"}
    said = as_message({"tool_calls": [{"name": "f", "arguments": {"unit": None}}]})
    assert '{"unit": null}' in render([ask, said], made)


def test_helpers_of_scripts_write_the_keys_of_a_row() -> None:
    made = tokenizer("as JSON")
    talks = [called("f", {"a": "b"}), called("g", {"n": 1, "l": ["x"]})]
    tools = [[tool("f", a="string")], [tool("g", n="integer", l="array")]]
    rows = Dataset.from_list(
        [{"messages": x, "tools": y} for x, y in zip(talks, tools, strict=True)]
    )
    wanted = [
        made.apply_chat_template(x, tools=y, tokenize=False)
        for x, y in zip(talks, tools, strict=True)
    ]
    found = [maybe_apply_chat_template(row, made, row["tools"])["text"] for row in rows]
    assert found == wanted
    written = conversations_formatting_function(made, "messages")
    plain = [made.apply_chat_template(x, tokenize=False) for x in talks]
    assert [written(row) for row in rows] == written(rows[:]) == plain


@pytest.mark.parametrize("how", CALLS)
def test_arguments_in_json_are_written_once(how: str) -> None:
    made = tokenizer(how)
    given = {"a": "b", "n": None}
    text = json.dumps(given)
    assert render(called("f", text), made) == made.apply_chat_template(
        called("f", given), tokenize=False
    )
