#!/usr/bin/env bash
# Dataset.from_list makes columns of the first row's keys. A key that only later rows have is
# dropped with its values, without a word, where a JSON file of the same rows keeps it.
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
rows = [{"prompt": "a"}, {"prompt": "b", "solution": "2"}]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
listed = datasets.Dataset.from_list(rows)
loaded = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print("from_list:", listed.column_names, "from a file:", loaded.column_names)
assert loaded.column_names == ["prompt", "solution"]
assert listed.column_names == ["prompt"], "the key of the second row is kept now"
PYTHON
