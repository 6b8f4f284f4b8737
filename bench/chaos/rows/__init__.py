"""The table."""

from __future__ import annotations

from bench.chaos.row import Row, Setting
from bench.chaos.rows.abuse import grammars, templates
from bench.chaos.rows.leavers import killed, storm
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
        "10,000 malformed requests over every route: none is a 5xx, none hangs, neighbours stream on",
        malformed,
        "refusals raise",
        SHORT,
    ),
    Row(
        "costly",
        "bodies made to be slow are decoded elsewhere, told in slices, or refused",
        costly,
        "bodies are decoded on the loop",
        TINY,
    ),
    Row("killed", "1,000 clients killed anywhere leave nothing behind", killed, "aborts are lost", TINY),
    Row(
        "streams",
        "10,000 streams at once: no token is lost, doubled or another's",
        streams,
        "a token is skipped",
        COUNTING,
    ),
    Row(
        "slow",
        "slow readers, headers and bodies hinder nobody, and little waits for them",
        slow,
        "congestion is not seen",
        TINY,
    ),
    Row(
        "burst",
        "5,000 requests, twice what a bounded queue takes at a time: the rest get 429 with retry-after-ms",
        burst,
        "the queue has no bound",
        BOUNDED,
    ),
    Row(
        "pool",
        "a KV pool of 5% of the need: all finish, with the texts of a pool with room",
        pool,
        "retraction changes a token",
        TINY,
    ),
    Row(
        "life",
        "SIGTERM finishes what runs, a second ends it with the reason, SIGKILL loses nothing that is kept",
        life,
        "the drain cuts",
        TINY,
    ),
    Row(
        "stages",
        "a fault in any stage: whoever loses work is told, nobody hangs, nobody gets less as all",
        stages,
        "failures are silent",
        TINY,
    ),
    Row(
        "hang",
        "a device that hangs is noticed: every stream gets an error, and the process ends",
        hang,
        "hangs end nothing",
        WATCHED,
    ),
    Row(
        "storm",
        "10,000 requests, plain and constrained, aborted at random: the tree holds all along",
        storm,
        "a lock is kept",
        TINY,
    ),
    Row(
        "grammars",
        "hostile grammars, regexes, schemas and tools are compiled or refused",
        grammars,
        "compiling breaks",
        TINY,
    ),
    Row("templates", "hostile templates stay in their sandbox", templates, "the sandbox is open", TINY),
    Row(
        "wire", "smuggling, chunks and header sets get the answers of a table", wire, "bad HTTP breaks", TINY
    ),
    Row("soak", "mixed traffic for 20 minutes: no error, and memory stays", soak, "requests are kept", TINY),
)
