"""`app.offline.LLM` over a tiny model with random weights: the real engine, no server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from app import offline
from app.engine.adapters import Adapters
from app.offline import LLM, Output
from app.process import begin
from bench.chaos.tiny import dummy_model
from core.errors import ConfigError, ContextExceeded, EngineFailed, RequestError, Unavailable
from tests.rigs.wait import PATIENCE

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
HI = [{"role": "user", "content": "hi"}]


def load(directory: Path, **settings: Any) -> LLM:
    model = dummy_model(directory)
    template = str(model / "template.jinja")
    return LLM(
        str(model), device="cpu", load_format="dummy", chat_template=template, kv_tokens=16384, **settings
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load(tmp_path_factory.mktemp("dummy")) as loaded:
        yield loaded


def until_idle(llm: LLM) -> None:
    """Wait until all requests are gone: an ended one leaves at the engine's next turn, before a request that
    runs to its end."""
    for _ in range(200):
        if llm._live.loaded.engine.idle:
            return
        llm.generate("x", max_tokens=1)
    raise AssertionError("requests are still there")


def test_one_prompt_many_prompts_and_ids_agree(llm: LLM) -> None:
    single = llm.generate("hello", GREEDY)
    assert len(single) == 1 and len(single[0].token_ids) == 12
    assert single[0].finish_reason == "length"
    assert single[0].usage["completion_tokens"] == 12
    many = llm.generate(["hello", "other", "hello"], **GREEDY)
    assert [output.text for output in many][::2] == [single[0].text] * 2
    ids = llm._live.loaded.tokenizer.encode("hello").tolist()
    for same in (ids, np.array(ids)):
        assert llm.generate(same, GREEDY)[0].token_ids == single[0].token_ids
    assert [o.token_ids for o in llm.generate([ids, ids], GREEDY)] == [single[0].token_ids] * 2
    assert llm.generate([]) == []


@pytest.mark.parametrize("token", [7, "7"])
def test_token_ids_of_a_bias_may_be_numbers(llm: LLM, token: int | str) -> None:
    assert llm.generate("a", GREEDY, max_tokens=3, logit_bias={token: 100})[0].token_ids == [7, 7, 7]


def test_keywords_go_over_the_mapping_and_n_gives_choices(llm: LLM) -> None:
    output = llm.generate("a", GREEDY, max_tokens=3, n=2, temperature=1, seed=5, logprobs=1)[0]
    assert [len(choice.token_ids) for choice in output.choices] == [3, 3]
    assert [choice.index for choice in output.choices] == [0, 1]
    assert output.choices[0].logprobs is not None
    again = llm.generate("a", GREEDY, max_tokens=3, n=2, temperature=1, seed=5)[0]
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in output.choices]


def test_chat_answers_conversations(llm: LLM) -> None:
    one = llm.chat(HI, GREEDY)
    assert one[0].choices[0].message is not None
    assert one[0].choices[0].message["role"] == "assistant"
    assert [o.text for o in llm.chat([HI, HI], GREEDY)] == [one[0].text] * 2


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0]
    pieces = list(llm.stream("abc", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    chat = list(llm.stream(messages=HI, **GREEDY))
    assert "".join(piece.text for piece in chat) == llm.chat(HI, GREEDY)[0].text


def test_hidden_states_of_answers_and_streams(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY, n=2, return_hidden_states=True)[0]
    states = [choice.hidden_states for choice in whole.choices]
    assert states[0] is not None and len(states[0]) == llm._live.loaded.card.hidden_size
    pieces = list(llm.stream("abc", GREEDY, n=2, return_hidden_states=True))
    last = {piece.index: piece for piece in pieces if piece.finish_reason}
    assert [last[index].hidden_states for index in (0, 1)] == states
    assert all(piece.hidden_states is None for piece in pieces if not piece.finish_reason)
    assert llm.generate("abc", GREEDY)[0].choices[0].hidden_states is None


def test_a_stream_of_more_hidden_states_than_an_answer_holds_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.request.hidden.MAX_NUMBERS", 100)
    for ask in (llm.generate, lambda *given, **named: list(llm.stream(*given, **named))):
        with pytest.raises(RequestError) as error:
            ask("abc", GREEDY, return_hidden_states=True)
        assert error.value.param == "return_hidden_states"
    until_idle(llm)


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("abc", max_tokens=1900, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    until_idle(llm)


def test_a_stream_whose_loop_is_closed_ends_its_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The loop is closed as after `asyncio.run` of a program that leaves `async for`: nothing is logged."""
    loop = asyncio.new_event_loop()
    stream = llm.astream("abc", max_tokens=1900, ignore_eos=True)
    loop.run_until_complete(anext(stream))
    loop.close()
    until_idle(llm)
    assert not caplog.messages


