"""Triton's interpreter, without the work that it repeats."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Patch `triton.language` at the start of a launch only.

    The interpreter looks through it again at every call of a function within a kernel, although the launch
    has patched it and takes that back at its end: a third of the time of the kernels' tests.
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
