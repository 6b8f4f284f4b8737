"""The table of rows."""

from __future__ import annotations

from bench.chaos.row import Row, Setting
from bench.chaos.rows.abuse import grammars, templates
from bench.chaos.rows.disconnects import killed, storm
from bench.chaos.rows.life import life
from bench.chaos.rows.malformed import costly, malformed
from bench.chaos.rows.pool import pool
from bench.chaos.rows.slow import slow
from bench.chaos.rows.soak import soak
from bench.chaos.rows.stages import hang, stages
from bench.chaos.rows.streams import burst, streams
from bench.chaos.rows.wire import wire

TINY = Setting("tiny", ("--trust-request-chat-template", "--context-length", "2048"))
SHORT = Setting("tiny", ("--context-length", "256"))
WATCHED = Setting("tiny", ("--context-length", "2048", "--watchdog-timeout", "1"))
COUNTING = Setting("counting", ("--max-queued", "20000"))
BOUNDED = Setting("counting", ("--max-queued", "16", "--max-running", "8"))

TABLE: tuple[Row, ...] = (
    Row(
        "malformed",
        "10,000 malformed requests over every route: no 5xx, no timeout, other streams are not affected",
        malformed,
        "rejections raise",
        SHORT,
    ),
    Row(
        "costly",
        "requests that are slow to decode or to answer do not block the event loop, or are rejected",
        costly,
        "bodies are decoded on the loop",
        TINY,
    ),
    Row(
        "killed",
        "1,000 clients disconnect at random points: their requests are aborted, nothing leaks",
        killed,
        "aborts are lost",
        TINY,
    ),
    Row(
        "streams",
        "10,000 concurrent streams: no token is lost, duplicated or from another stream",
        streams,
        "a token is skipped",
        COUNTING,
    ),
    Row(
        "slow",
        "slow readers, headers and bodies do not affect other clients, and their buffers stay small",
        slow,
        "congestion is ignored",
        TINY,
    ),
    Row(
        "burst",
        "5,000 requests at twice the concurrency of a bounded queue: the excess gets 429 with retry-after-ms",
        burst,
        "the queue is unbounded",
        BOUNDED,
    ),
    Row(
        "pool",
        "a KV pool of 5% of the demand: all requests finish, with the same texts as with a large pool",
        pool,
        "preemption loses a token",
        TINY,
    ),
    Row(
        "life",
        "SIGTERM drains, a second one ends streams with an error, SIGKILL loses no accepted batch",
        life,
        "the drain does not wait",
        TINY,
    ),
    Row(
        "stages",
        "a fault in any stage: affected requests get an error, none hangs or is silently truncated",
        stages,
        "step failures are lost",
        TINY,
    ),
    Row(
        "hang",
        "a hung device is detected: every stream gets an error, and the process exits",
        hang,
        "the watchdog is off",
        WATCHED,
    ),
    Row(
        "storm",
        "10,000 requests, plain and constrained, aborted at random: the radix tree stays consistent",
        storm,
        "a lock leaks",
        TINY,
    ),
    Row(
        "grammars",
        "hostile grammars, regexes, schemas and tools are compiled or rejected",
        grammars,
        "the compiler raises",
        TINY,
    ),
    Row("templates", "hostile templates do not leave the sandbox", templates, "the sandbox is off", TINY),
    Row(
        "wire",
        "request smuggling, chunks and header sets get the expected status",
        wire,
        "HTTP errors raise",
        TINY,
    ),
    Row(
        "soak",
        "mixed traffic for 20 minutes: no errors, no memory growth",
        soak,
        "requests leak memory",
        TINY,
    ),
)
