"""Fair scheduling: the tokens that were served to each caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from core.request import Request

OUTPUT_WEIGHT: Final = 2.0
"""Weight of an output token, in prompt tokens, as in the paper: a decode row costs more than a token of a
prefill chunk."""
SHARED_CHUNK: Final = 1024
"""Prompt tokens of a step while callers share the device. Another's prompt waits for the step in flight, so
this is the length from which on its first token takes at most twice as long as alone. Chunks of 1,024 tokens
had 9.9% less throughput than chunks of 8,192 (8B)."""
HEAD_START: Final = 2.0 * SHARED_CHUNK
"""Tokens of credit for a caller that returns after a pause. A prompt of a few thousand tokens that alternates
with another caller's takes twice as long, and 10% more for the shorter chunks; the credit makes up for it."""
LINGER: Final = 10.0
"""Seconds for which a caller without requests still counts as active: most read the answer and ask again."""

_caller = attrgetter("caller")


class Callers:
    """Counts the tokens that were served to each caller: an API key, or whoever sends none.

    Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. The caller
    with the lowest counter goes first, so that callers with a constant backlog get equal shares, and what one
    does not use goes to the others. A returning caller's counter is raised to the lowest active one less
    `HEAD_START`, so that idle time is not saved up. All counters are reset when no requests are left.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._here: dict[str, int] = {}
        """Number of requests that wait or run, by caller."""
        self._shared_until = 0.0

    @property
    def several(self) -> bool:
        """Whether more than one caller has requests."""
        return len(self._here) > 1

    def share(self, now: float) -> bool:
        """Whether more than one caller has requests here, or had some lately."""
        return len(self._here) > 1 or now < self._shared_until

    def served(self, caller: str) -> float:
        """Weighted tokens that the caller was served, for comparison: the lowest goes first."""
        return self._served[caller]

    def standing(self, caller: str) -> float:
        """The counter that a caller without requests would start with."""
        if not self._here or caller in self._here:
            return self._served[caller] if self._here else 0.0
        least = min(map(self._served.__getitem__, self._here))
        return max(self._served.get(caller, 0.0), least - HEAD_START)

    def enter(self, caller: str) -> None:
        """The caller has one more request."""
        standing = self.standing(caller)
        if not self._here:
            self._served = {}
        self._served[caller] = standing
        self._here[caller] = self._here.get(caller, 0) + 1

    def leave(self, caller: str, now: float) -> None:
        """One of the caller's requests has ended."""
        self._here[caller] -= 1
        if not self._here[caller]:
            if self.several:
                self._shared_until = now + LINGER
            del self._here[caller]

    def prompt(self, request: Request, tokens: int) -> None:
        """Count computed prompt tokens for the caller. Cached ones are free, and so are those that a request
        computes again after preemption, which is not its caller's doing."""
        if not request.retractions:
            self._served[request.caller] += tokens

    def output(self, requests: Iterable[Request]) -> None:
        """Count an output token for each of these requests. With one caller no counter is compared."""
        if self.several:
            for caller, tokens in Counter(map(_caller, requests)).items():
                self._served[caller] += OUTPUT_WEIGHT * tokens
