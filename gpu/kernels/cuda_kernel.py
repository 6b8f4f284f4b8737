"""Compiles and launches kernels in CUDA C++, for what Triton cannot express: clusters of thread blocks that
write to each other's shared memory.

NVRTC compiles them on the machine that runs them, in a quarter of a second. It comes with torch, as do
NVIDIA's Python bindings (`cuda.bindings`).
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.kernels.jit import only_compiling

Argument = Tensor | int | float | None
"""An argument of a kernel: a pointer, a `long`, a `float`, a null pointer."""


class Blocks(NamedTuple):
    """`cluster` thread blocks along x are a cluster; each has `threads` threads and `shared` bytes of dynamic
    shared memory."""

    cluster: int
    threads: int
    shared: int


def lack() -> str:
    """Return why this machine cannot compile CUDA C++; empty if it can."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "NVIDIA's Python bindings are missing: pip install cuda-bindings"
    return ""


def compile_kernel(source: Path, constants: dict[str, int], capability: tuple[int, int]) -> bytes:
    """Return the machine code (cubin) of `source`, compiled with `constants` as macros. Raises `RuntimeError`
    with the compiler's log."""
    from cuda.bindings import nvrtc

    major, minor = capability
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    options += [f"-D{name}={value}".encode() for name, value in constants.items()]
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    try:
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if failed:
            text = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, text))
            raise RuntimeError(f"{source.name}: {text.decode(errors='replace').rstrip(chr(0))}")
        code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class CudaKernel:
    """The function `name` of machine code, on one GPU. Any thread whose device is that GPU may launch it."""

    def __init__(self, code: bytes, name: str, blocks: Blocks, device: torch.device) -> None:
        """Raises `RuntimeError` where the device is no GPU or cannot run such blocks."""
        if device.type != "cuda":
            raise RuntimeError(f"{name}: a {device.type} cannot run it.")
        from cuda.bindings import driver

        torch.cuda.current_stream(device)  # makes the device's context, if nothing has
        self._driver, self._blocks = driver, blocks
        library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()))
        gpu = _checked(
            driver.cuDeviceGet(torch.cuda.current_device() if device.index is None else device.index)
        )
        limits = driver.CUfunction_attribute
        for limit, value in (
            (limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, blocks.shared),
            (limits.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, int(blocks.cluster > 8)),
        ):
            _checked(driver.cuKernelSetAttribute(limit, value, kernel, gpu))
        self._function = driver.CUfunction(int(kernel))
        with torch.cuda.device(device):
            config = self._config((blocks.cluster, 1, 1), pdl=False)
            if not _checked(driver.cuOccupancyMaxActiveClusters(self._function, config)):
                raise RuntimeError(f"{name}: no cluster of {blocks} fits on this GPU.")

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument, pdl: bool = False) -> None:
        """Launch it on the current stream. `grid` counts thread blocks; `pdl`: programmatic dependent
        launch."""
        if only_compiling():
            return
        values, types = zip(*map(_argument, arguments), strict=True)
        _checked(self._driver.cuLaunchKernelEx(self._config(grid, pdl), self._function, (values, types), 0))

    def _config(self, grid: tuple[int, int, int], pdl: bool) -> Any:
        driver, (cluster, threads, shared) = self._driver, self._blocks
        ids = driver.CUlaunchAttributeID
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, torch.cuda.current_stream().cuda_stream
        grouped, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        grouped.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = grouped.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [grouped, dependent] if pdl else [grouped]
        config.numAttrs = len(config.attrs)
        return config


def _argument(value: Argument) -> tuple[Any, Any]:
    if isinstance(value, float):
        return value, ctypes.c_float
    if isinstance(value, int):
        return value, ctypes.c_int64
    return (0 if value is None else value.data_ptr()), ctypes.c_void_p


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a CUDA call without its status. Raises `RuntimeError` with an error's name."""
    error, *found = result
    if error:
        raise RuntimeError(f"CUDA: {error.name}")
    return found[0] if len(found) == 1 else tuple(found)
