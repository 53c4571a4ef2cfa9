"""Shows that ``advantage_bound``, a new setting of PPO, acts, is checked, and is a command's flag.

Runs in a tree with new_setting.patch.
"""

from __future__ import annotations

import contextlib
import io

import pytest

from fastrl.cli import main
from tests.ppo.conftest import make_batch, make_trainer

for bound in (None, 0.25):
    trainer = make_trainer(advantage_bound=bound)
    trainer.step(**make_batch())
    largest = float(trainer.experience.advantages.abs().max())
    assert largest > 1 if bound is None else largest == bound, largest
with pytest.raises(ValueError, match="advantage_bound"):
    make_trainer(advantage_bound=-1.0)
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main(["ppo", "--help-all"])
assert "--advantage-bound" in shown.getvalue()
