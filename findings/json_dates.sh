#!/usr/bin/env bash
# A JSON column in which every text looks like a date is loaded by `datasets` as timestamps, also
# where it lies inside of chat messages: an answer "2024-01-31" reaches a reward function as a
# datetime. One row that is no date leaves all of them texts, so that a sample of a file may load
# otherwise than the file. Declaring the column as text does not help: the text comes back as
# "2024-01-31 00:00:00", because it was a timestamp in between. CSV and Dataset.from_list keep texts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install datasets==5.2.0 pyarrow==24.0.0
cat > "$folder/load.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import datasets
import pyarrow

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
folder = Path(sys.argv[1])


def loaded(rows, **options):
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(folder / "cache"), **options
    )


dates = [{"prompt": "When?", "answer": "2024-01-31"}, {"prompt": "And then?", "answer": "2023-02-01"}]
chat = [{"messages": [{"role": "user", "content": "2024-01-31"}]}]
text = datasets.Value("string")
found = {
    "dates alone": type(loaded(dates)[0]["answer"]).__name__,
    "in a message": type(loaded(chat)[0]["messages"][0]["content"]).__name__,
    "with one that is none": loaded([*dates, {"prompt": "Or?", "answer": "soon"}])[0]["answer"],
    "declared as text": loaded(
        dates, features=datasets.Features({"prompt": text, "answer": text})
    )[0]["answer"],
    "from_list": datasets.Dataset.from_list(dates)[0]["answer"],
}
for case, what in found.items():
    print(f"{case}: {what}")
expected = ["datetime", "datetime", "2024-01-31", "2024-01-31 00:00:00", "2024-01-31"]
raise SystemExit(list(found.values()) != expected)
PROGRAM
mkdir "$folder/rows"
"$folder/venv/bin/python" "$folder/load.py" "$folder/rows"
