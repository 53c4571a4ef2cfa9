"""A drawn adapter under a drawn trainer: what is saved, merged or uploaded says what the trainer's
model says, or the adapter is refused."""

import pytest

from tests.serving.drawn_adapters import CLOSE, check, drawn, refused

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of each option in its own way
CASES = drawn(64)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_what_is_saved_is_what_was_trained(case, world, tmp_path):
    if refused(case):
        with pytest.raises(ValueError, match=r"on lm_head is not supported|ensure_weight_tying"):
            check(case, world, tmp_path)
        return
    row = check(case, world, tmp_path)
    assert row.pop("push") == "ok"
    assert not {name: off for name, off in row.items() if not off < CLOSE}
