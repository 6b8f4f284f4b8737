"""Beam search on an engine: over a fake device whose tokens depend on every page, and over a tiny model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from app.engine.beam_search import Beams, Ended, Found, Rules
from app.engine.job import BeamOptions
from app.engine.submit import LiveRun
from app.offline import LLM
from app.text.tokenizer import Tokenizer
from core.errors import ContextExceeded, Overloaded, RequestError
from core.plan import RowLogprobs, StepPlan, StepResult
from core.request import SamplingParams
from core.request.request import State
from core.types import FinishReason
from tests.rigs.beam import Model, plainly
from tests.rigs.executor import FakeExecutor
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server, Start
from tests.rigs.step_loop import PROMPT, VOCAB, Bench
from tests.rigs.tiny_model import build
from tests.rigs.tokenizer import JoinTemplate
from tests.rigs.wait import settle, until

END = 2
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


class Likely(FakeExecutor):
    """A fake whose log-probabilities are those of `model` for the tokens that a row sees through its
    pages."""

    model = Model(3, VOCAB)

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        slots = plan.sampling_slots.tolist()
        told = {row: self._row(slots[row]) for row in result.logprobs}
        return msgspec.structs.replace(result, logprobs=told)

    def _row(self, slot: int) -> RowLogprobs:
        positions = np.arange(self.length[slot])
        size = self._capabilities.page_size
        seen = self.pool[self.table[slot, positions // size], positions % size]
        return self.model.row(seen.tolist(), self.logprob_slots[slot])


class Said(Model):
    """The same model for tokens behind `PROMPT`."""

    def logprobs(self, tokens: Any) -> np.ndarray:
        return super().logprobs([*PROMPT.tolist(), *tokens])


def fitted(bench: Bench) -> Bench:
    """The bench with log-probabilities that mean something."""
    executor = bench.executor
    executor.__class__ = Likely
    return bench


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None, VOCAB, [END])


@pytest.fixture(params=[0, 1, 2])
async def bench(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    bench = fitted(Bench(tokenizer, depth=request.param))
    yield bench
    await settle()
    bench.scheduler.check_integrity()
    assert bench.submitter.idle
    bench.engine.close()


async def begin(bench: Bench, width: int, limit: int, told: int = -1, **job: Any) -> LiveRun:
    job = {"ignore_eos": False, "beam": BeamOptions(), **job}
    return await bench.start("a", limit, n=width, sampling=SamplingParams(logprobs=told), **job)


def said(bench: Bench, width: int) -> list[list[int]]:
    return [bench.tokens(f"a-{index}") for index in range(width)]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
async def test_the_engine_finds_what_the_plain_search_does(bench: Bench, penalty: float) -> None:
    run = await begin(bench, 3, 12, beam=BeamOptions(length_penalty=penalty, include_end=True))
    assert not bench.submitter.idle and [r.state for r in run.requests] == [State.DECODE] * 3
    await run.wait()
    rules = Rules(3, len(PROMPT), 12, penalty, frozenset({END}), -1)
    assert said(bench, 3) == [list(tokens) for tokens in plainly(Said(3, VOCAB), rules)]
    await settle()
    assert [r.state for r in run.requests] == [State.FINISHED] * 3
    assert [r.output for r in run.requests] == said(bench, 3)


async def test_a_round_computes_about_a_page(bench: Bench) -> None:
    prompt = np.arange(65, 165, dtype=np.int32)
    run = await begin(bench, 4, 10, prompt=prompt)
    await run.wait()
    chunks = [chunk for plan in bench.executor.plans for chunk in plan.chunks]
    size = bench.executor.capabilities.page_size
    assert len(chunks[0].tokens) == len(prompt)
    assert len(chunks) > 10 and all(len(chunk.tokens) <= size for chunk in chunks[1:])
    bench.pieces.clear()
    again = await begin(bench, 4, 1, prompt=prompt)
    await again.wait()
    assert again.requests[0].cached >= len(prompt) - size


async def test_answers_are_made_in_turns_of_their_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, those of a wide search take the event loop long."""
    found, turn = Beams._found, 0
    turns: list[int] = []

    def noted(beams: Beams, ended: Ended) -> Found:
        turns.append(turn)
        return found(beams, ended)

    monkeypatch.setattr(Beams, "_found", noted)
    waiting = asyncio.ensure_future((await begin(bench, 4, 3)).wait())
    while not waiting.done():
        turn += 1
        await asyncio.sleep(0)
    assert len(set(turns)) == len(turns) == 4


