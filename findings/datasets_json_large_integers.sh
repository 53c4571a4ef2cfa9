#!/usr/bin/env bash
# An integer of a JSON file that needs more than 64 bits is loaded as a float, and the whole column
# with it: its last digits are gone, also those of answers that would have fitted. Nothing is said;
# Python's own json reads the same file exactly.
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
answers = [12345678901234567890123, 9007199254740993]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps({"answer": answer}) + "\n" for answer in answers)
assert [json.loads(line)["answer"] for line in open("rows.jsonl")] == answers
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print("written", answers, "loaded", rows["answer"][:])
assert all(isinstance(x, float) for x in rows["answer"]), "integers stay integers now"
assert int(rows["answer"][1]) != answers[1], "the digits are kept now"
PYTHON
