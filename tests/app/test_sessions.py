"""Sessions: what a turn continues, what is kept, and their part in `/generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.api.request.schema import SessionParams
from app.api.sglang.session_tree import IDLE, MAX_SESSIONS, MAX_TOKENS, TURN, Sessions
from app.engine.job import Piece
from core.errors import NotFound, Overloaded, RequestError
from core.types import Finish, FinishReason, Ints
from tests.rigs.server import Server
from tests.rigs.tokenizer import BOS
from tests.rigs.wait import until

SAID = [ord("H"), ord("l")]
"""Tokens of the fake engine's first two words."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    made = Sessions(clock)
    made.open("s")
    return made


def ids(*values: int) -> Ints:
    return np.array(values, np.int32)


def turn(sessions: Sessions, name: str, new: Ints, output: list[int] | None, **asked: Any) -> list[int]:
    prompt = sessions.begin(SessionParams(id="s", **asked), name, new, BOS)
    if output is not None:
        sessions.end("s", name, output)
    return prompt.tolist()


def test_a_turn_goes_on_after_another(sessions: Sessions) -> None:
    assert turn(sessions, "a", ids(BOS, 1, 2), [3]) == [BOS, 1, 2]
    assert turn(sessions, "b", ids(BOS, 4), [5], rid="a") == [BOS, 1, 2, 3, 4]
    assert turn(sessions, "c", ids(6), [7], rid="b") == [BOS, 1, 2, 3, 4, 5, 6]
    assert turn(sessions, "d", ids(8), [9], rid="a") == [BOS, 1, 2, 3, 8], "a branch"
    assert turn(sessions, "e", ids(BOS, 1), [2]) == [BOS, 1], "without a rid it begins afresh"


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"offset": 2}, [1, 2, 9]),
        ({"offset": 0}, [1, 2, 3, 4, 5, 9]),
        ({"offset": -1}, [1, 2, 3, 4, 5, 9]),
        ({"offset": 100}, [1, 2, 3, 4, 5, 9]),
        ({"drop_previous_output": True}, [1, 2, 3, 9]),
        ({"drop_previous_output": True, "offset": 1}, [1, 9]),
    ],
)
def test_how_much_is_kept(sessions: Sessions, asked: dict[str, Any], wanted: list[int]) -> None:
    turn(sessions, "a", ids(1, 2, 3), [4, 5])
    assert turn(sessions, "b", ids(9), [], rid="a", **asked) == wanted


def test_replacing_forgets_what_followed(sessions: Sessions) -> None:
    turn(sessions, "a", ids(1), [2])
    turn(sessions, "b", ids(3), [4], rid="a")
    turn(sessions, "c", ids(5), [6], rid="b")
    assert turn(sessions, "d", ids(7), [8], rid="a", replace=True) == [1, 2, 7]
    for gone in ("b", "c"):
        with pytest.raises(NotFound):
            turn(sessions, "x", ids(1), [], rid=gone)
    assert turn(sessions, "e", ids(9), [1], replace=True) == [9]
    with pytest.raises(NotFound):
        turn(sessions, "x", ids(1), [], rid="a")


def test_a_turn_that_fails_replaces_nothing(sessions: Sessions) -> None:
    turn(sessions, "a", ids(1), [2])
    turn(sessions, "b", ids(3), [4], rid="a")
    turn(sessions, "c", ids(5), None, rid="a", replace=True)
    sessions.drop("s", "c")
    assert turn(sessions, "d", ids(6), [7], rid="b") == [1, 2, 3, 4, 6]


def test_a_running_turn_can_be_neither_continued_nor_replaced(sessions: Sessions) -> None:
    turn(sessions, "a", ids(1), [2])
    turn(sessions, "b", ids(3), None, rid="a")
    for asked in ({"rid": "b"}, {"rid": "a", "replace": True}, {"replace": True}):
        with pytest.raises(RequestError):
            turn(sessions, "c", ids(1), [], **asked)
    with pytest.raises(RequestError):
        turn(sessions, "b", ids(1), [])
    sessions.drop("s", "b")
    with pytest.raises(NotFound):
        turn(sessions, "c", ids(1), [], rid="b")
    assert turn(sessions, "b", ids(4), [5], rid="a") == [1, 2, 4]
    sessions.drop("s", "b")
    assert turn(sessions, "c", ids(6), [], rid="b") == [1, 2, 4, 5, 6], "a complete turn is not dropped"


def test_idle_sessions_go_and_running_ones_stay(sessions: Sessions, clock: Clock) -> None:
    sessions.open("long", timeout=10 * IDLE)
    turn(sessions, "a", ids(1), None)
    clock.now = 2 * IDLE
    sessions.open("other")
    assert len(sessions) == 3
    sessions.end("s", "a", [2])
    clock.now = 3 * IDLE + 1
    with pytest.raises(NotFound):
        turn(sessions, "b", ids(1), [], rid="a")
    assert len(sessions) == 1