async def test_who_leaves_is_charged_for_what_was_made(tokenizer: Tokenizer) -> None:
    bench = fitted(Bench(tokenizer, eager=False))
    run = await begin(bench, 3, 12)
    for _ in range(6):
        await settle()
        bench.executor.complete(len(bench.executor.pending))
    await settle()
    run.abort()
    assert run.output_tokens == 3 * 6
    bench.executor.complete(len(bench.executor.pending))
    await until(lambda: bench.submitter.idle)
    bench.engine.close()


async def test_more_beams_than_rows_take_turns(tokenizer: Tokenizer) -> None:
    bench = fitted(Bench(tokenizer, rows=2))
    await (await begin(bench, 5, 6)).wait()
    rules = Rules(5, len(PROMPT), 6, 1.0, frozenset({END}), -1)
    assert said(bench, 5) == [list(t) for t in plainly(Said(3, VOCAB), rules)]
    assert max(plan.num_samples for plan in bench.executor.plans) <= 2
    bench.engine.close()


class Ending(Model):
    """An end of text is always second best."""

    def logprobs(self, tokens: Any) -> np.ndarray:
        values = super().logprobs(tokens)
        values[END] = np.sort(values)[-1] - 0.01
        return values


async def test_ends_are_told_as_the_client_asks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Likely, "model", Ending(3, VOCAB))
    for include, ended in ((False, 0), (True, 1)):
        run = await begin(bench, 2, 6, told=1, beam=BeamOptions(include_end=include))
        await run.wait()
        last = bench.pieces["a-0"][-1]
        assert last.finish is not None and (last.finish.reason, last.finish.matched) == (
            FinishReason.STOP,
            END,
        )
        tokens = bench.tokens("a-0")
        rows = [row for piece in bench.pieces["a-0"] for row in piece.logprobs or ()]
        assert len(rows) == len(tokens) and tokens.count(END) == ended
        await settle()
        bench.pieces.clear()
    run = await begin(bench, 2, 6, ignore_eos=True)
    await run.wait()
    assert [bench.reason(f"a-{i}") for i in range(2)] == [FinishReason.LENGTH] * 2
    assert [len(tokens) for tokens in said(bench, 2)] == [6, 6]


async def test_an_abort_ends_all_of_it(tokenizer: Tokenizer) -> None:
    bench = fitted(Bench(tokenizer, eager=False))
    await begin(bench, 3, 400)
    for _ in range(20):
        await settle()
        if bench.executor.pending:
            bench.executor.complete()
    assert not bench.pieces and not bench.submitter.idle
    assert bench.submitter.abort(["a"])
    await settle()
    while bench.executor.pending:
        bench.executor.complete()
        await settle()
    assert [bench.reason(f"a-{i}") for i in range(3)] == [FinishReason.ABORT] * 3
    assert bench.submitter.idle
    bench.scheduler.check_integrity()
    bench.engine.close()


async def test_a_full_queue_does_not_end_it(tokenizer: Tokenizer) -> None:
    bench = fitted(Bench(tokenizer, eager=False, rows=1, max_queued=2))
    run = await begin(bench, 3, 5)
    await settle()  # it has the only row
    for id in "xy":
        await bench.start(id, 1)
    with pytest.raises(Overloaded):
        await bench.start("z", 1)
    while not bench.submitter.idle:
        await settle()
        if bench.executor.pending:
            bench.executor.complete()
    await run.wait()
    assert [bench.reason(f"a-{i}") for i in range(3)] == [FinishReason.LENGTH] * 3
    bench.engine.close()


