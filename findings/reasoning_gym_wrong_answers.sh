#!/usr/bin/env bash
# The scores of many reasoning-gym tasks reward a wrong answer that contains the right one: -41 has
# two thirds of the score where -4 is right, as len(right) / len(answer) is given for any text in
# which the right answer occurs. So does an answer that lists many numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet reasoning-gym==0.1.25
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

print("reasoning-gym", version("reasoning-gym"))
task = reasoning_gym.create_dataset("chain_sum", size=20, seed=1)
entry = task[0]
right = entry["answer"]
scores = {answer: task.score_answer(answer, entry) for answer in (right, right + "1", "7")}
print(entry["question"], scores)
assert scores[right] == 1 and scores["7"] == 0
assert 0 < scores[right + "1"] < 1, "another number scores nothing now"
PYTHON
