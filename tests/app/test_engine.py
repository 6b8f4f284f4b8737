"""The step loop against a fake device: order, stops, failures, and what every stream is promised."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from app.engine.backlog import SLICE, SLICE_TOKENS
from app.engine.job import Job, TextOptions
from app.engine.loop import BACKLOG
from app.engine.stream_interval import MOST, StreamInterval
from app.engine.submit import Submitter
from app.text.tokenizer import Tokenizer
from core.clock import monotonic
from core.errors import ContextExceeded, Overloaded, RequestError, Unavailable
from core.plan import StepPlan
from core.request import Request, SamplingParams
from core.types import FinishReason
from tests.rigs import vocabularies
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, PROMPT, VOCAB, Bench
from tests.rigs.wait import settle


async def test_every_choice_gets_the_same_text_at_every_depth(bench: Bench) -> None:
    run = await bench.start("a", 12, n=3)
    await run.wait()
    await settle()
    expected = oracle(PROMPT.tolist(), 12, VOCAB)
    for index in range(3):
        assert bench.tokens(f"a-{index}") == expected
        assert bench.reason(f"a-{index}") is FinishReason.LENGTH
    assert [r.params.seed for r in run.requests] == [run.requests[0].params.seed + i for i in range(3)]


async def test_a_stop_string_ends_the_request_and_takes_back_what_ran_ahead(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    full = oracle(PROMPT.tolist(), 40, VOCAB)
    text = tokenizer.decode(full)
    stop = text[10:13]
    run = await bench.start("a", 40, text=TextOptions(stop=(stop,)))
    await run.wait()
    await settle()
    assert "".join(piece.text for piece in bench.pieces["a-0"]) == text[: text.index(stop)]
    finish = bench.pieces["a-0"][-1].finish
    assert finish is not None and finish.matched == stop
    assert run.requests[0].output == bench.tokens("a-0")


@pytest.mark.parametrize("least", [0, 1, 12, 20, 40])
async def test_a_stop_string_counts_behind_min_tokens(bench: Bench, tokenizer: Tokenizer, least: int) -> None:
    """The stop string counts as in vLLM since its issue 21987."""
    full = oracle(PROMPT.tolist(), 40, VOCAB)
    stop = next(chr(token) for token in full if 32 < token < 127 and full.count(token) > 1)
    at = next((n for n, token in enumerate(full) if token == ord(stop) and n >= least), None)
    sampling = msgspec.structs.replace(GREEDY, min_tokens=least)
    run = await bench.start("a", 40, sampling=sampling, text=TextOptions(stop=(stop,), include_stop=True))
    await run.wait()
    await settle()
    assert bench.tokens("a-0") == full[: None if at is None else at + 1]
    assert bench.reason("a-0") is (FinishReason.LENGTH if at is None else FinishReason.STOP)
    assert "".join(piece.text for piece in bench.pieces["a-0"]) == tokenizer.decode(bench.tokens("a-0"))


async def test_a_text_with_a_token_that_only_the_tokenizer_has_is_refused(bench: Bench) -> None:
    core = vocabularies.byte_level()
    core.add_tokens([f"<{i}>" for i in range(VOCAB)])
    bench.submitter = Submitter(bench.replicas, Tokenizer(core, {}), monotonic)
    with pytest.raises(
        RequestError, match=rf"'prompt' has token id \d+ \(<299>\); .* 0 to {VOCAB - 1}"
    ) as error:
        await bench.start("a", prompt="hello <299>")
    assert error.value.param == "prompt"
    assert bench.scheduler.idle


async def test_the_pieces_of_an_unfinished_text_concatenate_to_its_decoding(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    run = await bench.start("a", 60)
    await run.wait()
    text = "".join(piece.text for piece in bench.pieces["a-0"])
    assert text == tokenizer.decode(oracle(PROMPT.tolist(), 60, VOCAB))


async def test_prompt_logprobs_outlive_the_run(bench: Bench) -> None:
    prompt = np.arange(30, dtype=np.int32)
    run = await bench.start("a", 2, prompt=prompt, sampling=SamplingParams(temperature=0, prompt_logprobs=0))
    await run.wait()
    await settle()
    values = [v for entry in run.prompt_logprobs() for v in entry.values.tolist()]
    assert values == [float(i) for i in range(1, 30)]


async def test_logprobs_stay_aligned_with_tokens_to_the_stop_token(bench: Bench) -> None:
    expected = oracle(PROMPT.tolist(), 9, VOCAB)
    sampling = SamplingParams(temperature=0, logprobs=0, stop_ids=frozenset({expected[-1]}))
    run = await bench.start("a", 30, sampling=sampling)
    await run.wait()
    for piece in bench.pieces["a-0"]:
        assert len(piece.logprobs or ()) == len(piece.tokens)
    assert bench.tokens("a-0") == expected[: expected.index(expected[-1]) + 1]


async def test_abort_gives_one_last_piece_and_frees_at_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 100, n=2)
    await settle()
    bench.executor.complete()
    await settle()
    run.abort()
    assert bench.scheduler.running == 0
    await run.wait()
    assert [bench.reason(f"a-{i}") for i in range(2)] == [FinishReason.ABORT] * 2
    await bench.complete()
    assert bench.submitter.idle


async def test_plans_are_submitted_before_anything_is_delivered(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=SLICE * 2)
    events: list[str] = []
    submit = bench.executor.submit

    def watched(plan: StepPlan) -> None:
        events.append(f"submit {plan.step}")
        submit(plan)

    bench.executor.submit = watched  # type: ignore[method-assign]
    letter = next(i for i in range(VOCAB) if oracle([i], 1, VOCAB)[0] in range(97, 123))
    prompt = np.asarray([letter], np.int32)  # its first token is a letter: text that is certain at once
    job = Job(id="a", prompt=prompt, max_tokens=20, n=SLICE * 2, sampling=GREEDY, ignore_eos=True)
    run = await bench.submitter.start(job, lambda index, piece: events.append("piece"))
    await settle()
    assert events == ["submit 0", "submit 1"]  # one step runs, one is planned ahead
    bench.executor.complete()
    await settle()
    assert events[2] == "submit 2"
    assert events[3:] and set(events[3:]) == {"piece"}
    run.abort()
    bench.executor.complete(len(bench.executor.pending))
    await run.wait()


async def test_a_burst_of_jobs_goes_into_one_step(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    runs = await asyncio.gather(*(bench.start(f"j{i}", 3) for i in range(5)))
    await asyncio.gather(*(run.wait() for run in runs))
    assert len(bench.executor.plans[0].chunks) == 5


async def test_planning_pauses_while_delivery_lags_behind(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, rows=4 * SLICE, pages=4_000)
    longest = 0
    run = await bench.start("a", 100, n=4 * SLICE)
    while not all(request.finish for request in run.requests):
        longest = max(longest, bench.engine._backlog.waiting)
        await asyncio.sleep(0)
    await run.wait()
    assert 0 < longest <= BACKLOG + 1


@pytest.mark.parametrize("logprobs", [-1, 0])
@pytest.mark.parametrize("single", [False, True])
async def test_steps_that_wait_for_the_loop_are_one_event(
    tokenizer: Tokenizer, single: bool, logprobs: int
) -> None:
    """A request has one event for all steps that wait, unless its reader needs single tokens. The device here
    is faster than the loop."""
    bench = Bench(tokenizer, rows=2 * SLICE)
    sampling = SamplingParams(temperature=0, logprobs=logprobs)
    run = await bench.start("a", 40, n=2 * SLICE, sampling=sampling, single_tokens=single)
    await run.wait()
    sizes: set[int] = set()
    for index in range(2 * SLICE):
        assert bench.tokens(f"a-{index}") == oracle(PROMPT.tolist(), 40, VOCAB)
        assert bench.reason(f"a-{index}") is FinishReason.LENGTH
        for piece in bench.pieces[f"a-{index}"]:
            assert len(piece.logprobs or ()) == (0 if logprobs < 0 else len(piece.tokens))
            sizes.add(len(piece.tokens))
    assert (max(sizes) > 2) is not single  # two may be the halves of a character


@pytest.mark.parametrize("logprobs", [-1, 0])
@pytest.mark.parametrize("interval", [2, 3])
async def test_a_busy_loop_sends_the_tokens_of_some_steps_as_one_event(
    tokenizer: Tokenizer, interval: int, logprobs: int
) -> None:
    """Each request's first and last tokens come at once. Steps end one by one here; rows start at different
    ones."""
    bench = Bench(tokenizer, eager=False, rows=2 * SLICE + 1, pages=1_000)
    bench.engine.set_stream_interval(interval)
    sampling = SamplingParams(temperature=0, logprobs=logprobs)
    first = await bench.start("a", 20, n=2 * SLICE, sampling=sampling)
    late = None
    for step in range(20):
        await settle()
        bench.executor.complete()
        await settle()
        if step == 4:
            late = await bench.start("b", 7, sampling=sampling)
        told, made = delivered(bench, first.requests[0]), min(step + 1, 20)
        assert made - interval < told <= made
        assert told == made or made not in (1, 20)
    assert late is not None
    await asyncio.gather(first.wait(), late.wait())
    for name, tokens in (("a-0", 20), (f"a-{2 * SLICE - 1}", 20), ("b-0", 7)):
        pieces = bench.pieces[name]
        assert bench.tokens(name) == oracle(PROMPT.tolist(), tokens, VOCAB)
        assert len(pieces) <= 2 + -(-(tokens - 2) // interval)
        for piece in pieces:
            assert len(piece.logprobs or ()) == (0 if logprobs < 0 else len(piece.tokens))


def delivered(bench: Bench, request: Request) -> int:
    """Tokens that reached the stream of a request."""
    stream = bench.engine._backlog._streams.get(request)
    return len(request.output) if stream is None else stream.count


async def test_what_a_busy_loop_holds_back_goes_out_when_no_step_follows(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    bench.engine.set_stream_interval(MOST)
    run = await bench.start("a", 20)
    await settle()
    bench.executor.complete()
    await settle()
    bench.engine.paused = True
    await bench.complete()
    assert delivered(bench, run.requests[0]) == len(run.requests[0].output) > 1
    assert bench.engine._backlog.empty
    bench.engine.resume()
    await settle()
    while not run.requests[0].finish:
        await bench.complete()
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 20, VOCAB)


async def test_steps_of_prompts_alone_hold_no_tokens_back(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, depth=0, eager=False, prefill_first=True, step_tokens=16)
    bench.engine.set_stream_interval(MOST)
    run = await bench.start("a", 20)
    for _ in range(2):
        await settle()
        bench.executor.complete()
        await settle()
    other = await bench.start("b", 2, prompt=np.arange(100, dtype=np.int32))
    for _ in range(MOST + 1):
        await settle()
        bench.executor.complete()
    await settle()
    assert not bench.executor.plans[-1].decode_slots.size and "b-0" not in bench.pieces
    assert delivered(bench, run.requests[0]) == len(run.requests[0].output) > 1
    run.abort()
    other.abort()
    await settle()
    bench.executor.complete(len(bench.executor.pending))
    await asyncio.gather(run.wait(), other.wait())


def test_events_have_more_tokens_the_busier_the_loop_is() -> None:
    interval, now, used, seen = StreamInterval(5.0, 1.0), 5.0, 1.0, []
    for share in (0.2, 0.7, 0.5, 0.7, 0.9, 1.0, 0.5, 0.4, 0.2, 0.0):
        now, used = now + 0.25, used + 0.25 * share
        seen.append(interval.measure(now, used))
    assert seen == [1, 2, 2, 3, 3, 3, 3, 2, 1, 1]


async def test_a_slice_has_few_tokens_however_many_steps_wait(tokenizer: Tokenizer) -> None:
    """Rows have drafts, and their tokens are searched for a stop one by one."""
    bench = Bench(tokenizer, depth=2, drafts=7, rows=3 * SLICE, pages=3_000)
    deliver, seen, slices = bench.engine._backlog.deliver, 0, list[int]()

    def counted() -> None:
        nonlocal seen
        deliver()
        now = sum(len(piece.tokens) for pieces in bench.pieces.values() for piece in pieces)
        slices.append(now - seen)
        seen = now

    bench.engine._backlog.deliver = counted  # type: ignore[method-assign]
    run = await bench.start("a", 40, n=3 * SLICE, text=TextOptions(stop=("\0\0",)))
    await run.wait()
    assert seen == 3 * SLICE * 40
    assert max(slices) <= SLICE_TOKENS


async def test_a_stop_string_that_the_last_token_completes_is_the_reason(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    tokens = oracle(PROMPT.tolist(), 40, VOCAB)
    text = next(
        text for n in range(5, 40) if len(text := tokenizer.decode(tokens[:n])) > 5 and text[-1] == ">"
    )
    count = next(n for n in range(5, 40) if tokenizer.decode(tokens[:n]) == text)
    run = await bench.start("a", count, text=TextOptions(stop=(text[-3:],)))
    await run.wait()
    assert bench.reason("a-0") is FinishReason.STOP
    assert run.requests[0].finish == bench.pieces["a-0"][-1].finish


async def test_a_stop_string_is_the_reason_though_the_last_token_waits_behind_it(
    tokenizer: Tokenizer,
) -> None:
    """Both are delivered at once: the device is faster than the loop."""
    text = tokenizer.decode(oracle(PROMPT.tolist(), 40, VOCAB))
    bench = Bench(tokenizer, rows=4 * SLICE, pages=2_000)
    run = await bench.start("a", 14, n=4 * SLICE, text=TextOptions(stop=(text[9:12],)))
    await run.wait()
    for index, request in enumerate(run.requests):
        assert "".join(piece.text for piece in bench.pieces[f"a-{index}"]) == text[:9]
        assert request.finish == bench.pieces[f"a-{index}"][-1].finish
        assert request.output == bench.tokens(f"a-{index}")


async def test_a_failed_step_ends_every_stream_with_the_reason(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, fail_at=4, rows=2)
    reasons: list[str] = []
    bench.replicas.on_failure = reasons.append
    runs = [await bench.start(f"j{i}", 50) for i in range(4)]  # two run, two wait
    await asyncio.gather(*(run.wait() for run in runs))
    for i in range(4):
        finish = bench.pieces[f"j{i}-0"][-1].finish
        assert finish is not None
        assert (finish.reason, finish.message) == (FinishReason.ERROR, "injected")
    assert reasons == ["injected"]
    with pytest.raises(Unavailable):
        await bench.start("late")


async def test_an_id_is_taken_while_its_job_lives(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a")
    with pytest.raises(RequestError) as error:
        await bench.start("a")
    assert error.value.param == "request_id"
    run.abort()
    await run.wait()
    await settle()
    bench.executor.complete(len(bench.executor.pending))
    again = await bench.start("a")
    again.abort()


@pytest.mark.parametrize(
    ("job", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": np.asarray([VOCAB], np.int32)}, "prompt"),
        ({"prompt": np.asarray([-1], np.int32)}, "prompt"),
        ({"prompt": np.zeros(0, np.int32)}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0)}, "top_p"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(stop_ids=frozenset({VOCAB}))}, "stop_token_ids"),
        ({"text": TextOptions(stop=("",))}, "stop"),
        ({"text": TextOptions(stop_regex=("(",))}, "stop_regex"),
        ({"max_tokens": 600}, "prompt"),
        ({"prompt": np.zeros(512, np.int32), "max_tokens": None}, "prompt"),
    ],
)
async def test_a_wrong_job_names_its_field_and_queues_nothing(
    tokenizer: Tokenizer, job: dict[str, object], param: str
) -> None:
    bench = Bench(tokenizer)
    with pytest.raises(RequestError) as error:
        await bench.start("a", **job)  # type: ignore[arg-type]
    assert error.value.param == param
    assert bench.submitter.idle
    assert bench.executor.plans == []


async def test_a_full_queue_refuses_and_forgets_the_id(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=1, max_queued=2)
    runs = [await bench.start("first")]
    await settle()
    runs += [await bench.start(f"w{i}") for i in range(2)]
    for _ in range(2):
        with pytest.raises(Overloaded):
            await bench.start("late")
    for run in runs:
        run.abort()
        await run.wait()


async def test_what_does_not_fit_the_context_is_an_overflow(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    with pytest.raises(ContextExceeded, match=r"^This model's maximum context length is 512 tokens"):
        await bench.start("a", 510)
    run = await bench.start("b", None)
    assert run.requests[0].params.max_tokens == 509
    await run.wait()


async def test_a_bound_is_cut_to_the_context(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for asked, given in ((600, 509), (5, 5)):
        run = await bench.start(f"a{asked}", asked, cut_to_fit=True)
        assert run.requests[0].params.max_tokens == given
        await run.wait()
    with pytest.raises(ContextExceeded):
        await bench.start("b", 600, cut_to_fit=True, prompt=np.zeros(512, np.int32))


async def test_a_long_prompt_can_be_cut_from_the_left(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    run = await bench.start("a", 2, prompt=np.arange(40, dtype=np.int32), truncate_prompt=10)
    assert run.prompt.tolist() == list(range(30, 40))
    await run.wait()


async def test_draining_takes_nothing_new_and_lets_the_rest_finish(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 3)
    bench.submitter.drain()
    with pytest.raises(Unavailable):
        await bench.start("b")
    while bench.reason("a-0") is None if "a-0" in bench.pieces else True:
        await settle()
        bench.executor.complete(len(bench.executor.pending))
    await run.wait()
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 3, VOCAB)


async def test_statistics_count_what_happened(bench: Bench) -> None:
    run = await bench.start("a", 6)
    await run.wait()
    await settle()
    (stats,) = bench.submitter.statistics()
    assert stats.scheduler.output_tokens == 6
    assert stats.finished == {"length": 1}
    assert sum(stats.histograms.ttft.counts) == sum(stats.histograms.end_to_end.counts) == 1
    assert bench.submitter.flush()
    assert bench.engine.statistics().scheduler.cache.cached == 0


async def test_rows_of_several_tokens_are_counted_as_rows(tokenizer: Tokenizer) -> None:
    """Steps and gaps between tokens are of requests, however many tokens a step brings each."""
    bench = Bench(tokenizer, drafts=3)
    run = await bench.start("a", 60)
    await run.wait()
    await settle()
    told = bench.submitter.timeline("a")
    assert told is not None and isinstance(told["steps"], int)
    assert told["mean_rows"] == 1.0 and 15 <= told["steps"] < 50
    assert sum(bench.engine.statistics().histograms.inter_token.counts) < told["steps"]
    bench.engine.close()


async def test_jobs_of_owners_take_turns(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=1)
    runs = [await bench.start(f"a{i}", 4, owner="a") for i in range(3)]
    runs += [await bench.start("b", 4, owner="b"), await bench.start("c", 4, n=2, owner="c")]
    while not bench.engine.idle:
        await bench.complete()
    order = sorted((r for run in runs for r in run.requests), key=lambda request: request.started_at)
    assert [r.id for r in order] == ["a0-0", "b-0", "c-0", "a1-0", "c-1", "a2-0"]
