"""How long a request will wait for its first token."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import exp
from typing import Final, NamedTuple

from core.schedule.callers import Callers

MEMORY: Final = 3.0
"""Time constant in seconds of the average rate: longer than pages and slots take to become free, shorter than
changes of the load. A measurement that comes later than this after the last one replaces the average."""
LATE: Final = 0.02
"""Fraction of recent forecasts that may have been too short."""
MARGIN: Final = 1.1
"""Safety factor on the corrected forecasts: under overload nearly all requests that are taken are at the
limit, and come late together when the device is a few percent slower than in the last seconds. A shorter
queue serves as many."""
LONGEST: Final = 600.0
"""Maximum of a forecast in seconds. While no prompt token is computed, since long answers have all slots, the
rate falls towards 0."""
UNPROVEN: Final = 1.5
"""Factor on forecasts before the first one could be checked."""
COMPARED: Final = 256
"""Number of recent forecasts that are compared with the measured times."""
NEAR: Final = 0.5
"""Share of the limit from which on a forecast is compared: to be wrong on short waits refuses nobody, and
they are longer than their tokens say, by the steps in flight."""


class _Planned(NamedTuple):
    """A step in flight: when it was planned, its prompt tokens, and whether prompts were left."""

    at: float
    tokens: int
    more: bool


class QueueTime:
    """Forecasts the first token from prompt tokens before it and the rate at which they are computed.

    The rate is that of steps behind which prompts are left, by the time between results: whatever holds
    prompts back is in it, decode rows, taken slots and pages as well. Steps that take all prompts could have
    taken more: they can only raise it. Before the first prompt was left nothing is known, and nothing is
    refused.

    What that leaves out, retractions, turns of callers who come later, slots that become free by chance, is
    corrected by what came of the last forecasts: all but `LATE` of them, multiplied by the factor, would have
    been long enough.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._steps = 0.0
        """Exponentially decaying sums over steps."""
        self._known_at = 0.0
        self._compared: deque[float] = deque(maxlen=COMPARED)
        self._factor = UNPROVEN
        self._last = 0.0
        self._flights: deque[_Planned] = deque()

    def forecast(self, tokens: int) -> float:
        """Seconds until `tokens` more prompt tokens are computed; 0 if the rate is not known yet."""
        if not self._tokens:
            return 0.0
        tokens += sum(flight.tokens for flight in self._flights)
        return min(self._seconds * (1.0 / self._steps + tokens / self._tokens), LONGEST)

    def corrected(self, seconds: float) -> float:
        """A forecast, corrected by the errors of earlier ones."""
        return self._factor * seconds

    def planned(self, now: float, tokens: int, more: bool) -> None:
        """A step was planned with `tokens` prompt tokens. `more`: further prompts wait."""
        self._flights.append(_Planned(now, tokens, more))

    def came(self, now: float) -> None:
        """The oldest step in flight has ended."""
        at, tokens, more = self._flights.popleft()
        seconds, self._last = now - max(at, self._last), now
        if more or tokens * self._seconds > seconds * self._tokens:
            fading = exp(-seconds / MEMORY) if now - self._known_at < MEMORY else 0.0
            self._tokens = max(self._tokens * fading + tokens, min(self._tokens, 1.0))  # 0 is not known
            self._seconds = self._seconds * fading + seconds
            self._steps = self._steps * fading + 1.0
            self._known_at = now

    def learn(self, expected: float, limit: float, took: float) -> None:
        """A first token took `took` seconds; its forecast was `expected`, and `limit` its target."""
        if expected >= NEAR * limit:
            self._compared.append(took / expected)
            worst = sorted(self._compared)[int(len(self._compared) * (1.0 - LATE))]
            self._factor = MARGIN * max(worst, 1.0)


def tokens_before(line: Mapping[str, int], caller: str, tokens: int, callers: Callers | None) -> int:
    """Prompt tokens that are computed until a caller's next prompt of `tokens` has ended, with it. `line` has
    those that wait, by caller. `callers`: these take turns; None: all that wait are before it."""
    own = line.get(caller, 0) + tokens
    others = {other: waiting for other, waiting in line.items() if other != caller}
    if callers is None:
        return own + sum(others.values())
    end = callers.standing(caller) + own
    return own + sum(min(waiting, max(int(end - callers.served(o)), 0)) for o, waiting in others.items())
