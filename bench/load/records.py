"""The measurements of one request, shared by client, report and plot."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """One request, measured.

    Times are seconds of `time.perf_counter`, which on Linux is one monotonic clock for all
    processes of a host: records of several client processes need no alignment.
    """

    index: int
    turn: int = 0
    planned: float = 0.0
    """When it should have been sent (open loop); `sent` is later if the client is too slow."""
    sent: float = 0.0
    end: float = 0.0
    """Arrival of `[DONE]`, or time of the failure."""
    times: list[float] = msgspec.field(default_factory=list)
    """Arrival of every event that carried a token, ascending."""
    out: int = 0
    prompt: int = 0
    cached: int | None = None
    """Prompt tokens from the cache; None: the server does not report it."""
    usage: bool = False
    """Whether the server sent usage; otherwise `out` counts events, and `prompt` is the requested length."""
    finish: str | None = None
    bad: str | None = None
    """Kind of failure; None on success."""
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from send to the first event with a token."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2e(self) -> float:
        """Seconds from send to the end of the stream."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two."""
        if not self.times or self.out < 2:
            return None
        return (self.end - self.times[0]) / (self.out - 1)
