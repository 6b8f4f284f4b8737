"""Work on fixed addresses, launched as one: CUDA graphs, or plain calls where there are none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

_CAPTURING = threading.Lock()
"""One rank captures at a time: whether garbage is collected is one flag of the process."""

K = TypeVar("K", bound=Hashable)
Some = TypeVar("Some", contravariant=True)

Work = Callable[[], object]


class Launcher(Protocol):
    """Makes a replayable launch of work that reads and writes fixed addresses only."""

    def capture(self, work: Work, warm: Work) -> Work:
        """Run `warm`, which launches all that `work` does at least once, then return what repeats `work`."""
        ...


class Plain:
    """No graph: the work itself. A GPU with --no-cuda-graphs."""

    def capture(self, work: Work, warm: Work) -> Work:
        """See `Launcher.capture`. Warms up, so that kernels are compiled before a request needs them."""
        warm()
        return work


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage within: what is destroyed, an older graph say, may call the device, and a capture
    does not survive that."""
    held = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if held:
            gc.enable()


def collect_frozen() -> None:
    """Collect garbage also among the objects that the server froze at its start: a model whose parts refer to
    each other would keep its weights."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


class CudaGraphs:
    """All graphs share one memory pool: they run one at a time, and what one leaves in it no other reads.

    Capture the largest first: its allocations serve the smaller ones.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        make: Any = torch.cuda.Stream  # untyped
        self._stream = make()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Work, warm: Work) -> Work:
        """See `Launcher.capture`. Another thread may use the device meanwhile: only this thread's calls
        are recorded."""
        warm()  # compiles kernels and lets libraries choose theirs, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, no_collection(), torch.cuda.stream(self._stream):
            # Not torch.cuda.graph(): it collects garbage and empties the allocator around every capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        return graph.replay


class Launches(Generic[K]):
    """Captured work by key; `run(key)` itself where nothing is captured. Owner: launch thread."""

    def __init__(self, launcher: Launcher | None, run: Callable[[K], object]) -> None:
        """Without a launcher nothing is captured, and work is called."""
        self._launcher, self._run = launcher, run
        self._by_key: dict[K, Work] = {}

    def capture(self, key: K, warm: Work) -> None:
        """Capture the work of `key`; `warm` launches all that it does at least once."""
        assert self._launcher is not None, "nothing is captured here"
        self._by_key[key] = self._launcher.capture(partial(self._run, key), warm)

    def __getitem__(self, key: K) -> Work:
        return partial(self._run, key) if self._launcher is None else self._by_key[key]


class Launchable(Protocol[Some]):
    """`Launches`, to a stage that knows some of their keys."""

    def __getitem__(self, key: Some) -> Work: ...
