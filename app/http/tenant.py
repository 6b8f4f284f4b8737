"""The tenant of the current request: what one tenant stored, opened or started does not exist for another."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from contextvars import ContextVar

from app.context import holding
from app.http.key_file import FLAG, OPEN, Terms, digest, exposed, read
from app.http.limits import NOBODY, Account, Permit
from core.clock import Clock, monotonic

log = logging.getLogger(__name__)

_permit: ContextVar[Permit] = ContextVar("permit", default=NOBODY)


def permit() -> Permit:
    """The permit of the current request or batch line."""
    return _permit.get()


def tenant() -> str:
    """The tenant of the current request or batch line: a digest of its API key; empty where the server has no
    keys."""
    return permit().terms.tenant


def acting(permit: Permit) -> holding[Permit]:
    """Set the permit within this context and in tasks started there."""
    return holding(_permit, permit)


class Keys:
    """The accepted API keys, as digests. Owner: event loop."""

    def __init__(self, keys: Sequence[str], file: str = "", clock: Clock = monotonic) -> None:
        """`keys` have no limits; those of the `file` have its own, by `clock`. Raises `ConfigError`."""
        self._keys = keys
        self._file = file
        self._clock = clock
        terms = [Terms(tenant=digest(key), priority=None, admin=True) for key in dict.fromkeys(keys) if key]
        self._given = [Account(each, clock) for each in terms]
        self._named: dict[str, Account] = {}
        self._digests = self._listed()
        if file:
            self.reload()

    @property
    def accounts(self) -> list[Account]:
        """All accounts, those of `--api-key` first."""
        return [account for _, account in self._digests]

    @property
    def tenants(self) -> list[str]:
        """All tenants."""
        return [each.terms.tenant for each in self.accounts] or [OPEN.tenant]

    def find(self, key: str) -> Account | None:
        """The account of a key, None for a wrong one. The digest is compared with all of them in constant
        time, so that timing reveals neither a key's content nor its length."""
        if not self._digests:
            return NOBODY.account
        sent, found = bytes.fromhex(digest(key)), None
        for known, account in self._digests:
            if hmac.compare_digest(sent, known):
                found = account
        return found

    def _listed(self) -> list[tuple[bytes, Account]]:
        """Every account with the digest of its key."""
        accounts = (*self._given, *self._named.values())
        return [(bytes.fromhex(each.terms.tenant), each) for each in accounts]

    def owner(self, tenant: str) -> Account:
        """The account for work that a tenant left. A key that is no longer in the file may use no model."""
        for account in self.accounts:
            if account.terms.tenant == tenant:
                return account
        return Account(Terms(tenant=tenant, models=() if self._file else None, priority=None))

    def reload(self) -> str:
        """Read the file again; says what has changed, by name. Requests that run go on as they began. Raises
        `ConfigError`, after which all is as before."""
        listed = read(self._file, self._keys)
        if exposed(self._file):
            log.warning("%s %s: other users may read or change it; chmod o-rwx", FLAG, self._file)
        before, self._named = self._named, {}
        changes = [f"removed {name}" for name in sorted(before.keys() - {each.name for each in listed})]
        for terms in listed:
            account = self._named[terms.name] = before.get(terms.name) or Account(terms, self._clock)
            if terms.name not in before:
                changes.append(f"added {terms.name}")
            elif changed := terms.differences(account.terms):
                account.change(terms)
                changes.append(f"changed {terms.name} ({changed})")
        self._digests = self._listed()
        return "; ".join(changes) or "no change"
