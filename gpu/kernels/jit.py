"""What every kernel file starts with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from core.env import usable_cpus

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run in Triton's interpreter, which knows no inline assembly."""

_AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)
_ONE = threading.Lock()
"""Held while compiling: replicas have equal kernels, which all but the first find in Triton's cache."""


def _kernel(kernel: Any) -> Any:
    """Return `kernel`; a call within `compiled_ahead` compiles it and does not launch it."""

    def run(*args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return type(kernel).run(kernel, *args, grid=grid, warmup=warmup or _AHEAD.get(), **options)

    if not INTERPRETED:
        kernel.run = run
    return kernel


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, typed: its own stubs would make every decorated function untyped."""
    return _kernel(triton.jit(function))


def jit_loose(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, where `names` are integers that change from step to step. Others are compiled anew whenever
    they become 1 or change in whether 16 divides them, which must not happen while serving."""
    return lambda function: _kernel(triton.jit(function, do_not_specialize=list(names)))


def only_compiling() -> bool:
    """Return whether this thread is within `compiled_ahead`. A kernel of another library must not be launched
    then if it reads indices that one of ours writes."""
    return _AHEAD.get()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Compile the kernels that this thread calls within the context, in parallel; it ends when all are
    compiled. None is launched, so the tensors that they would have written hold arbitrary values.

    Triton compiles a kernel where it is launched first, one after the other. Its compiler holds the GIL for
    a small part of that time. An error is raised where the kernel is launched.
    """
    with (
        _ONE,
        ThreadPoolExecutor(usable_cpus()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        ahead = _AHEAD.set(True)
        try:
            yield
        finally:
            _AHEAD.reset(ahead)


@jit
def begin(PDL: tl.constexpr) -> None:
    """First line of a kernel: under programmatic dependent launch, wait for the previous kernels.

    The dependents are launched at once: they run only to their own wait until this kernel has ended, and
    their blocks are then already resident, which hides the launch.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@jit
def launch_dependents(PDL: tl.constexpr) -> None:
    """First line of a kernel that works before the previous kernel has ended; others call `begin`. Data that
    was written before the previous kernel began may be read at once, past L1; what the previous kernel
    writes, only after `wait`."""
    if PDL:
        gdc_launch_dependents()


@jit
def wait(PDL: tl.constexpr) -> None:
    """The previous kernels have ended from here on."""
    if PDL:
        gdc_wait()


@jit
def padding(row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Whether `row` is padding: `num_rows` points to the count of true rows, None where all are true."""
    return row < 0 if num_rows is None else row >= tl.load(num_rows)


@jit
def true_rows(num_rows: tl.tensor, rows: int) -> tl.tensor:
    """How many of `rows` rows are true, by `num_rows` as in `padding`."""
    n = rows
    if num_rows is not None:
        n = tl.minimum(tl.load(num_rows).to(tl.int32), rows)
    return n


@jit
def add_pairs(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Combines pairs for `tl.reduce`: sums of two tensors at once."""
    return a + c, b + d


@jit
def load_record(at: tl.tensor, COUNT: tl.constexpr, CACHE: tl.constexpr) -> tl.tensor:
    """A tuple of `COUNT` numbers from `at` on, loaded with the cache modifier CACHE."""
    found: tl.tensor = ()
    for i in tl.static_range(COUNT):
        found += (tl.load(at + i, cache_modifier=CACHE),)
    return found


@jit
def store_record(at: tl.tensor, record: tl.tensor, mask: tl.tensor) -> None:
    """Store the tuple `record`, each of its tensors one behind the other from `at` on."""
    for i in tl.static_range(len(record)):
        tl.store(at + i, record[i], mask=mask)


def options(warps: int, stages: int = 3, pdl: bool = False) -> dict[str, Any]:
    """Launch options. The interpreter knows no PDL, so it is named only when it is wanted."""
    found: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if pdl:
        found["launch_pdl"] = True
    return found


def launch_options(pdl: bool, warps: int, stages: int = 3) -> dict[str, Any]:
    """`options` of a kernel that starts with `begin`, and its `PDL`."""
    return {"PDL": pdl, **options(warps, stages, pdl)}


def pow2(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pow2_divisor(n: int) -> int:
    """The largest power of two that divides `n`."""
    return n & -n


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)
