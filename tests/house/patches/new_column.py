"""Shows that ``turns``, a new column of samples, arrives at learner, checkpoint and log.

Runs in a tree with new_column.patch. Its argument is a folder for the trainer's output.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import test_samples
from tests.trl.test_tools import CALLING, make, multiply, says

trainer = make(Path(sys.argv[1]), tools=[multiply])
says(trainer, [x + "<|end|>" for x in CALLING], ["12<|end|>", "eh<|end|>", "It is 20<|end|>"])
trainer.train()
learned = trainer._generations.buffer[0]
assert sorted(int(turns.max()) for turns in learned.turns) == [0, 1, 1, 1]
for turns, written in zip(learned.turns, learned.learned, strict=True):
    assert len(turns) == len(written)
    assert (turns.diff() >= 0).all()
    assert (turns[~written] == 0).all(), "a tool's results are of the turn that called it"
assert learned.state()["turns"] is learned.turns
assert trainer.state.log_history[0]["completions/mean_turns"] == (1 + 2 + 2 + 2) / 4

assert "turns" in test_samples.COLUMNS
test_samples.test_some_of_them(kind="samples")
test_samples.test_parts_one_after_the_other()
test_samples.test_a_column_that_one_part_lacks_is_filled_or_dropped_by_name()
