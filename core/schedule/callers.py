"""Callers, and how much of the device each of them has had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from core.request import Request

OUTPUT_WEIGHT: Final = 2.0
"""Prompt tokens that a token of output counts for, as in the paper: a row of a decode step takes longer than
a token of a chunk."""
SHARED_CHUNK: Final = 1024
"""Prompt tokens of a step while callers share the device. Another's prompt waits for the step in flight, so
this is the length from which on its first token takes at most twice as long as alone. Chunks of 1,024 tokens
had 9.9% less throughput than chunks of 8,192 (8B)."""
HEAD_START: Final = 2.0 * SHARED_CHUNK
"""Tokens that a caller who comes back is ahead of the others: a prompt of some thousand tokens, computed in
turns with another, takes twice as long, and a tenth more for shorter steps. This makes up for it."""
LINGER: Final = 10.0
"""Seconds for which a caller without requests is still expected back: most read an answer and ask again."""

_caller = attrgetter("caller")


class Callers:
    """Counts the tokens that were served to each caller: an API key, or whoever sends none.

    Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A caller
    whose counter is lower goes first, so that those who always have requests here get equal shares, and what
    one does not use goes to the others. The counter of who comes back is lifted to the least of those who are
    here, less `HEAD_START`: nobody saves up turns. When nobody is here everything is forgotten.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._here: dict[str, int] = {}
        """Requests that wait or run."""
        self._shared_until = 0.0

    @property
    def several(self) -> bool:
        """Whether more than one has requests here."""
        return len(self._here) > 1

    def share(self, now: float) -> bool:
        """Whether more than one has requests here, or had lately."""
        return len(self._here) > 1 or now < self._shared_until

    def served(self, caller: str) -> float:
        """Weighted tokens. The lower goes first; alone it says nothing."""
        return self._served[caller]

    def standing(self, caller: str) -> float:
        """The same of one who may not be here, for when it comes."""
        if not self._here or caller in self._here:
            return self._served[caller] if self._here else 0.0
        least = min(map(self._served.__getitem__, self._here))
        return max(self._served.get(caller, 0.0), least - HEAD_START)

    def enter(self, caller: str) -> None:
        """One more request of the caller is here."""
        standing = self.standing(caller)
        if not self._here:
            self._served = {}
        self._served[caller] = standing
        self._here[caller] = self._here.get(caller, 0) + 1

    def leave(self, caller: str, now: float) -> None:
        """One of them has ended."""
        self._here[caller] -= 1
        if not self._here[caller]:
            if self.several:
                self._shared_until = now + LINGER
            del self._here[caller]

    def prompt(self, request: Request, tokens: int) -> None:
        """So many tokens of its prompt are computed: those from the cache cost nothing, and that a preempted
        request computes them again is not its caller's doing."""
        if not request.retractions:
            self._served[request.caller] += tokens

    def output(self, requests: Iterable[Request]) -> None:
        """One token for each of these. Where there is one caller nobody asks."""
        if self.several:
            for caller, tokens in Counter(map(_caller, requests)).items():
                self._served[caller] += OUTPUT_WEIGHT * tokens
