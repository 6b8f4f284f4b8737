"""`python -m app chat`: what is typed reaches a model, and the conversation is kept."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable

import pytest

from app.commands.chat import Conversation, Message, Write, run
from app.settings import ChatFlags
from core.config import Config, ServeConfig
from core.errors import ConfigError, Overloaded, RequestError
from tests.rigs.engine import WORDS
from tests.rigs.server import Server, Start, know, refuse

Type = Callable[[str], None]
ANSWER = "".join(WORDS)


@pytest.fixture
def type(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Sets what is typed."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class Echo:
    """A model that answers with the last message, and keeps all conversations. `fail` raises an error, `stop`
    is Ctrl-C after the first word."""

    name = "echo"

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    def answer(self, messages: list[Message], write: Write) -> None:
        self.seen.append(list(messages))
        text = messages[-1]["content"]
        if text == "fail":
            raise RequestError("it is too long")
        for number, word in enumerate(text.split()):
            if text.startswith("stop") and number:
                raise KeyboardInterrupt
            write(word, not word.startswith("hm"))


def said(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_answers_stay_in_the_conversation_until_a_new_one(type: Type) -> None:
    type("a\nb\n\n/new\nc\n")
    assert Conversation(echo := Echo(), "be brief").run() == 0
    assert [said(each) for each in echo.seen] == [
        ["be brief", "a"],
        ["be brief", "a", "a", "b"],
        ["be brief", "c"],
    ]
    assert [each["role"] for each in echo.seen[1]] == ["system", "user", "assistant", "user"]


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(type: Type) -> None:
    type("stop here\nb\n/exit\nc\n")
    assert Conversation(echo := Echo(), "").run() == 0
    assert said(echo.seen[-1]) == ["stop here", "stop", "b"]


def test_a_failed_answer_leaves_the_conversation_as_it_was(
    type: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    type("a\nfail\nb\n")
    assert Conversation(echo := Echo(), "").run() == 1
    assert said(echo.seen[-1]) == ["a", "a", "b"]
    assert capsys.readouterr().err == "loom: error: it is too long\n"


def test_reasoning_is_shown_and_not_kept(type: Type, capsys: pytest.CaptureFixture[str]) -> None:
    type("hm yes\nb\n")
    Conversation(echo := Echo(), "").run()
    assert said(echo.seen[-1]) == ["hm yes", "yes", "b"]
    assert capsys.readouterr().out == "hmyes\nb\n"


def test_an_answer_cannot_control_the_terminal(type: Type, capsys: pytest.CaptureFixture[str]) -> None:
    type("\x1b]0;title\x07ä\x9b2J\n")
    Conversation(Echo(), "").run()
    assert capsys.readouterr().out == "]0;titleä2J\n"


async def test_reasoning_of_a_server_is_no_part_of_the_answer(
    server: Server, type: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    know(server, reasoning="think")
    server.engine.scripts = [["<think>", "why", "</think>", "so"], ["end"]]
    type("a\nb\n")
    assert await talk(server.url) == 0
    assert capsys.readouterr().out == "whyso\nend\n"
    prompt = server.engine.runs[-1].job.prompt
    assert "so" in prompt and "why" not in prompt


async def talk(url: str, key: str = "", sampling: str = "") -> int:
    config = Config(serve=ServeConfig(api_key=(key,) if key else ()))
    return await asyncio.to_thread(run, config, ChatFlags(url=url, sampling=sampling))


@pytest.mark.parametrize("tail", ["", "/", "/v1"])
async def test_a_running_server_answers(
    server: Server, type: Type, capsys: pytest.CaptureFixture[str], tail: str
) -> None:
    type("hello\nagain\n")
    assert await talk(server.url + tail, sampling=f'{{"max_tokens": {len(WORDS)}, "temperature": 0}}') == 0
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER}\n"
    job = server.engine.runs[-1].job
    assert "again" in job.prompt and ANSWER in job.prompt
    assert (job.sampling.temperature, job.max_tokens) == (0, len(WORDS))


async def test_an_event_that_is_too_long_does_not_end_the_conversation(
    server: Server, type: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.scripts = [["x" * 3_000_000], ["end"]]
    type("a\nb\n")
    assert await talk(server.url) == 1
    said = capsys.readouterr()
    assert said.out == "end\n" and "Got more than" in said.err


async def test_a_terminal_may_lack_characters(
    server: Server, type: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    server.engine.scripts = [["naïve"], ["end"]]
    type("a\nb\n")
    assert await talk(server.url) == 0
    assert shown.getvalue() == b"na?ve\nend\n"


async def test_the_key_is_sent(start: Start, type: Type, capsys: pytest.CaptureFixture[str]) -> None:
    server = await start(ServeConfig(api_key=("secret",)))
    type("hello\n")
    assert await talk(server.url, "secret", '{"max_tokens": 1}') == 0
    with pytest.raises(ConfigError, match="401: Incorrect API key"):
        await talk(server.url, "wrong")


async def test_an_error_of_the_server_is_shown_in_its_own_words(
    server: Server, type: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(server, Overloaded("The queue is full."))
    type("hello\n")
    assert await talk(server.url) == 1
    assert "429: The queue is full." in capsys.readouterr().err


async def test_a_server_that_is_still_starting_says_so(start: Start) -> None:
    server = await start(ready=False)
    with pytest.raises(ConfigError, match="503: the server is starting"):
        await talk(server.url)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (ChatFlags(url="localhost:8000"), "must begin with http://, https:// or unix:"),
        (ChatFlags(url="http://localhost:1"), "--url http://localhost:1: Cannot connect"),
        (ChatFlags(url="http://ä..b"), "--url http://ä..b: "),
        (ChatFlags(url="unix:/nowhere"), "--url unix:/nowhere: .*No such file"),
        (ChatFlags(sampling="[1]"), "--sampling must be a JSON object"),
    ],
)
def test_what_cannot_be_reached_or_read(flags: ChatFlags, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(Config(), flags)
