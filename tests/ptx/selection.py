"""Which tests of tests/kernels run on compiled kernels."""

from __future__ import annotations

from typing import Any

# Files and tests, with the reason.
LEFT_OUT = {
    "test_launch.py": "counts the Python of a launch, and here the emulator does the launching",
    "test_hub.py": "builds a package",
    "test_import.py": "imports in processes of its own",
    "test_dtensor.py": "starts processes of its own",
    "test_argument_types.py": "bad input, refused before a launch",
    "test_compile.py": "torch.compile launches what it wrote itself",
    "test_first_order.py": "what is recorded for gradients, of torch.compile too",
    "test_head_on_gpu.py": "sizes of a GPU",
    "test_beyond_32_bits.py": "sizes of a GPU",
    "test_full_kl.py::test_offsets_do_not_wrap_at_two_to_the_31": "",
}


def left_out(item: Any) -> bool:
    """Whether a test runs no kernel, or is about something else than what it computes."""
    file = item.path.name
    if file in LEFT_OUT or f"{file}::{item.originalname}" in LEFT_OUT:
        return True
    if any("interpreter" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")):
        return True
    settings = getattr(item, "callspec", None)
    return settings is not None and settings.params.get("backend") == "torch"
