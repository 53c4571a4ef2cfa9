#!/usr/bin/env bash
# A column of datasets.Json() keeps ten decimals of a number: 1e-12 comes back as 0.0. load_dataset
# makes such a column of its own accord as soon as the objects in a JSON file have different keys,
# so that one more key in another row changes this row's numbers. And a text of digits in a column
# of mixed kinds, such as a message's content, comes back as a number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet datasets==5.2.0
env/bin/python - <<'PYTHON'
import json
import datasets

print("datasets", datasets.__version__)
datasets.disable_progress_bars()


def loaded(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return datasets.load_dataset("json", data_files=name, split="train", cache_dir=f"cache-{name}")


small = {"calls": [{"arguments": {"step": 1e-12, "rate": 0.12345678901234}}]}
other = {"calls": [{"arguments": {"city": "Rome"}}]}
alone = loaded("alone.jsonl", [small, small])
mixed = loaded("mixed.jsonl", [small, other])
print("alone:", alone.features["calls"], alone[0])
print("beside other keys:", mixed.features["calls"], mixed[0])
assert alone[0] == small
read = mixed[0]["calls"][0]["arguments"]
assert read["step"] == 0.0, "1e-12 is kept now"
assert abs(read["rate"] - 0.1234567890) < 1e-15, "all digits are kept now"

blocks = [{"type": "text", "text": "six times seven?"}]
chat = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "42"}]
said = loaded("chat.jsonl", [{"messages": chat}])[0]["messages"][1]["content"]
print("the content '42' beside a list of blocks:", repr(said))
assert said == 42, "a text stays a text now"
PYTHON
