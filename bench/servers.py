"""Servers of a measurement, and the time that it has. Shared by benches that compare servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.table import Server


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


@contextmanager
def serving(
    name: str, flags: Sequence[str], folder: Path, clock: Clock, module: str = "app"
) -> Iterator[str]:
    """A running server's address. Raises `RuntimeError` with the end of its log if it does not start."""
    log = folder / f"{name}.log"
    server = Server(list(flags), log, module)
    try:
        ready = server.wait_ready(max(clock.left(), 1.0))
        print(f"{name}: ready after {ready:.1f} s", flush=True)
        yield server.url
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{log.read_text()[-2000:]}") from error
    finally:
        server.stop()
