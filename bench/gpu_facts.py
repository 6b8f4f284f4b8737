"""Checks of a GPU host, one line each: `python -m bench.gpu_facts`.

What captured steps rely on: kernels that read and write pinned host memory inside a replayed graph, dependent
launch (PDL) whose writes are visible two kernels later, GEMMs with float32 output under capture, replay from
another thread. A FAILED line names the feature to switch off.
"""

from __future__ import annotations

import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from gpu.kernels.jit import begin, jit, options

DEVICE = torch.device("cuda")
NEEDED = (
    "numpy msgspec safetensors tokenizers transformers jinja2 aiohttp uvloop llguidance xgrammar google-re2 "
    "gguf tqdm pytest pytest-asyncio flashinfer-python"
)
ROUNDS = 2000
_cuda: Any = torch.cuda  # parts of it are untyped


@jit
def _echo(ring: tl.tensor, cursor: tl.tensor, out: tl.tensor, WORDS: tl.constexpr, PDL: tl.constexpr) -> None:
    begin(PDL)
    turn = tl.load(cursor)
    i = tl.arange(0, WORDS)
    tl.store(out + (turn % 4) * WORDS + i, tl.load(ring + (turn % 4) * WORDS + i) + 1)
    tl.debug_barrier()
    tl.store(cursor, turn + 1)


@jit
def _slow_add(x: tl.tensor, y: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """out = x + y + 1, slowly: dependent kernels that do not wait would read the old values."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    value = tl.load(x + at) + tl.load(y + at)
    for _ in range(32):
        value = value * 1.0000001
    tl.store(out + at, (value + 1.5).to(tl.int32).to(tl.float32))


def _captured(work: Callable[[], Any]) -> Any:
    """A graph of `work`, captured after one warm-up."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def host() -> str:
    """Versions, and missing packages."""
    missing = []
    for name in NEEDED.split():
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return (
        f"{found.name} {found.major}.{found.minor}, {found.multi_processor_count} processors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; python {platform.python_version()}, torch "
        f"{torch.__version__}, triton {triton.__version__}; missing: {' '.join(missing) or 'nothing'}"
    )


def shared_memory(pdl: bool) -> str:
    """Input and output through pinned rings, as in `gpu.step.rings`, replayed from another thread."""
    words = 1024
    ring, out = (torch.zeros(4, words, dtype=torch.int32).pin_memory() for _ in range(2))
    cursor = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def work() -> None:
        _echo[(1,)](ring, cursor, out, words, pdl, **options(4, pdl=pdl))

    graph = _captured(work)
    cursor.zero_()
    inputs, outputs = ring.numpy(), out.numpy()
    stale, spans = 0, []

    def run() -> None:
        nonlocal stale
        with torch.inference_mode(), torch.cuda.device(DEVICE):
            for turn in range(ROUNDS):
                began = time.perf_counter()
                inputs[turn % 4] = turn * 7
                graph.replay()
                event = _cuda.Event(enable_timing=True, blocking=True)
                event.record()
                event.synchronize()
                stale += int(not np.all(outputs[turn % 4] == turn * 7 + 1))
                spans.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(spans) == ROUNDS, "the replaying thread died"
    assert not stale, f"{stale} of {ROUNDS} inputs or outputs were stale"
    return f"{1e6 * statistics.median(spans):.0f} µs round trip, including a blocking event"


def dependent_launch() -> str:
    """Each kernel reads the outputs of the last two kernels; some are followed by a GEMM."""
    size, block = 2**22, 1024
    buffers = [torch.zeros(size, device=DEVICE) for _ in range(3)]
    left, right = (torch.randn(512, 512, device=DEVICE).bfloat16() for _ in range(2))

    def chain(pdl: bool, small: bool) -> None:
        for i in range(30):
            x, y, out = buffers[i % 3], buffers[(i + 1) % 3], buffers[(i + 2) % 3]
            grid = 64 if small else size // block
            _slow_add[(grid,)](x, y, out, block, pdl, **options(4, pdl=pdl))
            if i % 7 == 3:
                torch.mm(left, right)

    def result(graph: Any) -> list[torch.Tensor]:
        for buffer in buffers:
            buffer.zero_()
        buffers[0].add_(1e-3)
        graph.replay()
        torch.cuda.synchronize()
        return [buffer.clone() for buffer in buffers]

    times = []
    for small in (False, True):
        graphs = [_captured(partial(chain, pdl, small)) for pdl in (False, True)]
        expected = result(graphs[0])
        wrong = sum(not all(map(torch.equal, expected, result(graphs[1]))) for _ in range(200))
        assert not wrong, f"{wrong} of 200 chains differ: PDL must be off (gpu/cuda.py: HOPPER)"
        spans = [_replay_us(graph) / 30 for graph in graphs]
        times.append(f"{spans[0]:.2f} -> {spans[1]:.2f} µs")
    return f"large kernel {times[0]}, small kernel {times[1]} (without -> with PDL)"


def _replay_us(graph: Any, times: int = 50) -> float:
    marks = [_cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(times):
        graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) * 1e3 / times


def products() -> str:
    """Torch operations inside graphs: a GEMM with float32 output, index_select by int32."""
    x, w = (torch.randn(n, 2048, device=DEVICE).bfloat16() for n in (33, 5000))
    rows = torch.tensor([5, 0, 32, 7], dtype=torch.int32, device=DEVICE)
    selected, logits = x.new_zeros(64, 2048), torch.zeros(4, 5000, device=DEVICE)

    def work() -> None:
        torch.index_select(x, 0, rows, out=selected[:4])
        logits.copy_(torch.mm(selected[:4], w.t(), out_dtype=torch.float32))

    graph = _captured(work)
    logits.zero_()
    graph.replay()
    expected = x[rows.long()].double() @ w.double().t()
    error = float((logits - expected).norm() / expected.norm())
    assert error < 1e-5, f"relative error {error:.1e}: the GEMM output was rounded"
    return f"float32 accumulation, relative error {error:.1e}"


def waiting() -> str:
    """Latency until a thread knows that the device is done: with a blocking event and with spinning."""
    x = torch.randn(4096, 4096, device=DEVICE)
    found = []
    for blocking in (True, False):
        late = []
        for _ in range(50):
            first, last = (_cuda.Event(enable_timing=True, blocking=blocking) for _ in range(2))
            torch.cuda.synchronize()
            first.record()
            began = time.perf_counter()
            x @ x
            last.record()
            last.synchronize()
            late.append(1e6 * (time.perf_counter() - began) - 1e3 * float(first.elapsed_time(last)))
        found.append(statistics.median(late))
    return f"{found[0]:.0f} µs blocking, {found[1]:.0f} µs spinning, including launches"


CHECKS: dict[str, Callable[[], str]] = {
    "host": host,
    "torch in graphs": products,
    "pinned rings": partial(shared_memory, False),
    "pinned rings, PDL": partial(shared_memory, True),
    "dependent launch": dependent_launch,
    "waiting": waiting,
}


def main() -> int:
    """Print all checks; the exit code is the number of failures."""
    failed = 0
    for name, check in CHECKS.items():
        try:
            with torch.inference_mode():  # as in the server
                said = check()
        except (RuntimeError, AssertionError, TypeError, ValueError, TritonError) as error:
            failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error)[:400]}"
        print(f"{name:18} {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
