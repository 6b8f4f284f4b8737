"""The tenant of the current request: what one tenant stored, opened or started does not exist for another."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_tenant: ContextVar[str] = ContextVar("tenant", default="")


def tenant() -> str:
    """The tenant of the current request or batch line: a digest of its API key; empty where the server has no
    keys."""
    return _tenant.get()


@contextmanager
def as_tenant(name: str) -> Iterator[None]:
    """Set the tenant within this context and in tasks started there."""
    token = _tenant.set(name)
    try:
        yield
    finally:
        _tenant.reset(token)


class Keys:
    """The accepted API keys, as digests. Owner: event loop."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys) if key]

    @property
    def tenants(self) -> list[str]:
        """All tenants."""
        return [digest.hex() for digest in self._digests] or [""]

    def tenant(self, key: str) -> str | None:
        """The tenant of a key, None for a wrong one. The digest is compared with all of them in constant
        time, so that timing reveals neither a key's content nor its length."""
        if not self._digests:
            return ""
        sent, found = _digest(key), None
        for digest in self._digests:
            if hmac.compare_digest(sent, digest):
                found = digest.hex()
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
