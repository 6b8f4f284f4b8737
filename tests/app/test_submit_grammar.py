"""A job's constraint on its way to the queue: compiled before, cancellable, an error of that job only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.engine.job import Job
from app.engine.submit import Submitter
from app.text.tokenizer import Tokenizer
from app.warning import warnings
from core.clock import monotonic
from core.errors import Aborted, RequestError, Unavailable
from core.grammar import GrammarSpec
from core.request import SamplingParams
from tests.rigs.compiler import FakeCompiler
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.wait import PATIENCE

END = 2
SPEC = GrammarSpec("regex", "a+", "regex")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tokenizer = Tokenizer.load(None, VOCAB, [END])
    made = Bench(tokenizer)
    compiler = FakeCompiler()
    made.submitter = Submitter(made.replicas, tokenizer, monotonic, compiler)
    made.compiler = compiler  # type: ignore[attr-defined]
    yield made
    made.engine.close()


def compiler_of(bench: Bench) -> FakeCompiler:
    found: FakeCompiler = bench.compiler  # type: ignore[attr-defined]
    return found


async def test_nothing_is_queued_before_the_grammar_is_there(bench: Bench) -> None:
    starting = asyncio.ensure_future(bench.start("a", n=3, grammar=SPEC))
    await asyncio.sleep(0)
    assert bench.scheduler.idle
    compiler = compiler_of(bench)
    compiler.ready.set()
    run = await starting
    assert compiler.asked == [SPEC], "one compile for all choices"
    assert all(request.grammar is compiler.grammar for request in run.requests)
    await run.wait()


async def test_a_refusal_leaves_nothing_behind(bench: Bench) -> None:
    compiler = compiler_of(bench)
    compiler.ready.set()
    compiler.error = RequestError("no such regex", "regex")
    with pytest.raises(RequestError, match="no such regex"):
        await bench.start("a", grammar=SPEC)
    compiler.error = None
    run = await bench.start("a", grammar=SPEC)  # the id is free again
    await run.wait()


async def test_what_a_grammar_does_not_hold_is_told(bench: Bench) -> None:
    compiler = compiler_of(bench)
    compiler.ready.set()
    compiler.grammar.warnings = ("'not' at #", "Unknown format: topic")
    with warnings() as said:
        await (await bench.start("a", grammar=SPEC)).wait()
    assert said == ["'regex' is not held to all of its schema: 'not' at #, Unknown format: topic."]


async def test_a_client_that_goes_away_takes_its_compile_along(bench: Bench) -> None:
    starting = asyncio.ensure_future(bench.start("a", grammar=SPEC))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert compiler_of(bench).cancelled == 1
    assert bench.submitter.idle


@pytest.mark.parametrize("message", [None, "The server is shutting down."])
async def test_an_abort_reaches_a_job_that_is_being_compiled(bench: Bench, message: str | None) -> None:
    starting = asyncio.ensure_future(bench.start("a", grammar=SPEC))
    await asyncio.sleep(0)
    if message is None:
        assert bench.submitter.abort(["a"])
    else:
        assert bench.submitter.abort_all(message) == 1
    with pytest.raises(Aborted if message is None else Unavailable):
        await starting
    assert compiler_of(bench).cancelled == 1
    assert bench.submitter.idle
    assert bench.executor.plans == []


async def test_an_abort_reaches_a_job_that_is_being_encoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = asyncio.Event()

    async def encode(*_: object) -> object:
        encoding.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(Tokenizer, "encode_async", encode)
    job = Job(id="a", prompt="a text", max_tokens=4, sampling=SamplingParams())
    starting = asyncio.ensure_future(bench.submitter.start(job, lambda index, piece: None))
    await encoding.wait()
    assert bench.submitter.abort(["a"])
    with pytest.raises(Aborted):
        await asyncio.wait_for(starting, PATIENCE)
    assert bench.submitter.idle
    assert bench.executor.plans == []


async def test_an_abort_at_the_last_moment_is_not_lost(bench: Bench) -> None:
    starting = asyncio.ensure_future(bench.start("a", grammar=SPEC))
    await asyncio.sleep(0)
    compiler_of(bench).ready.set()  # it is complete, but nobody has been told yet
    assert bench.submitter.abort(["a"])
    with pytest.raises(Aborted):
        await starting
    assert bench.submitter.idle


async def test_a_client_that_leaves_an_aborted_job_is_cancelled(bench: Bench) -> None:
    starting = asyncio.ensure_future(bench.start("a", grammar=SPEC))
    await asyncio.sleep(0)
    bench.submitter.abort(["a"])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert bench.submitter.idle


async def test_without_a_compiler_constraints_are_refused(bench: Bench) -> None:
    tokenizer = Tokenizer.load(None, VOCAB, [END])
    bench.submitter = Submitter(bench.replicas, tokenizer, monotonic)
    with pytest.raises(RequestError) as caught:
        await bench.start("a", grammar=SPEC)
    assert (caught.value.param, caught.value.code) == ("regex", "unsupported")


async def test_ends_are_put_off_but_never_forgotten(bench: Bench) -> None:
    """`ignore_eos` holds the end down as min_tokens does: a complete grammar has no other token."""
    compiler_of(bench).ready.set()
    for id, stops, least in (("a", frozenset[int](), 8), ("b", frozenset({7}), 0)):
        run = await bench.start(id, grammar=SPEC, sampling=SamplingParams(stop_ids=stops))
        params = run.requests[0].params
        assert params.stop_ids == stops | {END}
        assert params.min_tokens == least
        await run.wait()
