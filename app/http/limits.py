"""Limits of an API key: requests at once, requests and tokens a minute."""

from __future__ import annotations

import math
from collections.abc import Iterator

from app.http.errors import RETRY_AFTER, HttpError
from app.http.key_file import OPEN, Terms
from core.clock import Clock, monotonic
from core.errors import Overloaded

MINUTE = 60.0


class Bucket:
    """A token bucket. It holds at most a minute's worth and refills evenly. It may go negative, because
    output tokens are known only after they were made. Owner: event loop."""

    def __init__(self, clock: Clock, per_minute: int) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """How much is left; negative while it is overdrawn."""
        now = self._clock()
        filled = self._level + (now - self._at) * self.per_minute / MINUTE
        self._level, self._at = min(filled, float(self.per_minute)), now
        return self._level

    def take(self, count: int) -> None:
        """Use `count`, whether that much is left or not."""
        self._level = self.level - count

    def seconds(self, level: float) -> float:
        """Seconds until it holds `level`; 0 if it does."""
        return max(level - self.level, 0.0) * MINUTE / self.per_minute

    def resized(self, per_minute: int | None) -> Bucket | None:
        """The bucket of another limit with what is left in this one; None: there is no limit."""
        if per_minute is None:
            return None
        made = Bucket(self._clock, per_minute)
        made._level = min(self.level, made._level)
        return made


class Account:
    """Usage of an API key. The object stays the same when the file is read again. Owner: event loop."""

    def __init__(self, terms: Terms, clock: Clock = monotonic) -> None:
        self.terms = terms
        self.running = 0
        """Admitted requests that have not ended."""
        self.requests = 0
        """Requests that were admitted."""
        self.limited = 0
        """Requests that were refused for a limit."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._clock = clock
        self._requests = _bucket(clock, terms.requests_per_minute)
        self._tokens = _bucket(clock, terms.tokens_per_minute)

    def change(self, terms: Terms) -> None:
        """Apply other limits from now on."""
        self.terms = terms
        requests, tokens = self._requests, self._tokens
        wanted = terms.requests_per_minute, terms.tokens_per_minute
        self._requests = requests.resized(wanted[0]) if requests else _bucket(self._clock, wanted[0])
        self._tokens = tokens.resized(wanted[1]) if tokens else _bucket(self._clock, wanted[1])

    def admit(self) -> None:
        """Count a request that begins. Raises `Overloaded`, with the seconds to wait, if it is over a
        limit."""
        try:
            self._check()
        except Overloaded:
            self.limited += 1
            raise
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1
        self.requests += 1

    def _check(self) -> None:
        if 0 < (most := self.terms.concurrency) <= self.running:
            raise Overloaded(
                f"Rate limit reached: this API key may run {_count(most, 'request')} at once.", RETRY_AFTER
            )
        for kind, bucket in (("request", self._requests), ("token", self._tokens)):
            if bucket is not None and (wait := bucket.seconds(1)):
                raise Overloaded(
                    f"Rate limit reached: this API key may use {_count(bucket.per_minute, kind)} a minute. "
                    f"Try again in {duration(wait)}.",
                    wait,
                )

    def use(self, prompt: int = 0, output: int = 0, limited: bool = True) -> None:
        """Count tokens, against the limit too if they are `limited`."""
        self.prompt_tokens += prompt
        self.output_tokens += output
        if limited and self._tokens is not None:
            self._tokens.take(prompt + output)

    def headers(self) -> Iterator[tuple[str, str]]:
        """OpenAI's headers, which say how much of each limit is left and when all of it will be."""
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield f"x-ratelimit-limit-{kind}", str(bucket.per_minute)
                yield f"x-ratelimit-remaining-{kind}", str(max(math.floor(bucket.level), 0))
                yield f"x-ratelimit-reset-{kind}", duration(bucket.seconds(bucket.per_minute))


class Permit:
    """A request of an account, or a batch, with the terms at its beginning. Owner: event loop."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.terms = account.terms
        self._admitted = False
        self._holders = 1

    def admit(self) -> None:
        """Apply the limits, unless they were: a handler may pass a request on to another. Raises
        `Overloaded`."""
        if not self._admitted:
            self.account.admit()
            self._admitted = True

    def check_admin(self) -> None:
        """Raise `HttpError` 403 unless its key may change the server for everybody."""
        if not self.terms.admin:
            raise HttpError(
                403,
                "This route needs an API key with 'admin = true' in --api-keys-file.",
                "admin_key_required",
            )

    def use(self, prompt: int = 0, output: int = 0) -> None:
        """Count tokens. Only an admitted request has limits: batches run when nobody else does."""
        self.account.use(prompt, output, self._admitted)

    def hold(self) -> None:
        """Keep the request running after its answer, until one more `release`."""
        self._holders += 1

    def release(self) -> None:
        """End the request, unless it is still held."""
        self._holders -= 1
        if self._admitted and not self._holders:
            self.account.running -= 1


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `17ms`, `1s`, `6m0s`. Rounded up, so that the time is over then."""
    if 0 < seconds < 1:
        return f"{min(math.ceil(1000 * seconds), 999)}ms"
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"


def _bucket(clock: Clock, per_minute: int | None) -> Bucket | None:
    return None if per_minute is None else Bucket(clock, per_minute)


def _count(count: int, kind: str) -> str:
    return f"{count:,} {kind}{'' if count == 1 else 's'}"


NOBODY = Permit(Account(OPEN))
"""The permit where there is no request: offline, and at open paths."""
