"""Servers that benches start, and the time that a bench has."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.tiny import free_port

SERVER = ("--device", "cuda", "--load-format", "dummy", "--context-length", "16384", "--max-running", "512")
"""Flags as the peers were started: random weights, context length 16,384, at most 512 running requests."""

_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """End this process, which holds a GPU, with its parent: killed by `timeout`, a bench runs no
    `finally`."""
    if sys.platform == "linux":
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)


def start(module: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """`python -m module` as a process that writes to `log`. It is killed when the calling thread ends: call
    it in the main one."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )


def post(url: str, fields: Mapping[str, Any], timeout: float) -> bytes:
    """The answer to `fields`, sent as JSON. Raises `OSError` for an error's status, and after `timeout`
    seconds of silence."""
    request = urllib.request.Request(url, msgspec.json.encode(fields), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return bytes(answer.read())


class Server:
    """`python -m app` as a process, or another `module` that takes its flags."""

    def __init__(self, flags: list[str], log: Path, module: str = "app") -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._begun = time.perf_counter()
        self._log = log
        self._process = start(module, ["--port", str(port), *flags], log)

    def wait_ready(self, timeout: float) -> float:
        """Seconds from start until `/health` is ok. Raises `RuntimeError` if the server ends before."""
        while time.perf_counter() - self._begun < timeout:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: see {self._log}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return self.age()
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or starting
            time.sleep(0.05)
        raise RuntimeError(f"not ready after {timeout:.0f} s: see {self._log}")

    def first_token(self) -> float:
        """Seconds from start to the first token of a request."""
        post(self.url + "/v1/completions", {"prompt": [1000] * 8, "max_tokens": 1}, 60)
        return self.age()

    def age(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._begun

    def stop(self) -> None:
        """Terminate the server, kill it after 30 s."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def serving(flags: Sequence[str], log: Path, seconds: float = 300, module: str = "app") -> Iterator[str]:
    """The address of a server that runs and writes to `log`. Raises `RuntimeError` with the end of its log
    if it is not ready within `seconds`."""
    server = Server(list(flags), log, module)
    try:
        ready = server.wait_ready(seconds)
        print(f"{log.stem}: ready after {ready:.1f} s", flush=True)
        yield server.url
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from error
    finally:
        server.stop()


class Clock:
    """The time box of a run and of each case in it."""

    def __init__(self, seconds: float, each: float) -> None:
        self._end, self._each = time.monotonic() + seconds, each

    def left(self) -> float:
        """Seconds until the run must end."""
        return self._end - time.monotonic()

    def share(self, part: float) -> Clock:
        """A deadline that is over when `part` of the time left has passed."""
        return Clock(self.left() * part, self._each)

    def case(self) -> Callable[[], float]:
        """A function that returns the seconds left to a case that begins now."""
        end = min(self._end, time.monotonic() + self._each)
        return lambda: end - time.monotonic()
