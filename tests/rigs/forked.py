"""`python -m app`, and other modules that serve, in forks of one process that has imported it: a start that
imports torch and the rest again takes 2.9 s of CPU time, and the tests start four dozen."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from bench.chaos.tiny import ROOT

# Their parent process has one thread, imports, and computes nothing: no lock is held by a thread that a fork
# lacks, and OpenMP has no threads yet that it would wait for.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.rigs.preloaded"])


class Forked:
    """A running `python -m module`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, *arguments: str, stderr: Path, stdout: Path | None = None) -> None:
        self.args = module, *arguments
        self._process = _FORKS.Process(
            target=_run, args=(self.args, dict(os.environ), stdout, stderr), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has exited."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


def _run(command: tuple[str, ...], environment: dict[str, str], stdout: Path | None, stderr: Path) -> None:
    """Run the command as `python -m` does, in this environment, with its output in these files."""
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.chdir(ROOT)
    for number, path in ((1, stdout), (2, stderr)):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = command
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
