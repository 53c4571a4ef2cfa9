"""Chat templates get the keys that a row was written with, not those that its table fills in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset, disable_progress_bars

from fastrl.data.chat import render
from fastrl.data.preferences import prepare_completions_of_ids, prepare_pairs_of_ids
from fastrl.data.prepare import prepare_pairs, prepare_texts
from fastrl.data.prompts import Prompts
from fastrl.data.trl_rows import conversations_formatting_function, maybe_apply_chat_template
from tests.chat_tokenizer import tokenizer as byte_tokenizer

disable_progress_bars()
WRITES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role ~ m.content }}"
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


@pytest.mark.parametrize("as_rows", [list, Dataset.from_list])
def test_each_door_writes_the_keys_of_a_row(as_rows: Any) -> None:
    made = tokenizer("as JSON")
    talks = [called("f", {"a": "b"}), called("g", {"n": 1, "l": ["x"]})]
    tools = [[tool("f", a="string")], [tool("g", n="integer", l="array")]]
    end = [{"role": "assistant", "content": "ok"}]
    rows = [{"prompt": x, "tools": y} for x, y in zip(talks, tools, strict=True)]
    wanted = [
        made(made.apply_chat_template([*x, *end], tools=y, tokenize=False)).input_ids
        for x, y in zip(talks, tools, strict=True)
    ]

    def data(**more: Any) -> Any:
        return as_rows([{**row, **more} for row in rows])

    whole = as_rows([{"messages": [*x["prompt"], *end], "tools": x["tools"]} for x in rows])
    no = [{"role": "assistant", "content": "no"}]
    pairs = data(chosen=end, rejected=no)
    found = {
        "messages": [row["input_ids"] for row in prepare_texts(whole, made)],
        "completions": [row["input_ids"] for row in prepare_texts(data(completion=end), made)],
        "pairs": [row["chosen_ids"] for row in prepare_pairs(pairs, made, None)],
    }
    if as_rows is not list:
        of_pairs = prepare_pairs_of_ids(pairs, made, None, None)
        found["DPO"] = [[*x["prompt_ids"], *x["chosen_ids"]] for x in of_pairs]
        of_rows = prepare_completions_of_ids(data(completion=end, label=True), made, None, None)
        found["KTO"] = [[*x["prompt_ids"], *x["completion_ids"]] for x in of_rows]
        asked = Prompts.from_dataset(data(), "prompt", made)
        answer = made("ok" + made.eos_token).input_ids
        found["PPO"] = [[*ids.tolist(), *answer] for ids in asked.ids]
    for door, ids in found.items():
        assert ids == wanted, door


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
