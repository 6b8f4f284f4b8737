"""A thinking cut in the real engine, over a fake device whose text depends on every token before."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from app.api.request.hidden import last_state
from app.engine.job import Job, Piece
from app.engine.reasoning_budget import Watch, WatchedRun, Watcher
from app.parsers.reading import Reading
from app.parsers.registry import REASONING
from app.text.tokenizer import Tokenizer
from core.errors import Unavailable
from core.request.params import Hidden, SamplingParams
from core.types import FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, PROMPT, VOCAB, Bench
from tests.rigs.wait import settle

CLOSING = b"\n</think>\n\n"
READING = Reading(reasoning=REASONING["think"], inside=True)


class Watched:
    """A watched run on a bench, and what it said."""

    def __init__(self, bench: Bench, tokenizer: Tokenizer, budget: int | None = 5) -> None:
        self.bench = bench
        self.watcher = Watcher(bench.submitter, tokenizer, Watch(reading=READING, budget=budget))
        self.pieces: dict[int, list[Piece]] = {}

    async def start(
        self, max_tokens: int | None = 40, n: int = 1, sampling: SamplingParams = GREEDY
    ) -> WatchedRun:
        job = Job(id="a", prompt=PROMPT, sampling=sampling, ignore_eos=True, max_tokens=max_tokens, n=n)
        run = await self.watcher.start(job, self.take)
        assert isinstance(run, WatchedRun)
        return run

    def take(self, index: int, piece: Piece) -> None:
        seen = self.pieces.setdefault(index, [])
        assert not seen or seen[-1].finish is None, "a piece after the last one"
        seen.append(piece)

    def tokens(self, index: int = 0) -> list[int]:
        return [token for piece in self.pieces[index] for token in piece.tokens]

    def reason(self, index: int = 0) -> FinishReason:
        finish = self.pieces[index][-1].finish
        assert finish is not None
        return finish.reason


@pytest.mark.parametrize("n", [1, 3])
async def test_what_follows_a_cut_is_what_the_model_says_to_it(
    bench: Bench, tokenizer: Tokenizer, n: int
) -> None:
    watched = Watched(bench, tokenizer)
    run = await watched.start(n=n)
    await run.wait()
    await settle()
    for index in range(n):
        tokens = watched.tokens(index)
        at = bytes(min(token, 255) for token in tokens).index(CLOSING)
        thought = tokens[:at]
        assert at >= 5 and thought == oracle(PROMPT.tolist(), at, VOCAB)
        end = at + len(CLOSING)
        assert tokens[end:] == oracle([*PROMPT.tolist(), *tokens[:end]], 40 - end, VOCAB)
        assert watched.reason(index) is FinishReason.LENGTH and len(tokens) == 40
        finish = run.finish(index)  # and not the abort of the request that was cut
        assert finish is not None and finish.reason is FinishReason.LENGTH
    assert run.reasoning_tokens == at * n
    assert run.prompt.tolist() == PROMPT.tolist() and run.choices == n
    # Prompt and thinking were in the tree: only the closing mark was new.
    assert bench.scheduler.statistics().cached_tokens >= 4 * n


@pytest.mark.parametrize("hidden", ["output", "all"])
async def test_the_last_hidden_state_is_found_behind_a_cut(
    bench: Bench, tokenizer: Tokenizer, hidden: Hidden
) -> None:
    """The last token was sampled and not run, so the last hidden state belongs to the token before it. Tokens
    after a stop string do not count."""
    watched = Watched(bench, tokenizer)
    run = await watched.start(sampling=msgspec.structs.replace(GREEDY, hidden=hidden))
    await run.wait()
    await settle()
    tokens = watched.tokens()
    for told in (40, 37):
        assert last_state(run, 0, told) == [tokens[told - 2], len(PROMPT) + told - 2]


async def test_without_a_budget_it_only_counts(bench: Bench, tokenizer: Tokenizer) -> None:
    watched = Watched(bench, tokenizer, None)
    run = await watched.start(12)
    await run.wait()
    await settle()
    assert watched.tokens() == oracle(PROMPT.tolist(), 12, VOCAB) and run.reasoning_tokens == 12


async def test_all_that_fits_is_all_that_fits_after_a_cut(bench: Bench, tokenizer: Tokenizer) -> None:
    watched = Watched(bench, tokenizer)
    run = await watched.start(None)
    await run.wait()
    await settle()
    assert len(watched.tokens()) == 512 - len(PROMPT) and watched.reason() is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_an_abort_at_any_time_frees_everything(bench: Bench, tokenizer: Tokenizer, turns: int) -> None:
    watched = Watched(bench, tokenizer)
    run = await watched.start(200, n=2)
    for _ in range(turns):
        await asyncio.sleep(0)
    run.abort()
    run.abort()
    await run.wait()
    await settle()
    assert [watched.reason(index) for index in range(2)] == [FinishReason.ABORT] * 2


async def test_a_server_that_drains_lets_it_go_on(bench: Bench, tokenizer: Tokenizer) -> None:
    watched = Watched(bench, tokenizer)
    run = await watched.start()
    bench.submitter.drain()
    while watched.pieces.get(0, [Piece("", [])])[-1].finish is None:
        assert not bench.submitter.idle  # or the drain would end here
        await asyncio.sleep(0)
    await run.wait()
    await settle()
    assert watched.reason() is FinishReason.LENGTH and len(watched.tokens()) == 40
    with pytest.raises(Unavailable):
        await watched.start()


async def test_it_goes_on_beside_a_request_with_the_id_of_what_follows(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    watched = Watched(bench, tokenizer)
    run = await watched.start(n=2)
    # The requests after the cuts are named after the choices, which a client may name its own after.
    others = [await bench.start(id, 300) for id in ("a-0", "a-1", "a-1-0")]
    await run.wait()
    assert [watched.reason(index) for index in range(2)] == [FinishReason.LENGTH] * 2
    assert not any(other.finish(0) for other in others)
    assert bench.submitter.abort(["a"]) == 3
    await settle()


async def test_a_failed_device_ends_it_with_the_reason(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, fail_at=12)
    watched = Watched(bench, tokenizer)
    run = await watched.start()
    await run.wait()
    finish = watched.pieces[0][-1].finish
    assert finish is not None and (finish.reason, finish.message) == (FinishReason.ERROR, "injected")
    bench.engine.close()
