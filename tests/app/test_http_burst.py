"""Events of one turn of the loop: made first, sent then, none late and none out of order."""

from __future__ import annotations

import asyncio

import pytest

from app.http import burst as burst_module
from app.http.burst import Burst


async def test_events_are_sent_in_order_once_the_turn_is_over() -> None:
    burst, sent = Burst(), list[bytes]()
    for event in (b"a", b"b", b"c"):
        burst.add(sent.append, event)
    assert sent == []
    await asyncio.sleep(0)
    assert sent == [b"a", b"b", b"c"]


async def test_they_are_sent_before_what_is_scheduled_after_them() -> None:
    burst, sent = Burst(), list[bytes]()
    burst.add(sent.append, b"of this slice")
    asyncio.get_running_loop().call_soon(burst.add, sent.append, b"of the next slice")
    asyncio.get_running_loop().call_soon(lambda: sent.append(b"|"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent == [b"of this slice", b"|", b"of the next slice"]


async def test_who_cannot_wait_sends_all_that_came_before() -> None:
    burst, sent = Burst(), list[bytes]()
    burst.add(sent.append, b"a")
    burst.send()
    sent.append(b"b")
    burst.add(sent.append, b"c")
    await asyncio.sleep(0)
    assert sent == [b"a", b"b", b"c"]


async def test_what_is_added_while_sending_waits_for_the_next_turn() -> None:
    burst, sent = Burst(), list[bytes]()

    def answer(event: bytes) -> None:
        sent.append(event)
        burst.add(sent.append, b"answer")

    burst.add(answer, b"a")
    burst.add(sent.append, b"b")
    await asyncio.sleep(0)
    assert sent == [b"a", b"b"]
    await asyncio.sleep(0)
    assert sent == [b"a", b"b", b"answer"]


async def test_heads_wait_for_at_least_half_of_the_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer sends all that came before its last turn, and ends with them."""
    monkeypatch.setattr(burst_module, "HEAD_SECONDS", 0.0)
    burst, sent, turns = Burst(), list[str](), list[int]()

    def turn() -> None:
        turns.append(len(sent))
        if len(sent) < 2:
            asyncio.get_running_loop().call_later(0.0, turn)

    burst.head(lambda: sent.append("a"))
    asyncio.get_running_loop().call_later(0.0, turn)
    asyncio.get_running_loop().call_later(0.0, burst.head, lambda: sent.append("b"))
    while len(turns) < 3:
        await asyncio.sleep(0)
    assert (sent, turns) == (["a", "b"], [0, 1, 2])
