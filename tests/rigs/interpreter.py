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
    _patch_once()
    _call_directly()
    _remember_types()
    _unwrap_what_is_wrapped()
    _broadcast_what_differs()
    # The checks of overflows are computed, but only asserted with `debug`: a third of the kernel tests' time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once() -> None:
    """Patch `triton.language` for good.

    The interpreter patches it at every launch, and again at every call of a function within a kernel, and
    restores it each time: this took more than a third of the time of the kernel tests.
    """
    original = interpreter._patch_lang
    patched: set[ModuleType] = set()
    used: dict[str, set[ModuleType]] = {}  # by module of kernels

    def patch(fn: FunctionType) -> Any:
        modules = used.get(fn.__module__)
        if modules is None:
            modules = {each for each in fn.__globals__.values() if each is tl or each is tl.core}
            used[fn.__module__] = modules
        if not modules <= patched:
            patched.update(modules)
            original(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _call_directly() -> None:
    """A patched function of `triton.language` calls one that checks that it has what the patch gives it."""
    checks = tl.core.builtin(lambda: None).__code__

    def patch(
        owner: object, name: str, member: Any, builder: object, scope: interpreter._LangPatchScope
    ) -> None:
        function = member.__wrapped__ if member.__code__ is checks else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


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

    like = tl.block_type.with_element_ty
    alike: dict[tuple[str, str], tl.block_type] = {}

    def with_element_ty(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        key = self.name, scalar_ty.name
        if key not in alike:
            alike[key] = like(self, scalar_ty)
        return alike[key]

    tl.block_type.with_element_ty = with_element_ty

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

    equal_types: Callable[[tl.dtype, object], bool] = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal_types(self, other)

    semantic = interpreter.TritonSemantic
    make_computation = semantic.computation_type_impl
    computations: dict[tuple[str, bool, str, bool, bool], tl.dtype] = {}

    def computation_type(
        self: Any, a: tl.dtype, a_is_scalar: bool, b: tl.dtype, b_is_scalar: bool, div_or_mod: bool
    ) -> tl.dtype:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in computations:
            computations[key] = make_computation(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return computations[key]

    semantic.computation_type_impl = computation_type


def _unwrap_what_is_wrapped() -> None:
    """Every operand is compared with four types, one after another, of what may wrap a number."""
    unwrap = tl.core._unwrap_if_constexpr
    bare = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)}
    tl.core._unwrap_if_constexpr = lambda each: each if type(each) in bare else unwrap(each)


def _broadcast_what_differs() -> None:
    """Most operands have one shape: `triton.language` compares their sizes one by one, in slow numbers."""
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_different(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if _sizes(lhs) == _sizes(rhs):
            return lhs, rhs
        pair: tuple[tl.tensor, tl.tensor] = broadcast(self, lhs, rhs)
        return pair

    semantic.broadcast_impl_value = broadcast_different


def _sizes(tensor: tl.tensor) -> Any:
    return tensor.type.shape.values if tensor.type.is_block() else None
