"""What happens between steps: traces, new weights, memory given back and taken again; and beside them:
adapters read and copied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from core.command import BESIDE, Command, CommandDone
from core.errors import ConfigError, EngineFailed, LoomError, ModelError
from gpu.adapters.tiers import AdapterTiers
from gpu.kv.pool import KvPool
from gpu.models.base import CausalModel

log = logging.getLogger(__name__)

REFUSALS = (LoomError, OSError, RuntimeError, MemoryError)
"""What a command may fail with and be undone: files that cannot be read, memory that is not there."""

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a file raises whose fields or sizes contradict each other, where no check says so better."""


class Replaceable(Protocol):
    """What a runner lets others exchange between two steps."""

    def use_model(self, model: CausalModel | None) -> None:
        """Run this one from now on; None frees the weights. No step may come before `prepare`."""
        ...

    def use_pool(self, pool: KvPool | None) -> None:
        """Use this pool of pages from now on; None frees the pages. A new pool is empty."""
        ...

    def prepare(self) -> object:
        """Capture the launches of steps, where weights and pages are both there."""
        ...


class Maintenance:
    """Carries out commands. `load(path)` reads the checkpoint again, or another of the same shape;
    `make_pool()` allocates the pages. `both`: there is memory for a model beside the running one.

    Owner: launch thread.
    """

    def __init__(
        self,
        path: str,
        load: Callable[[str], CausalModel],
        make_pool: Callable[[], KvPool],
        both: bool = True,
        adapters: AdapterTiers | None = None,
        profiles: bool = True,
    ) -> None:
        """`profiles`: whether it records; the first of several ranks does, for the whole process."""
        self._both, self._adapters, self._profiles = both, adapters, profiles
        # One more than reads: a copy to the device does not wait for a file.
        self._threads = ThreadPoolExecutor(2, "loom-adapters")
        self._path = path
        self._load = load
        self._make_pool = make_pool
        self._profile: torch.profiler.profile | None = None

    def carry_out(self, command: Command, runner: Replaceable) -> CommandDone | Future[CommandDone]:
        """Do it, or say why not; then everything is as it was. Raises `EngineFailed` where it cannot be:
        no step may come then. The future is of what goes on beside the steps that follow."""
        if command.action not in BESIDE:
            return self._attempt(command, lambda: self._do(command, runner))
        started: list[Callable[[], None]] = []
        done = self._attempt(command, lambda: started.append(self._tiers().start(command)))
        return self._threads.submit(self._attempt, command, started[0]) if started else done

    def close(self) -> None:
        """Wait for what goes on beside the steps, and give the adapters' pinned memory back."""
        self._threads.shutdown(cancel_futures=True)
        if self._adapters is not None:
            self._adapters.close()

    def _attempt(self, command: Command, act: Callable[[], object]) -> CommandDone:
        try:
            act()
        except EngineFailed:
            raise
        except REFUSALS as error:
            return CommandDone(command.id, str(error))
        return CommandDone(command.id)

    def _do(self, command: Command, runner: Replaceable) -> None:
        match command.action:
            case "profile_start" | "profile_stop" if not self._profiles:
                pass
            case "profile_start":
                self._start_profile()
            case "profile_stop":
                self._stop_profile(command.path)
            case "load_weights":
                self._load_weights(command.path, runner)
            case "sleep":
                self._exchange(command, runner, awake=False)
            case "wake":
                self._exchange(command, runner, awake=True)
            case "adapter_drop":
                self._tiers().drop(command.adapter)

    def _tiers(self) -> AdapterTiers:
        if self._adapters is None:
            raise ConfigError("adapters need a server that was started with --enable-lora")
        return self._adapters

    def _read(self, path: str) -> CausalModel:
        """The model of a checkpoint. A damaged one is an error of its own, not of the engine."""
        try:
            model = self._load(path)
        except DAMAGED as error:
            log.warning("%s cannot be read", path, exc_info=True)
            raise ModelError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
        if self._adapters is not None:
            self._adapters.bind(model.adaptable)
        return model

    def _load_weights(self, path: str, runner: Replaceable) -> None:
        """Load the weights at `path`. Where memory allows, the new model is complete before the old one goes,
        and a bad file costs nothing. Otherwise the old one goes first. It is read again after a failure, and
        where steps of the new one cannot be captured."""
        gone, loaded = not self._both, None
        try:
            if gone:
                runner.use_model(None)
            loaded = self._read(path)
            gone = True
            runner.use_model(loaded)
            runner.prepare()
        except REFUSALS as refused:
            if gone:
                loaded = None  # or there would be two in memory
                self._restore(runner, refused)
            raise
        self._path = path

    def _restore(self, runner: Replaceable, refused: Exception) -> None:
        """The old weights again; nothing is left to run without them."""
        try:
            runner.use_model(None)
            runner.use_model(self._read(self._path))
            runner.prepare()
        except REFUSALS as lost:
            raise EngineFailed(
                f"The new weights were refused ({refused}), and the old ones could not be read again: {lost}"
            ) from lost

    def _exchange(self, command: Command, runner: Replaceable, awake: bool) -> None:
        """A `wake` that fails half way gives back what it took, and the runner sleeps as before."""
        try:
            if "weights" in command.tags:
                runner.use_model(self._read(self._path) if awake else None)
            if "kv_cache" in command.tags:
                runner.use_pool(self._make_pool() if awake else None)
            runner.prepare()
        except REFUSALS as failed:
            if not awake:
                raise EngineFailed(f"Memory could not be given back: {failed}") from failed
            self._exchange(command, runner, awake=False)
            raise
        torch.cuda.empty_cache()  # what was given up is for other processes, too; nothing without a GPU

    def _start_profile(self) -> None:
        if self._profile is not None:
            raise ConfigError("a profile is being recorded already: stop it first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile = profile

    def _stop_profile(self, path: str) -> None:
        if self._profile is None:
            raise ConfigError("no profile is being recorded: start one first")
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(path)
        if not Path(path).exists():  # torch only prints why
            Path(f"{path}.tmp").unlink(missing_ok=True)
            raise OSError(f"{path} could not be written: is the disk full?")