async def test_it_ends_when_it_has_run_too_long(tokenizer: Tokenizer) -> None:
    """An abort after that, as at the end of its connection, has no effect."""
    bench = fitted(Bench(tokenizer, eager=False, running_timeout=1e-6))
    run = await begin(bench, 3, 50)
    while not bench.submitter.idle:
        await settle()
        if bench.executor.pending:
            bench.executor.complete()
    await run.wait()
    for i in range(3):
        finish = bench.pieces[f"a-{i}"][-1].finish
        assert finish is not None and finish.message == "The request ran too long."
    run.abort()
    bench.scheduler.check_integrity()
    bench.engine.close()


async def test_what_cannot_begin_leaves_nothing_behind(bench: Bench) -> None:
    with pytest.raises(RequestError) as wide:
        await begin(bench, 65, 4)
    assert wide.value.param == "n"
    with pytest.raises(ContextExceeded):
        await begin(bench, 2, 510)
    with pytest.raises(RequestError):
        await begin(bench, 2, 0)
    assert not bench.pieces


async def test_a_lost_device_is_told(tokenizer: Tokenizer) -> None:
    bench = fitted(Bench(tokenizer, fail_at=3))
    run = await begin(bench, 2, 9)
    await run.wait()
    assert [bench.reason(f"a-{i}") for i in range(2)] == [FinishReason.ERROR] * 2
    bench.engine.close()


# -- through HTTP ----------------------------------------------------------------------------------


@pytest.fixture
async def real(start: Start, tokenizer: Tokenizer) -> AsyncIterator[tuple[Server, Bench]]:
    server = await start()
    bench = fitted(Bench(tokenizer))
    card = msgspec.structs.replace(CARD, vocab_size=VOCAB)
    server.service.ready(make_loaded(card, tokenizer, JoinTemplate(), bench.submitter))
    yield server, bench
    bench.engine.close()


ASKED = {"use_beam_search": True, "n": 3, "max_tokens": 5, "return_token_ids": True}


async def test_both_routes_answer_with_the_best_first(real: tuple[Server, Bench]) -> None:
    server, _ = real
    for path, body in ((COMPLETIONS, {"prompt": PROMPT.tolist()}), (CHAT, {"input_ids": PROMPT.tolist()})):
        answer = await server.ask(path, {**body, **ASKED, "temperature": 0.0, "seed": 7})
        rules = Rules(3, len(PROMPT), 5, 1.0, frozenset({END}), -1)
        best = [[t for t in tokens if t != END] for tokens in plainly(Said(3, VOCAB), rules)]
        assert [choice["token_ids"] for choice in answer["choices"]] == best
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer["usage"]["completion_tokens"] == sum(map(len, best))


async def test_log_probabilities_and_several_prompts(real: tuple[Server, Bench]) -> None:
    server, _ = real
    body = {"prompt": [[65, 66], [67, 68]], **ASKED, "n": 2, "logprobs": 4, "echo": True}
    answer = await server.ask(COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    told = answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == 2 + len(answer["choices"][0]["token_ids"])


async def test_a_client_that_goes_away_ends_the_search(real: tuple[Server, Bench]) -> None:
    server, bench = real
    body = {"prompt": "a", **ASKED, "max_tokens": 400, "ignore_eos": True}
    asking = asyncio.ensure_future(server.http.post(COMPLETIONS, json=body))
    await until(lambda: bool(bench.executor.plans))
    asking.cancel()
    await until(lambda: bench.submitter.idle)
    assert not bench.pieces


BESIDE: list[tuple[str, Any]] = [
    ("stream", True),
    ("top_p", 0.5),
    ("top_k", 3),
    ("min_p", 0.1),
    ("presence_penalty", 0.5),
    ("frequency_penalty", 0.5),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 1.0}),
    ("stop", "x"),
    ("stop_token_ids", [5]),
    ("stop_regex", "x+"),
    ("min_tokens", 1),
    ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}),
    ("response_format", {"type": "json_object"}),
    ("regex", "a+"),
    ("guided_choice", ["a"]),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [5]),
    ("custom_logit_processor", "ban"),
    ("return_hidden_states", True),
    ("logprob_token_ids", [5]),
]


