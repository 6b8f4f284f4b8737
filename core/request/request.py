"""The one mutable record of a request."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import msgspec
import numpy as np

from core.cache.hold import Hold
from core.grammar import CompiledGrammar
from core.request.params import SamplingParams
from core.types import PLAIN_ROOT, Finish, Floats, Ints, PromptLogprobs, RootKey


class State(Enum):
    """State of a request. `RETRACTED` has lost its pages and still waits for in-flight tokens."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    RETRACTED = auto()
    FINISHED = auto()


_NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FINISHED}),
    State.PREFILL: frozenset({State.DECODE, State.RETRACTED, State.FINISHED}),
    State.DECODE: frozenset({State.RETRACTED, State.FINISHED}),
    State.RETRACTED: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Pinning(msgspec.Struct):
    """Prefixes of a prompt to pin, and how much was pinned. Pages count against the share of `owner`."""

    owner: str
    marks: tuple[tuple[int, float], ...]
    """(tokens from the prompt's start, seconds)."""
    kept: tuple[int, ...] = ()
    """Tokens that were pinned, by mark; empty until the whole prompt is planned."""


class Verified(NamedTuple):
    """A step that verified drafts: output tokens and accepted drafts before it, and what it accepted."""

    output: int
    before: int
    accepted: int


RECENT = 64
"""Number of verified steps that a request remembers, more than may wait for delivery
(`app.engine.loop.BACKLOG`)."""


class Drafts(msgspec.Struct):
    """What speculative decoding did for a request: counts of its steps that verified drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    """Equal to what was sampled, also those behind a stop: the device knows no stop."""
    recent: list[Verified] = []
    """The latest steps, the oldest first."""

    def verified(self, drafted: int, made: int, output: int) -> None:
        """One more step: it verified `drafted` tokens and made `made` after the first `output`."""
        accepted = max(made - 1, 0)
        self.recent.append(Verified(output, self.accepted, accepted))
        del self.recent[:-RECENT]
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    def delivered(self, output: int) -> int:
        """Return how many of the `output` tokens that the client gets are accepted drafts. Several steps may
        lie behind a stop string that was found late. The last token of a step is no draft."""
        for step in reversed(self.recent):
            if step.output < output:
                return step.before + min(step.accepted, output - step.output)
        return self.recent[0].before if self.recent else self.accepted


class Request(msgspec.Struct, eq=False):
    """One request: its parameters and its progress.

    Owner: event loop. `output` holds only what results have confirmed; what is planned beyond it is in the
    scheduler's slot table. KV exists for every token but the last sampled one.
    """

    id: str
    prompt: Ints
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    caller: str = ""
    """Who is served by it, by `core/schedule/callers.py`: a digest of the API key."""
    continues: bool = False
    """The request continues an answer that was admitted before: it waits in front of all others, and the
    queue's limits do not apply to it."""
    due: float = 0.0
    """When its first token has to be there; 0: at any time."""
    expected: float = 0.0
    """Seconds from its arrival that the first token was expected to take; 0: nobody asked, or not known."""
    root: RootKey = PLAIN_ROOT
    grammar: CompiledGrammar | None = None
    pinning: Pinning | None = None
    """Set before it is queued, where its client wants the prompt kept."""
    embeds: Floats | None = None
    """Set before it is queued, where the first tokens of its prompt are placeholders: what they are embedded
    to, float32 [placeholders, hidden]. Its root is its own: equal ids say nothing of it."""
    state: State = State.WAITING
    output: list[int] = []
    prompt_logprobs: list[PromptLogprobs] = []
    """Log-probabilities in the order of results, by ascending `start`; complete when the first token
    comes."""
    hidden: list[Floats] = []
    """Requested hidden states as results bring them, float32 [n, width] each."""
    experts: list[Ints] = []
    """Requested experts as results bring them, int32 [n, layers, experts per token] each."""
    slot: int = 0
    hold: Hold | None = None
    cached: int = 0
    """Prompt tokens found in the tree at the first admission: what usage reports. Before, if its first token
    is due, those found when it came."""
    logprobs_from: int = 0
    """First prompt position whose log-probability no submitted step reports yet."""
    hidden_from: int = 0
    """First prompt position whose hidden state or experts no submitted step reports yet."""
    number: int = 0
    """Arrival number: requests that were queued before it."""
    since: float = 0.0
    """Time of the last change between queue and running."""
    ran: float = 0.0
    """Seconds that it had run when it was last retracted."""
    retractions: int = 0
    drafts: Drafts = msgspec.field(default_factory=Drafts)
    started_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    """When its last piece was delivered; 0: it was not yet."""
    finish: Finish | None = None
    history: list[tuple[float, str, int]] = []
    """Events with their time and number of tokens: admitted (cached ones), chunk, retracted."""

    def __post_init__(self) -> None:
        self.logprobs_from = self.params.prompt_logprobs_start
        self.hidden_from = self.params.read_from

    @property
    def num_tokens(self) -> int:
        """Prompt and confirmed output."""
        return len(self.prompt) + len(self.output)

    @property
    def to_compute(self) -> int:
        """Tokens of a prompt that has not begun, as far as is known."""
        return len(self.prompt) - self.cached

    @property
    def embedded(self) -> int:
        """Leading prompt tokens that are placeholders for `embeds`."""
        return 0 if self.embeds is None else len(self.embeds)

    @property
    def limit(self) -> int:
        """Tokens that ever need KV: the last sampled token needs none."""
        return len(self.prompt) + max(self.params.max_tokens - 1, 0)

    def tokens(self) -> Ints:
        """Prompt and confirmed output, int32 [num_tokens]."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    def move(self, state: State) -> None:
        """Change state; an illegal transition is a bug and raises."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.id}: {self.state.name} cannot become {state.name}")
        self.state = state

    def retract(self, now: float) -> None:
        """Go back to the queue."""
        self.move(State.RETRACTED)
        self.ran += now - self.since
        self.retractions += 1
        self.history.append((now, "retracted", len(self.output)))
