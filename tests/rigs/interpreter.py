"""Speeds up Triton's interpreter."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Patch `triton.language` only at the start of a launch.

    The interpreter patches it again at every call of a function within a kernel, although the launch has
    patched it already: this took a third of the time of the kernel tests.
    """
    original = interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch(fn: FunctionType) -> Any:
        modules = {each for each in fn.__globals__.values() if each is tl or each is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        scope = original(fn)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch
