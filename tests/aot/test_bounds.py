"""Each kernel of the package has its bounds in the ahead-of-time gate."""

import re
from pathlib import Path

import fastrl_kernels
from tests.aot.bounds import MOST_PER_BYTE, NEEDS
from tests.aot.worker import TARGETS


def test_every_kernel_has_a_bound():
    """Else a kernel is new, or has been renamed and lost its bound: `python -m tests.aot` tells
    what it takes."""
    package = Path(fastrl_kernels.__file__).parent / "_triton"
    defined = {
        f"{path.stem}.{name}"
        for path in package.glob("*.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.M)
    }
    assert defined == set(MOST_PER_BYTE)


def test_needs_are_of_kernels_that_there_are_and_state_their_roof():
    """Else a kernel has been renamed, and lost its need."""
    for need in NEEDS:
        assert need.kernel in MOST_PER_BYTE
        assert need.roof
        assert set(need.targets) <= set(TARGETS)
