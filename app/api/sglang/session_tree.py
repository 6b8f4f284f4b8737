"""SGLang's sessions: a tree of turns on the server, so that a client sends only what is new."""

from __future__ import annotations

import secrets

import msgspec
import numpy as np

from app.api.request.schema import SessionParams
from core.clock import Clock
from core.errors import NotFound, Overloaded, RequestError, field_error
from core.types import Ints

MAX_SESSIONS = 128
"""Sessions of all tenants together; each tenant has an equal share."""
MAX_TOKENS = 2**19
"""Tokens of a session's turns, each counted with all that came before it: with all sessions 256 MiB at the
most. The oldest turns go first."""
TURN = 256
"""Tokens that a turn counts for besides its own: what it takes of memory, and all of them are walked."""
IDLE = 600.0
"""Seconds that a session is kept without a request, unless it was opened with its own `timeout`."""
MAX_IDLE = 86_400.0


class Turn(msgspec.Struct):
    """One request. `output` is None while it runs; the turns that it `replaces` go when it is complete:
    a request that is refused or fails must cost nothing."""

    prompt: Ints
    parent: str | None
    replaces: set[str] = set()
    output: Ints | None = None

    @property
    def size(self) -> int:
        """Tokens that the turn counts for."""
        return TURN + len(self.prompt) + (0 if self.output is None else len(self.output))


class _Session(msgspec.Struct):
    timeout: float
    used: float
    turns: dict[str, Turn] = {}

    @property
    def busy(self) -> bool:
        return any(turn.output is None for turn in self.turns.values())


class Sessions:
    """The sessions of one tenant, bounded by number, tokens and idle time. Owner: event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.limit = MAX_SESSIONS
        """How many may be open at once."""
        self._by_id: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, id: str | None = None, timeout: float | None = None) -> str:
        """A new session's id. Raises `RequestError` for one that is taken or a bad timeout, `Overloaded`
        when there are too many."""
        self._expire()
        if id and id in self._by_id:
            raise RequestError("A session with this id is open.", "session_id", "session_exists")
        if timeout is not None and not 0 < timeout <= MAX_IDLE:
            raise field_error("timeout", f"must be above 0 and at most {MAX_IDLE:g} seconds")
        if len(self._by_id) >= self.limit:
            raise Overloaded(f"{self.limit} sessions are open, the most this server keeps for a key.")
        id = id or secrets.token_hex(16)
        self._by_id[id] = _Session(timeout or IDLE, self._clock())
        return id

    def close(self, id: str) -> bool:
        """Remove a session; its running requests continue. False when there is none of that id."""
        return self._by_id.pop(id, None) is not None

    def begin(self, params: SessionParams, rid: str, new: Ints, bos: int | None) -> Ints:
        """The whole prompt, int32 [n], of a request `rid` that adds `new`; `end` or `drop` must follow.

        `bos` is taken off `new` where it continues something. Raises `NotFound` for an unknown session
        or turn and `RequestError` for a turn that is still running.
        """
        self._expire()
        session = self._by_id.get(params.id or "")
        if session is None:
            raise NotFound("No session of this id is open.", "session_params.id", "session_not_found")
        if params.offset is not None and params.offset < -1:
            raise field_error("session_params.offset", "must be at least -1")
        if rid in session.turns:
            raise RequestError("This session has a turn with this rid.", "rid")
        replaces = _descendants(session.turns, params.rid) if params.replace else set()
        before = self._before(session, params, replaces)
        if before is not None and len(new) and int(new[0]) == bos:
            new = new[1:]
        prompt = new if before is None else np.concatenate([before, new])
        session.turns[rid] = Turn(prompt, params.rid, replaces)
        session.used = self._clock()
        return prompt

    def end(self, id: str, rid: str, output: list[int]) -> None:
        """The turn is complete and can be continued. Nothing happens when its session is gone."""
        session = self._by_id.get(id)
        if session is None or rid not in session.turns:
            return
        session.turns[rid].output = np.asarray(output, np.int32)
        for old in session.turns[rid].replaces:
            session.turns.pop(old, None)
        session.used = self._clock()
        total = sum(turn.size for turn in session.turns.values())
        for old in list(session.turns):
            turn = session.turns[old]
            if total <= MAX_TOKENS or old == rid:
                break
            if turn.output is not None:
                total -= turn.size
                del session.turns[old]

    def drop(self, id: str, rid: str) -> None:
        """Forget a turn that did not complete. No effect after `end` or on one that is gone."""
        session = self._by_id.get(id)
        if session is not None and rid in session.turns and session.turns[rid].output is None:
            del session.turns[rid]

    def _before(self, session: _Session, params: SessionParams, replaces: set[str]) -> Ints | None:
        """The tokens before the new ones; None when there are none."""
        if params.rid is not None and params.rid not in session.turns:
            raise NotFound("This session has no turn with this rid.", "session_params.rid", "turn_not_found")
        checked = replaces if params.rid is None else {*replaces, params.rid}
        if any(session.turns[rid].output is None for rid in checked):
            raise RequestError(
                "A turn that this would continue or replace is still running.", "session_params.rid"
            )
        if params.rid is None:
            return None
        turn = session.turns[params.rid]
        whole = turn.prompt
        if not params.drop_previous_output and turn.output is not None:
            whole = np.concatenate([whole, turn.output])
        return whole[: params.offset] if params.offset is not None and params.offset > 0 else whole

    def _expire(self) -> None:
        now = self._clock()
        for id, session in list(self._by_id.items()):
            if now - session.used > session.timeout and not session.busy:
                del self._by_id[id]


def _descendants(turns: dict[str, Turn], root: str | None) -> set[str]:
    """Turns that continue `root`; all of them for None. Parents come before children in `turns`."""
    found: set[str] = set()
    for rid, turn in turns.items():
        if root is None or turn.parent == root or turn.parent in found:
            found.add(rid)
    return found
