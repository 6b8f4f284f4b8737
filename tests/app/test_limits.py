"""Limits of a key, by a clock that the test sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.http.key_file import Terms
from app.http.limits import Account, Bucket, Permit, duration
from app.http.tenant import Keys
from core.errors import Overloaded
from tests.rigs.scheduler import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(account: Account) -> float:
    """Seconds that a refused request is told to wait."""
    with pytest.raises(Overloaded) as error:
        Permit(account).admit()
    return error.value.retry_after


def test_a_bucket_fills_evenly_to_a_minutes_worth(clock: Clock) -> None:
    bucket = Bucket(clock, 120)
    bucket.take(120)
    assert (bucket.level, bucket.seconds(1), bucket.seconds(120)) == (0, 0.5, 60)
    clock.now += 15
    assert (bucket.level, bucket.seconds(30)) == (30, 0)
    bucket.take(90)
    assert (bucket.level, bucket.seconds(0)) == (-60, 30)
    clock.now += 1e6
    assert bucket.level == 120


def test_requests_a_minute(clock: Clock) -> None:
    account = Account(Terms(requests_per_minute=2), clock)
    for _ in range(2):
        Permit(account).admit()
    assert refused(account) == 30
    assert refused(account) == 30, "a refused request costs nothing"
    clock.now += 30
    Permit(account).admit()
    assert (account.requests, account.limited) == (3, 2)


def test_tokens_a_minute(clock: Clock) -> None:
    account = Account(Terms(tokens_per_minute=600), clock)
    first = Permit(account)
    first.admit()
    first.use(prompt=500)
    Permit(account).admit()  # something is left
    first.use(output=159)
    assert refused(account) == 6, "59 tokens too many, and one to begin with"
    clock.now += 6
    Permit(account).admit()
    assert (account.prompt_tokens, account.output_tokens) == (500, 159)


def test_what_was_not_admitted_is_counted_without_limits(clock: Clock) -> None:
    account = Account(Terms(tokens_per_minute=600, concurrency=1), clock)
    batch = Permit(account)
    batch.use(prompt=1000, output=1000)
    Permit(account).admit()
    assert (account.prompt_tokens, account.output_tokens) == (1000, 1000)
    batch.release()
    assert account.running == 1


def test_concurrency_until_nobody_holds_it(clock: Clock) -> None:
    account = Account(Terms(concurrency=1), clock)
    permit = Permit(account)
    permit.admit()
    permit.admit()  # as `/invocations` passes its request on
    assert (account.running, account.requests) == (1, 1)
    assert refused(account) == 1
    permit.hold()
    permit.release()
    assert account.running == 1
    permit.release()
    assert account.running == 0


def test_other_limits_apply_from_now_on(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"

    def write(limits: str) -> None:
        file.write_text(f"[keys.a]\nkey = 'k'\n{limits}")

    write("requests_per_minute = 10")
    keys = Keys([], str(file), clock)
    account = keys.find("k")
    assert account is not None
    for _ in range(10):
        Permit(account).admit()
    write("requests_per_minute = 60\ntokens_per_minute = 7")
    keys.reload()
    assert refused(account) == 1, "what was used stays used"
    assert dict(account.headers())["x-ratelimit-remaining-tokens"] == "7"
    write("requests_per_minute = 0x7fff")
    keys.reload()
    clock.now += 60
    write("requests_per_minute = 1")
    keys.reload()
    assert dict(account.headers())["x-ratelimit-remaining-requests"] == "1"
    write("")
    keys.reload()
    Permit(account).admit()
    assert list(account.headers()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0161, "17ms"), (0.9999, "999ms"), (1, "1s"), (1.2, "2s"), (59.5, "1m0s"), (360, "6m0s"),
        (3600, "1h0m0s"), (3725, "1h2m5s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
