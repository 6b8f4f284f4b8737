"""Compiles every kernel of a captured step for sm_90 without a GPU: `python -m bench.kernels.whole_step`.

Unlike in `bench.kernels.compile` the runner launches the kernels, on CPU tensors of a model with one layer,
so that argument types, alignments and constants are those of serving. This shows compile errors, and kernels
that are compiled again from step to step. --jobs compiles in parallel into Triton's cache, which a server on
the same host then uses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import torch
from torch import Tensor

from bench.kernels.compile import compiling, report
from core.models import Fp8, ModelSpec
from gpu.attention.backend import attention_config
from gpu.attention.selector import PhasedAttention
from gpu.attention.triton_paged import TritonDecode, TritonPrefill
from gpu.build import spec_of
from gpu.cuda import MAX_CHUNKS
from gpu.device import HOPPER, CudaFacts
from gpu.kernels.gemm.skinny import split_k_counters
from gpu.kernels.moe.tuned import MoeConfigs, MoeShape, weight_name
from gpu.kernels.sampling import kernels as triton_kernels
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.layers import Linear
from gpu.layers.moe import expert_scales
from gpu.ops.fused import Kernels, TritonOps
from gpu.runner import Machine, ModelRunner, Shape
from gpu.state.entry import CASCADE_ROWS
from gpu.state.view import StepView
from gpu.step.buffers import HiddenShape
from gpu.step.graphs import Work
from gpu.step.steps import PaddedSizes
from gpu.thread import device_thread
from gpu.weights import load_model

CPU = torch.device("cpu")
PAGES = 64
DEVICE = CudaFacts("", "NVIDIA H200", HOPPER, 132)

FP8_KINDS: dict[str, Fp8] = {"none": "", "fp8": "rows", "fp8-blocks": "blocks"}
"""By --quantization."""


class PartLauncher:
    """A launcher that runs every `of`-th piece of work, from `first` on."""

    def __init__(self, first: int = 0, of: int = 1) -> None:
        self._next, self._of = -first, of

    def capture(self, work: Work, warm: Work) -> Work:
        """See `gpu.step.graphs.Launcher`."""
        if self._next % self._of == 0:
            warm()
        self._next += 1
        return work


def _cublas_gemm(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _cublas_fp8_gemm(x: Tensor, rows: Tensor, weight: Tensor, *others: object) -> Tensor:
    """The GEMM after quantisation."""
    dtype = others[-1]
    assert isinstance(dtype, torch.dtype)
    return torch.empty(len(x), len(weight), dtype=dtype)


def _to_float32(self: Linear, x: Tensor) -> Tensor:
    return torch.empty(len(x), len(self.matrix.weight))


@contextmanager
def _no_library_gemms() -> Iterator[None]:
    """Skip GEMMs of libraries, which are not compiled here."""
    with (
        mock.patch.object(Linear, "seal", lambda self: None),  # a GPU's weights are not packed
        mock.patch.object(Linear, "to_float32", _to_float32),
        mock.patch("gpu.ops.fused.cublas_gemm", _cublas_gemm),
        mock.patch("gpu.ops.fp8.cublas_fp8_gemm", _cublas_fp8_gemm),
    ):
        yield


class Steps(NamedTuple):
    """Sizes and options of the server."""

    rows: int
    tokens: int
    page: int
    pdl: bool
    cascade_rows: int
    kv: torch.dtype | None = None
    """Dtype of the KV pages; None: the model's."""


def cut(model: Path, layers: int, dtype: str, fp8: Fp8) -> ModelSpec:
    """A spec with the first layers of a model; `model` is a directory with a config.json."""
    spec = spec_of(model)
    windows = frozenset(layer for layer in spec.window_layers if layer < layers)
    dtype = dtype or spec.dtype
    return msgspec.structs.replace(spec, layers=layers, window_layers=windows, dtype=dtype, fp8=fp8)


def launch_all(spec: ModelSpec, steps: Steps, launcher: PartLauncher) -> None:
    """Launch the launcher's part of the graphs that such a server captures, and its other kernels; within
    `compiling()`."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    rows, tokens, page, pdl, cascade_rows, kept = steps
    config = attention_config(spec, page, rows, dtype, CPU, DEVICE)
    config = config._replace(pdl=pdl, cascade_rows=cascade_rows, kv_scales=(1.0, 1.0) if kept else None)
    attention = PhasedAttention(TritonPrefill(config), TritonDecode(config))
    moe = None
    if (experts := spec.moe) is not None:
        sizes = experts.experts, experts.intermediate, spec.hidden, experts.per_token
        held = spec.fp8 if expert_scales(spec, experts) else ""
        moe = MoeConfigs(MoeShape(*sizes, weight_name(held, spec.dtype), DEVICE.name))

    def ops(pool: KvPool) -> Callable[[StepView], TritonOps]:
        counters = split_k_counters(CPU) if pdl else None
        kernels = Kernels(attention, pool.caches(), moe, pdl, config.kv_scales, counters)
        return lambda view: TritonOps(view, kernels)

    chunks = min(rows, MAX_CHUNKS)
    padded = PaddedSizes(rows, tokens, chunks)
    machine = Machine(CPU, padded, lambda: launcher, attention, ops, begin_step, triton_kernels, pdl)
    shape = Shape(rows, tokens, chunks, PAGES, page, spec.vocab_size, HiddenShape(spec.hidden, dtype))
    runner = ModelRunner(shape, machine, shape.entries(CPU))
    with device_thread(CPU), _no_library_gemms(), mock.patch("gpu.weights.load.fill_dummy"):
        runner.use_model(load_model(spec, None, dtype, CPU))
        heads = (spec.kv_heads, spec.head_dim)
        runner.use_pool(KvPool(spec.layers, PAGES, page, heads, kept or dtype, CPU))
        runner.prepare()


def compile_part(spec: ModelSpec, steps: Steps, first: int, of: int) -> dict[str, str]:
    """A line for each kernel of a part, by the hash of the kernel."""
    with compiling() as found:
        launch_all(spec, steps, PartLauncher(first, of))
    kernels = {kernel.hash: kernel for kernel in found}
    return {name: report(spec.architecture[:16], kernel) for name, kernel in kernels.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the steps of models and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", nargs="+", type=Path, help="directories with a config.json")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--cascade-rows", type=int, default=CASCADE_ROWS)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--dtype", default="", help="the model's own by default")
    parser.add_argument("--quantization", default="none", choices=FP8_KINDS)
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    kept = torch.float8_e4m3fn if args.kv_dtype == "fp8" else None
    steps = Steps(args.rows, args.tokens, args.page, not args.no_pdl, args.cascade_rows, kept)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for model in args.models:
            began = time.monotonic()
            spec = cut(model, args.layers, args.dtype, FP8_KINDS[args.quantization])
            work = partial(compile_part, spec, steps, of=args.jobs)
            every = {name: line for found in pool.map(work, range(args.jobs)) for name, line in found.items()}
            for line, count in sorted(Counter(every.values()).items()):
                print(f"{line}  x {count}" if count > 1 else line)
            print(f"{model}: {len(every)} kernels in {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
