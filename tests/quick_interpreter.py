"""Triton's interpreter without work that it does again for each call of a device function: a
quarter of its time, where kernels are made of many of them."""

import functools
from typing import Any


def patch_once() -> None:
    """Has the interpreter look through Triton's functions, to put its own in their place, once for
    a kernel, and not again for each function that the kernel calls."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    if not hasattr(interpreter, "_LangPatchScope"):  # another version
        return

    @functools.cache
    def seen(fn: Any) -> tuple[Any, ...]:
        """The modules in which a function sees Triton's own."""
        return tuple(x for x in fn.__globals__.values() if x is tl or x is tl.core)

    def replace_once(fn: Any) -> Any:
        done = seen(fn) and not any(tl.core.is_builtin(module.load) for module in seen(fn))
        return interpreter._LangPatchScope() if done else replace(fn)

    interpreter._patch_lang = replace_once
