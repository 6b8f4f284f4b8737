"""Speeds up Triton's interpreter: its arithmetic is numpy's, most of its time goes into types and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the interpreter. Nothing that it computes changes, only how often it computes the same again."""
    _patch_once_a_launch()
    _remember_types()
    # The checks of overflows are computed, but only asserted with `debug`: a third of the kernel tests' time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """Patch `triton.language` only at the start of a launch.

    The interpreter patches it again at every call of a function within a kernel, although the launch has
    patched it already: this took a third of the time of the kernel tests.
    """
    original = interpreter._patch_lang
    patched: set[ModuleType] = set()
    used: dict[str, set[ModuleType]] = {}  # by module of kernels

    def patch(fn: FunctionType) -> Any:
        modules = used.get(fn.__module__)
        if modules is None:
            modules = {each for each in fn.__globals__.values() if each is tl or each is tl.core}
            used[fn.__module__] = modules
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


def _remember_types() -> None:
    """Every operation makes the types of its results anew. A type's name says all that they depend on."""
    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def get_np_dtype(dtype: tl.dtype) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._get_np_dtype = get_np_dtype

    make_block = tl.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    tl.block_type.__init__ = init_block

    make_tensor: Callable[[tl.tensor, Any, tl.dtype], None] = tl.tensor.__init__
    tensors: dict[str, dict[str, Any]] = {}

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        if type.name not in tensors:
            make_tensor(self, None, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle)

    tl.tensor.__init__ = init_tensor

    equal: Callable[[tl.tuple, object], Any] = tl.tuple.__eq__

    def equal_sizes(self: tl.tuple, other: object) -> Any:
        return self.values == other if isinstance(other, list) else equal(self, other)

    tl.tuple.__eq__ = equal_sizes
