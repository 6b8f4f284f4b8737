"""How many steps' tokens one event of a stream has, by the load of the event loop."""

from __future__ import annotations

MOST = 3
"""Steps. A fourth would be saved an eighth of the events that a third leaves."""

BUSY = 0.6
"""Share of a core from which events have the tokens of one step more. Above it requests that come in bursts
make the loop plan late: with two H100s, 1,024 clients and an event for each token it used 0.8 of a core, and
the GPUs waited for a tenth of the time."""

IDLE = 0.3
"""Share below which they have those of one less. An event is at most two thirds of the work that a token
makes: half as many never bring a busy loop from `BUSY` to here, so that it does not change to and fro."""


class StreamInterval:
    """Counts the CPU time of the event loop's thread between two measurements.

    An event takes the loop some 20 µs, of which sending it is the larger part; a further token in it takes
    less than two. So a loop that has too much to do sends fewer events, and the tokens come as fast.

    Owner: event loop.
    """

    def __init__(self, now: float, used: float) -> None:
        """`now` in seconds, and the CPU seconds that the thread has `used`."""
        self.steps = 1
        self._last = now, used

    def measure(self, now: float, used: float) -> int:
        """Steps of an event from now on."""
        passed, spent = now - self._last[0], used - self._last[1]
        self._last = now, used
        if spent > BUSY * passed:
            self.steps = min(self.steps + 1, MOST)
        elif spent < IDLE * passed:
            self.steps = max(self.steps - 1, 1)
        return self.steps
