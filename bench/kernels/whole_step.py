"""Every kernel of a captured step, compiled for sm_90 without a GPU: `python -m bench.kernels.whole_step`.

`bench.kernels.compile` compiles kernels at sizes of its own choosing. Here the runner itself launches them,
on plain tensors of a model with one layer, so that argument types, alignments and constants are those that
serving has: what fails to compile there, or compiles anew from step to step, is seen here. With --jobs the
kernels go into Triton's cache side by side, and a server on the same host starts with a warm one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor

from bench.kernels.compile import compiling, report
from core.models import ModelSpec
from gpu.attention.device import AttentionOptions, PhasedAttention, attention_facts
from gpu.attention.triton_paged import TritonDecode, TritonPrefill
from gpu.build import spec_of
from gpu.kernels.decode import decode_config
from gpu.kernels.tuned import MoeConfigs, MoeShape
from gpu.kv.pool import KvPool
from gpu.layers import Linear
from gpu.ops.fused import Kernels
from gpu.sample.sampler import Sampler
from gpu.step.graphs import Work
from gpu.step.runner import GraphRunner, Machine, Shape
from gpu.thread import device_thread
from gpu.weights import load_model

CPU = torch.device("cpu")
PAGE = 16
PAGES = 64
PROCESSORS = 132
DEVICE = "NVIDIA H200"


class Share:
    """A launcher that runs every `of`-th piece of work, from `first` on, and nothing else."""

    def __init__(self, first: int = 0, of: int = 1) -> None:
        self._next, self._of = -first, of

    def capture(self, work: Work) -> Work:
        """See `gpu.step.graphs.Launcher`."""
        if self._next % self._of == 0:
            work()
        self._next += 1
        return work


def _product(self: Linear, x: Tensor) -> Tensor:
    return x.new_empty(len(x), len(self.weight))


def _wide(self: Linear, x: Tensor) -> Tensor:
    return torch.empty(len(x), len(self.weight))


@contextmanager
def _no_products() -> Iterator[None]:
    """Matrix products are a library's: they cost time here and say nothing."""
    with mock.patch.object(Linear, "__call__", _product), mock.patch.object(Linear, "wide", _wide):
        yield


def one_layer(model: Path) -> ModelSpec:
    """The model of a directory with a config.json, cut to one layer of each kind of attention."""
    spec = spec_of(model)
    windows = frozenset(layer for layer in spec.window_layers if layer < 2)
    return msgspec.structs.replace(spec, layers=2 if windows else 1, window_layers=windows)


def run_steps(spec: ModelSpec, sizes: tuple[int, int], options: AttentionOptions, share: Share) -> None:
    """Launch the share's part of what a server of `sizes` rows and tokens captures; within `compiling()`."""
    rows, tokens = sizes
    dtype: torch.dtype = getattr(torch, spec.dtype)
    facts = attention_facts(spec, PAGE, rows, dtype, CPU)
    decode = TritonDecode(facts, options, decode_config(spec.head_dim, spec.kv_heads, PROCESSORS))
    attention = PhasedAttention(TritonPrefill(facts, options), decode)
    moe = None
    if spec.moe is not None:
        name = spec.dtype
        shape = MoeShape(
            spec.moe.experts, spec.moe.intermediate, spec.hidden, spec.moe.per_token, name, DEVICE
        )
        moe = MoeConfigs(shape)
    machine = Machine(
        CPU, attention, lambda: share, lambda caches: Kernels(attention, caches, moe, options.pdl), options.pdl
    )
    runner = GraphRunner(
        Shape(rows, tokens, PAGES, PAGE, -(-spec.vocab_size // 32)),
        machine,
        Sampler(rows, spec.vocab_size, rows, CPU),
        (spec.hidden, dtype),
    )
    with device_thread(CPU), _no_products(), mock.patch("gpu.weights.load.fill_dummy"):
        runner.use_model(load_model(spec, None, dtype, CPU))
        pool = KvPool(spec.layers, PAGES, PAGE, (spec.kv_heads, spec.head_dim), dtype, CPU)
        runner.use_pool(pool)


def compile_share(model: Path, sizes: tuple[int, int], options: AttentionOptions, first: int, of: int) -> dict[str, str]:
    """A line for each kernel of a share, by the kernel's hash."""
    spec = one_layer(model)
    with compiling() as found:
        run_steps(spec, sizes, options, Share(first, of))
    kernels = {kernel.hash: kernel for kernel in found}
    return {name: report(model.name[:16], kernel) for name, kernel in kernels.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the steps of one or more models; says what was made of each kernel."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", nargs="+", type=Path, help="directories with a config.json")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cascade-rows", type=int, default=0)
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(argv)
    options = AttentionOptions(not asked.no_pdl, asked.cascade_rows)
    sizes = asked.rows, asked.tokens
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        for model in asked.models:
            began = time.monotonic()
            work = partial(compile_share, model, sizes, options, of=asked.jobs)
            lines: Any = pool.map(work, range(asked.jobs))
            every = {hash_: line for found in lines for hash_, line in found.items()}
            for line, count in sorted(Counter(every.values()).items()):
                print(f"{line}  x {count}" if count > 1 else line)
            print(f"{model}: {len(every)} kernels in {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