async def test_async_twins_on_another_loop(llm: LLM) -> None:
    whole = llm.generate("abc", GREEDY)[0]
    outputs = await asyncio.gather(llm.agenerate("abc", GREEDY), llm.achat(HI, GREEDY))
    assert outputs[0][0].token_ids == whole.token_ids
    assert len(outputs[1]) == 1
    pieces = [piece async for piece in llm.astream("abc", GREEDY)]
    assert "".join(piece.text for piece in pieces) == whole.text
    left = llm.astream("abc", max_tokens=1900, ignore_eos=True)
    async for _ in left:
        break
    await left.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(llm.agenerate("abc", max_tokens=1900, ignore_eos=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until_idle, llm)


def test_any_thread_may_ask(llm: LLM) -> None:
    def ask(_: int) -> list[Output]:
        return llm.generate(["a", "b"], GREEDY)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(8)))
    assert len({answer[0].text for answer in answers}) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"n": 0}, "n"),
    ],
)
def test_what_is_wrong_with_a_request_is_an_error_of_ours(llm: LLM, fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate("x", **fields)
    assert error.value.param == param
    with pytest.raises(RequestError):
        list(llm.stream("x", **fields))


def test_more_errors(llm: LLM) -> None:
    with pytest.raises(ContextExceeded):
        llm.generate("x", max_tokens=100_000)
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("x", temprature=0)
    with pytest.raises(TypeError):
        llm.stream("x", messages=HI)
    for prompts in (["x", "y"], []):
        with pytest.raises(TypeError, match="one prompt or conversation"):
            llm.stream(cast(Any, prompts))
    for conversations in ([], [HI, HI]):
        with pytest.raises(TypeError, match="one prompt or conversation"):
            llm.stream(messages=cast(Any, conversations))
    with pytest.raises(RequestError):
        llm.generate(["good", ""], max_tokens=1900, ignore_eos=True)
    until_idle(llm)


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pages_size"):
        LLM("x", pages_size=3)
    with pytest.raises(ConfigError, match="page_size"):
        LLM("x", page_size="many")
    with pytest.raises(ConfigError):
        LLM(str(tmp_path / "nothing"))


def test_closing_ends_what_runs_and_every_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    llm = load(tmp_path)
    stream = llm.stream("abc", max_tokens=1900, ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(Unavailable):
        list(stream)
    with pytest.raises(Unavailable):
        llm.generate("x")
    llm.close()
    assert set(threading.enumerate()) <= before


def test_whoever_closes_waits_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to close waits too, as the exit of a program while a thread of it closes."""
    llm = load(tmp_path)
    shut, join = llm._live.replicas.close, llm._thread.join
    closing, both, waits = threading.Event(), threading.Event(), list[int]()

    def held() -> None:
        closing.set()
        both.wait(PATIENCE)
        shut()

    def counted() -> None:
        waits.append(1)
        if len(waits) == 2:
            both.set()
        join()

    monkeypatch.setattr(llm._live.replicas, "close", held)
    monkeypatch.setattr(llm._thread, "join", counted)
    first = begin(llm.close, "first")
    assert closing.wait(PATIENCE)
    llm.close()
    alive = llm._thread.is_alive()
    both.set()
    first.result(PATIENCE)
    assert not alive


def test_an_interrupted_load_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook: the load cannot be stopped, but what it made is freed."""

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            if self.done():
                return super().result(timeout)
            raise KeyboardInterrupt

    loading, works = Interrupted(), list[Callable[[], Any]]()

    def started(work: Callable[[], Any], name: str) -> Future[Any]:
        works.append(work)
        return loading

    before = set(threading.enumerate())
    monkeypatch.setattr(offline, "begin", started)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path)
    first, *later = works
    loading.set_result(first())
    for work in later:
        work()
    assert set(threading.enumerate()) <= before


def test_a_failed_start_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise EngineFailed("the device is gone")

    before = set(threading.enumerate())
    monkeypatch.setattr(Adapters, "start", fail)
    with pytest.raises(EngineFailed, match="the device is gone"):
        begin(lambda: load(tmp_path), "start").result(PATIENCE)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_weights_are_loaded_by_a_thread_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the thread continued, its OpenMP workers would stay alive. Together with the launch thread's workers
    there would be more of them than CPUs."""
    loaders, original = list[threading.Thread](), offline.load

    def recorded(*given: Any) -> Any:
        loaders.append(threading.current_thread())
        return original(*given)

    monkeypatch.setattr(offline, "load", recorded)
    with load(tmp_path):
        (loader,) = loaders
        loader.join(10)
        assert not loader.is_alive()


def test_progress_is_shown_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with load(tmp_path, progress=True) as llm:
        llm.generate(["a", "b"], max_tokens=1)
    assert "2/2" in capsys.readouterr().err


def test_replicas_share_the_prompts(llm: LLM, tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(12)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    with load(tmp_path / "dummy", dp=2, load_balance_method="round_robin") as two:
        assert two.window == 2 * llm.window
        assert [output.token_ids for output in two.generate(prompts, GREEDY)] == expected
        finished = [each.finished for each in two._live.loaded.engine.statistics()]
        assert finished == [{"length": 6}] * 2


FORGETS = """
import sys
from pathlib import Path
from tests.app.test_offline import GREEDY, HI, load
llm = load(Path(sys.argv[1]))
print(len(llm.chat(HI, GREEDY)[0].token_ids))
pending = llm.stream("x", max_tokens=200, ignore_eos=True)
print(next(pending) is not None)
"""


def test_a_program_that_forgets_to_close_ends_well(tmp_path: Path) -> None:
    """The program ends well also while an answer is being made. It aborted, or hung, when threads met the
    interpreter's end."""
    done = subprocess.run(
        [sys.executable, "-c", FORGETS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout.split()) == (0, ["12", "True"]), done.stderr
    assert "terminate called" not in done.stderr and "Traceback" not in done.stderr
