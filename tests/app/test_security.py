"""Promises of `SECURITY.md` that no other test holds."""

from __future__ import annotations

import hmac

import pytest

from core.config import ServeConfig
from tests.rigs.server import Start


async def test_keys_are_compared_as_digests_in_constant_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the key's content nor its length shows in how long a refusal takes."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def seen(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", seen)
    server = await start(ServeConfig(api_key=("another", "the key")))
    for sent in ("", "t", "the ke", "the key", "x" * 4000):
        async with server.http.get("/v1/models", headers={"Authorization": f"Bearer {sent}"}) as answer:
            assert (answer.status == 200) == (sent == "the key")
    assert len(compared) == 2 * 5  # with every key, whichever it is
    assert {len(part) for pair in compared for part in pair} == {32}
