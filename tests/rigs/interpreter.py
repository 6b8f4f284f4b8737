"""Speeds up Triton's interpreter: its arithmetic is numpy's, most of its time goes into types and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the interpreter. Nothing that it computes changes, only how often it computes the same again."""
    _patch_once()
    _call_directly()
    _remember_types()
    _unwrap_what_is_wrapped()
    _broadcast_what_differs()
    _check_operands_once()
    _make_handles()
    _make_masks_once()
    _reduce_slices()
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
    tensors: dict[str, tuple[Any, Any, tl.dtype]] = {}

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        found = tensors.get(type.name)
        if found is None:
            make_tensor(self, handle, type)
            found = tensors[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = found

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
    # A constant less a tensor is a constant that holds a tensor, which Triton 3.7 does not take as one.
    subtract = tl.constexpr.__sub__

    def subtract_unwrapped(self: tl.constexpr, other: Any) -> Any:
        made = subtract(self, other)
        return made.value if type(made.value) is tl.tensor else made

    tl.constexpr.__sub__ = subtract_unwrapped


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


def _check_operands_once() -> None:
    """Check operands once for each kind: what two of them become before they are added, compared and so on
    depends on their types, and on the value of a number. Sizes are not made alike: numpy does that as it
    computes."""
    semantic = interpreter.TritonSemantic
    check = semantic.binary_op_type_checking_impl
    plans: dict[tuple[Any, ...], tuple[_Operand, _Operand]] = {}

    def check_operands(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        key = _kind(lhs), _kind(rhs), options, *named.items()
        if key not in plans:
            left, right = check(self, lhs, rhs, *options, **named)
            plans[key] = _Operand(lhs, left), _Operand(rhs, right)
        one, other = plans[key]
        return one.of(lhs, self), other.of(rhs, self)

    semantic.binary_op_type_checking_impl = check_operands


def _kind(operand: Any) -> Any:
    """The type of a tensor, of a number also its value; there are two zeros, which are equal."""
    if type(operand) is tl.tensor:
        return operand.type.name
    return type(operand), operand or str(operand)


class _Operand:
    """The conversion of operands of one kind. `number`: the handle of a number; `stays`: nothing changes."""

    def __init__(self, operand: Any, made: tl.tensor) -> None:
        self.type, self.number = made.type, None
        self.stays = type(operand) is tl.tensor and operand.type.name == made.type.name
        if type(operand) is not tl.tensor:
            data = made.handle.data.reshape(-1)[:1].copy()
            data.setflags(write=False)  # of all that are like it
            self.number = interpreter.TensorHandle(data, made.handle.dtype)

    def of(self, operand: Any, semantic: Any) -> Any:
        """The converted operand."""
        if self.stays:
            return operand
        handle = semantic.cast(operand, self.type.scalar).handle if self.number is None else self.number
        return semantic.tensor(handle, self.type)


def _make_handles() -> None:
    """Each is checked for whether numpy's elements fit those of Triton."""
    check = interpreter.TensorHandle.__post_init__
    fitting: set[tuple[int, str]] = set()

    def init(self: Any, data: Any, dtype: tl.dtype) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        sizes = data.itemsize, dtype.name
        if sizes not in fitting:
            check(self)
            fitting.add(sizes)

    interpreter.TensorHandle.__init__ = init


def _make_masks_once() -> None:
    """Reuse the masks and the zeros that the interpreter makes for loads without `mask` or `other`. Also
    expand dimensions by indexing, which is faster than `np.expand_dims`."""
    builder = interpreter.InterpreterBuilder

    @cache
    def full(shape: tuple[int, ...], value: int, dtype: Any) -> Any:
        array = np.full(shape, value, dtype)
        array.setflags(write=False)
        return array

    # `options`: how to cache and whether it is volatile, in as many arguments as the version of Triton has.
    def load(self: Any, ptr: Any, *options: Any, **named: Any) -> Any:
        mask = interpreter.TensorHandle(full(ptr.data.shape, 1, np.bool_), tl.int1)
        return self.create_masked_load(ptr, mask, None, *options, **named)

    masked_load = builder.create_masked_load

    def load_masked(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        if other is None:
            dtype = ptrs.get_element_ty()
            zeros = full(ptrs.data.shape, 0, interpreter._get_np_dtype(dtype))
            other = interpreter.TensorHandle(zeros, dtype)
        return masked_load(self, ptrs, mask, other, *options, **named)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        data = arg.data[(*(slice(None),) * axis, None)]
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    builder.create_load, builder.create_masked_load = load, load_masked
    builder.create_expand_dims = expand_dims


def _reduce_slices() -> None:
    """The interpreter reduces element by element with what is no sum or maximum: here all along the other
    axes at once, in the same order."""
    ops = interpreter.ReduceOps
    by_element = ops.generic_reduce

    def reduce(self: Any, input: tuple[tl.tensor, ...]) -> Any:
        if self.axis is None or input[0].handle.data.ndim == 1:
            return by_element(self, input)
        slices = [
            [self.to_tensor(part, each.dtype) for part in np.moveaxis(each.handle.data, self.axis, 0)]
            for each in input
        ]
        found = tuple(each[0] for each in slices)
        for parts in zip(*(each[1:] for each in slices), strict=True):
            made = self.combine_fn.fn(*found, *parts)
            found = made if isinstance(made, tuple) else (made,)
        arrays = (each.handle.data for each in found)
        if self.keep_dims:
            arrays = (np.expand_dims(each, self.axis) for each in arrays)
        return [self.to_tensor(array, each.dtype) for array, each in zip(arrays, input, strict=True)]

    ops.generic_reduce = reduce
