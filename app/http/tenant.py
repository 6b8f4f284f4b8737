"""Whose request is at hand: what one tenant stored, opened or started does not exist for another."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_tenant: ContextVar[str] = ContextVar("tenant", default="")


def tenant() -> str:
    """The tenant of the request or batch line at hand: a digest of the key it was accepted with, and the one
    empty name where the server has no keys."""
    return _tenant.get()


@contextmanager
def acting_for(name: str) -> Iterator[None]:
    """What is done within is done for this tenant, in tasks that begin there too."""
    token = _tenant.set(name)
    try:
        yield
    finally:
        _tenant.reset(token)


class Keys:
    """The keys that a server accepts, as digests. Owner: event loop."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys) if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def tenants(self) -> list[str]:
        """Everybody who may come."""
        return [digest.hex() for digest in self._digests] or [""]

    def tenant(self, key: str) -> str | None:
        """Whose key it is, None for one that is not accepted. Digests are compared with all of them, in
        constant time: neither a key's content nor its length shows in how long a refusal takes."""
        if not self._digests:
            return ""
        sent, found = _digest(key), None
        for digest in self._digests:
            if hmac.compare_digest(sent, digest):
                found = digest.hex()
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
