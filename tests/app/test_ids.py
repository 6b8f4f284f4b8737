"""Random ids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from app.ids import random_hex


def test_ids_are_of_their_length_and_never_the_same_from_any_thread() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: random_hex(32), range(2_000)))
    assert len(set(found)) == 2_000
    assert all(len(each) == 32 and set(each) <= set("0123456789abcdef") for each in found)
    assert len(random_hex(24)) == 24
