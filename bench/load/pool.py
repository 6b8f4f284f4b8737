"""The client processes of a run: starts them, shows their progress, collects their records."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
from tqdm import tqdm

from bench.load import worker
from bench.load.client import Target
from bench.load.prompts import Source
from bench.load.records import Record
from bench.load.worker import End, Ready, Tick, WorkerConfig
from bench.load.workloads import Workload

_GRACE = 0.05
"""Seconds between the start command and the start: longer than a message through a pipe takes."""


class Job(msgspec.Struct, frozen=True):
    """One workload, its target, and how it is run."""

    target: Target
    work: Workload
    model: str
    processes: int = 6
    warmup: int = 1


class Outcome(msgspec.Struct):
    """Results of the client processes."""

    records: list[Record]
    cpu: float
    """Busy share of one core, the highest of all client processes."""
    processes: int
    interrupted: bool = False
    lost: int = 0
    """Client processes that died; their requests are missing."""


class Pool:
    """Client processes of one run. Owner: the parent's main thread."""

    __slots__ = (
        "_began",
        "_context",
        "_counter",
        "_cpu",
        "_done",
        "_job",
        "_live",
        "_out",
        "_processes",
        "_ready",
        "_records",
    )

    def __init__(self, job: Job) -> None:
        self._job = job
        self._processes: list[BaseProcess] = []
        self._live: dict[Connection[Any, Any], int] = {}
        self._ready: set[int] = set()
        self._done: dict[int, int] = {}
        self._out: dict[int, int] = {}
        self._records: list[Record] = []
        self._cpu = 0.0
        self._began = 0.0
        # Unlike with fork, a spawned process inherits no event loop, lock or thread.
        self._context = multiprocessing.get_context("spawn")
        self._counter = self._context.Value("q", 0)  # the next request index, shared by all processes

    def run(self) -> Outcome:
        """Run the job to its end or to the first Ctrl-C, which returns the records so far."""
        work = self._job.work
        total = len(Source(work, self._job.model))
        count = max(1, min(self._job.processes, work.concurrency if _closed(work) else total))
        self._start(count)
        interrupted = False
        try:
            with tqdm(
                total=total * work.turns, desc=work.name, unit="req", disable=None, file=sys.stderr
            ) as bar:
                try:
                    self._watch(bar)
                except KeyboardInterrupt:
                    interrupted = True
                    self._broadcast(None)
                    self._watch(bar)
        finally:
            lost = self._finish()
        return Outcome(self._records, self._cpu, count, interrupted, lost)

    def _start(self, count: int) -> None:
        job = self._job
        # Ctrl-C in a terminal goes to all processes; only the parent handles it, the children inherit
        # SIG_IGN.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for number in range(count):
                parent_end, child_end = self._context.Pipe()
                config = WorkerConfig(job.target, job.work, job.model, number, count, job.warmup)
                arguments = (config, self._counter, child_end)
                process = self._context.Process(target=worker.main, args=arguments, daemon=True)
                process.start()
                child_end.close()  # so that the death of the child is an end of file
                self._processes.append(process)
                self._live[parent_end] = number
        finally:
            signal.signal(signal.SIGINT, before)

    def _watch(self, bar: tqdm[Any]) -> None:
        while self._live:
            for pipe in wait(list(self._live)):
                assert isinstance(pipe, Connection)
                try:
                    self._handle(pipe, pipe.recv())
                except (EOFError, OSError):  # the process died, perhaps in the middle of a message
                    self._live.pop(pipe)
            if not self._began and self._live and self._ready >= set(self._live.values()):
                self._began = time.perf_counter() + _GRACE
                self._broadcast(self._began)
            self._show(bar)

    def _show(self, bar: tqdm[Any]) -> None:
        if out := sum(self._out.values()):
            rate = out / (time.perf_counter() - self._began)
            bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
        bar.update(sum(self._done.values()) - bar.n)

    def _handle(self, pipe: Connection[Any, Any], message: Ready | Tick | End) -> None:
        number = self._live[pipe]
        match message:
            case Ready():
                self._ready.add(number)
            case Tick(done, out):
                self._done[number], self._out[number] = done, out
            case End(records, cpu):
                mine = msgspec.msgpack.decode(records, type=list[Record])
                self._records += mine
                self._done[number] = len(mine)
                self._cpu = max(self._cpu, cpu)
                del self._live[pipe]
                pipe.close()

    def _broadcast(self, command: float | None) -> None:
        for pipe in self._live:
            try:
                pipe.send(command)
            except BrokenPipeError:
                continue  # the process died; `_watch` reads the end of file

    def _finish(self) -> int:
        """Join all processes, terminate those that hang. Returns how many failed."""
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()
        return sum(process.exitcode != 0 for process in self._processes)


def _closed(work: Workload) -> bool:
    return work.rate == 0 and not (work.trace and work.trace_speed > 0)