def test_they_are_bounded(sessions: Sessions) -> None:
    for _ in range(MAX_SESSIONS - 1):
        sessions.open()
    with pytest.raises(Overloaded):
        sessions.open()
    assert sessions.close("s")
    assert not sessions.close("s")
    sessions.open("s")
    with pytest.raises(RequestError):
        sessions.open("s")
    half = np.zeros(MAX_TOKENS // 2 - TURN, np.int32)
    turn(sessions, "a", half, [1])
    turn(sessions, "b", half, [1])
    with pytest.raises(NotFound):
        turn(sessions, "c", ids(1), [], rid="a")
    assert len(turn(sessions, "c", ids(1), [], rid="b")) == len(half) + 2


def test_short_turns_are_bounded_too(sessions: Sessions) -> None:
    most = MAX_TOKENS // TURN
    for number in range(most + 2):
        turn(sessions, str(number), ids(1), [2])
    with pytest.raises(NotFound):
        turn(sessions, "c", ids(1), [], rid="2")
    assert turn(sessions, "c", ids(3), [], rid=str(most)) == [1, 2, 3]


def test_the_end_of_a_turn_in_a_closed_session_is_nothing(sessions: Sessions) -> None:
    turn(sessions, "a", ids(1), None)
    sessions.close("s")
    sessions.end("s", "a", [1])
    sessions.drop("s", "a")


# -- over HTTP --------------------------------------------------------------------------------------


async def opened(server: Server, **body: Any) -> str:
    id = await server.ask("/open_session", {"capacity_of_str_len": 1000, **body})
    assert isinstance(id, str)
    return id


def asked(text: str, **params: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 2}, "session_params": params}


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_over_http(server: Server, stream: bool) -> None:
    id = await opened(server)
    first = {**asked("ab", id=id), "rid": "one", "stream": stream}
    second = {**asked("cd", id=id, rid="one"), "rid": "two", "stream": stream}
    for body in (first, second):
        if stream:
            assert (await server.events("/generate", body))[-1] == "[DONE]"
        else:
            answer = await server.ask("/generate", body)
            assert answer["meta_info"]["id"] == body["rid"]
    prompts = [run.prompt.tolist() for run in server.engine.runs]
    assert prompts == [[BOS, *b"ab"], [BOS, *b"ab", *SAID, *b"cd"]]


async def test_the_answers_own_id_is_the_next_turns_rid(server: Server) -> None:
    id = await opened(server, session_id="mine")
    assert id == "mine"
    _, answer = await server.post("/generate", {**asked("ab", id=id), "text": None, "input_ids": [1, 2]})
    answer = await server.ask("/generate", asked("c", id=id, rid=answer["meta_info"]["id"]))
    assert answer["meta_info"]["prompt_tokens"] == 2 + 2 + 1


async def test_a_turn_that_failed_never_was(server: Server) -> None:
    id = await opened(server)
    server.engine.fail_at = 1
    status, _ = await server.post("/generate", {**asked("ab", id=id), "rid": "one"})
    assert status == 500
    server.engine.fail_at = -1
    status, answer = await server.post("/generate", asked("c", id=id, rid="one"))
    assert status == 404
    assert answer["error"]["code"] == "turn_not_found"
    await server.ask("/generate", {**asked("ab", id=id), "rid": "one"})


async def test_a_replacing_request_that_is_refused_costs_no_turn(server: Server) -> None:
    id = await opened(server)
    for body in ({**asked("a", id=id), "rid": "one"}, {**asked("b", id=id, rid="one"), "rid": "two"}):
        assert (await server.post("/generate", body))[0] == 200
    refused = asked("c", id=id, rid="one", replace=True)
    refused["sampling_params"]["max_new_tokens"] = 10_000
    assert (await server.post("/generate", refused))[0] == 400
    assert (await server.post("/generate", asked("d", id=id, rid="two")))[0] == 200


async def test_an_aborted_turn_never_was(server: Server) -> None:
    id = await opened(server)
    server.engine.manual = True
    stream = await server.http.post("/generate", json={**asked("a", id=id), "rid": "one", "stream": True})
    await until(lambda: bool(server.engine.runs))
    server.engine.runs[0].push(0, Piece("x", [9], None, Finish(FinishReason.ABORT)))
    await stream.read()
    server.engine.manual = False
    status, _ = await server.post("/generate", asked("c", id=id, rid="one"))
    assert status == 404


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"session_params": {}}, 404, "session_params.id"),
        ({"session_params": {"id": "unknown"}}, 404, "session_params.id"),
        ({"session_params": {"id": "s", "rid": "unknown"}}, 404, "session_params.rid"),
        ({"session_params": {"id": "s", "offset": -2}}, 400, "session_params.offset"),
        ({"session_params": {"id": "s", "offset": "x"}}, 400, "session_params.offset"),
        ({"text": ["a", "b"]}, 400, "session_params"),
        ({"sampling_params": {"n": 2}}, 400, "session_params"),
    ],
)
async def test_errors_name_the_field(server: Server, change: dict[str, Any], status: int, param: str) -> None:
    await opened(server, session_id="s")
    got, answer = await server.post("/generate", {**asked("a", id="s"), **change})
    assert (got, answer["error"]["param"]) == (status, param)


async def test_opening_and_closing(server: Server) -> None:
    await opened(server, session_id="s", timeout=5.0)
    assert (await server.refused("/open_session", {"session_id": "s"}))["code"] == "session_exists"
    status, answer = await server.post("/open_session", {"timeout": 0})
    assert (status, answer["error"]["param"]) == (400, "timeout")
    assert await server.post("/close_session", {"session_id": "s"}) == (200, {"success": True})
    assert await server.post("/close_session", {"session_id": "s"}) == (200, {"success": False})
    assert (await server.refused("/close_session", {}))["param"] == "session_id"
