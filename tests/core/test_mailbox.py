"""Queues between threads."""

from __future__ import annotations

from core.mailbox import Outbox


def test_an_item_that_came_before_somebody_listened_wakes_him() -> None:
    box: Outbox[int] = Outbox()
    box.put(1)
    woken: list[list[int]] = []
    box.listen(lambda: woken.append(box.drain()))
    assert woken == [[1]]
    box.put(2)
    assert woken == [[1], [2]]


def test_nobody_is_woken_for_nothing() -> None:
    woken: list[int] = []
    Outbox[int]().listen(lambda: woken.append(1))
    assert woken == []