@pytest.mark.parametrize(("name", "value"), BESIDE)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_a_search_cannot_honour_is_refused(
    server: Server, path: str, name: str, value: Any
) -> None:
    body = {"prompt": "a", "logprobs": 1} if path == COMPLETIONS else {"messages": HI, "logprobs": True}
    status, answer = await server.post(path, {**body, "use_beam_search": True, name: value})
    error = answer["error"]
    assert (status, error["param"]) == (400, name) and "use_beam_search" in error["message"]
    assert not server.engine.runs


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "length_penalty": 17}, "length_penalty"),
        (CHAT, {"messages": HI, "length_penalty": -17}, "length_penalty"),
        (CHAT, {"messages": HI, "length_penalty": "x"}, "length_penalty"),
        ("/generate", {"text": "a"}, "use_beam_search"),
        ("/v1/responses", {"input": "a"}, "use_beam_search"),
        ("/inference/v1/generate", {"token_ids": [5], "stream": True}, "stream"),
    ],
)
async def test_where_it_is_not_to_be_had(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    asked = {**fields, "use_beam_search": True}
    if path == "/inference/v1/generate":
        asked = {**fields, "sampling_params": {"use_beam_search": True}}
    assert (await server.refused(path, asked))["param"] == param
    assert not server.engine.runs


# -- a model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    made = build("llama", tmp_path_factory.mktemp("tiny"))
    words = Tokenizer.load(None, 256, [END])
    words._core.save(str(made.path / "tokenizer.json"))
    words.close()
    with LLM(str(made.path), dtype="float32", kv_tokens=4096, device="cpu") as llm:
        yield llm, made.reference


@torch.no_grad()
def continuations(model: Any, prompt: list[int], vocab: int) -> dict[tuple[int, ...], float]:
    """Every continuation of one or two tokens that can be an answer of at most two: its score."""
    first = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    both = torch.tensor([[*prompt, token] for token in range(vocab)])
    second = model(both).logits[:, -1].log_softmax(-1)
    length = len(prompt)
    scores = {(END,): float(first[END]) / length}
    for a, b in itertools.product(range(vocab), repeat=2):
        if a != END:
            scores[a, b] = float(first[a] + second[a, b]) / (length + (1 if b == END else 2))
    return scores


def test_a_model_s_best_continuations_of_all(tiny: tuple[LLM, Any]) -> None:
    """64 beams hold every first token that the best answers begin with: checked against all 65,281."""
    llm, model = tiny
    prompt = [65, 66, 67, 68, 69, 70]
    asked = {"use_beam_search": True, "n": 64, "max_tokens": 2, "include_stop_str_in_output": True}
    (output,) = llm.generate(prompt, asked)
    scores = continuations(model, prompt, 256)
    best = sorted(scores, key=lambda tokens: scores[tokens], reverse=True)[:10]
    assert [tuple(choice.token_ids) for choice in output.choices[:10]] == best


def test_one_beam_is_greedy_and_a_wider_search_no_worse(tiny: tuple[LLM, Any]) -> None:
    llm, _ = tiny
    prompt = [80, 81, 82]
    greedy = llm.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True)[0]
    one = {"use_beam_search": True, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    single, wide = (llm.generate(prompt, one, n=n)[0] for n in (1, 8))
    assert single.token_ids == greedy.token_ids
    sums = [sum(output.choices[0].logprobs["token_logprobs"]) for output in (single, wide)]
    assert sums[1] >= sums[0]
    with pytest.raises(RequestError, match="stream"):
        list(llm.stream(prompt, one))
