#!/usr/bin/env bash
# A tool that takes no parameters has the usual schema {"type": "object", "properties": {}}, and a call
# of it the arguments {}. `datasets` keeps both in memory and in its own files, but cannot write them
# as Parquet, and so cannot push them to the Hub: Arrow has no Parquet type of a mapping without keys.
# It fails only where no row has a key there: one other tool with parameters, and it is written, with
# null parameters added to the tool that takes none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install datasets==5.2.0 pyarrow==24.0.0
cat > "$folder/write.py" <<'PROGRAM'
import sys

import datasets
import pyarrow

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
folder = sys.argv[1]


def tool(name, **properties):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def written(tools):
    rows = datasets.Dataset.from_list([{"tools": [each]} for each in tools])
    rows.save_to_disk(f"{folder}/{len(tools)}")
    rows.to_parquet(f"{folder}/{len(tools)}.parquet")
    back = datasets.Dataset.from_parquet(f"{folder}/{len(tools)}.parquet", cache_dir=folder)
    return back[0]["tools"][0]["function"]["parameters"]["properties"]


try:
    alone = str(written([tool("now")]))
except pyarrow.ArrowNotImplementedError as error:
    alone = f"{type(error).__name__}: {error}"
beside = written([tool("now"), tool("weather", city={"type": "string"})])
print("a tool without parameters:", alone)
print("beside one with a city it is read as:", beside)
raise SystemExit(not ("no child field" in alone and beside == {"city": None}))
PROGRAM
"$folder/venv/bin/python" "$folder/write.py" "$folder"
