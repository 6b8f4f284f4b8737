"""`python -m app chat`: a conversation in the terminal, with a server or an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from app import logs
from app.settings import ChatFlags
from core.config import Config
from core.errors import ConfigError, LoomError

if TYPE_CHECKING:
    from app.offline import LLM

with contextlib.suppress(ImportError):  # some builds of Python lack it; `input` edits lines with it
    import readline

    readline.set_auto_history(True)

Message = dict[str, str]
Write = Callable[[str, bool], None]
"""Takes a piece of text, and whether it belongs to the answer: reasoning does not."""

UNIX = "unix:"
"""Prefix of a socket's path in `--url`."""

CONTROL = dict.fromkeys(each for each in (*range(32), *range(127, 160)) if each not in b"\n\t")
"""Characters that are not printed: a model could move the cursor or set the terminal's title."""

HELP = "/new starts another conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"

_fields = msgspec.json.Decoder(dict[str, Any]).decode


class Model(Protocol):
    """The side of a conversation that answers."""

    name: str

    def answer(self, messages: list[Message], write: Write) -> None:
        """Hand the answer to `write` piece by piece. Raises `LoomError`."""
        ...


class RemoteError(LoomError):
    """A server answered with an error, or not at all."""


def run(config: Config, flags: ChatFlags) -> int:
    """Talk until the input ends. Returns the exit code: 1 when an answer failed. Raises `ConfigError`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have fewer characters than a model
    fields, keys = _sampling(flags.sampling), config.serve.api_key
    opened = _remote(flags.url, keys[0] if keys else "", fields) if flags.url else _local(config, fields)
    with opened as model:
        return Conversation(model, flags.system).run()


def _sampling(text: str) -> dict[str, Any]:
    try:
        return _fields(text or "{}")
    except msgspec.DecodeError as error:
        raise ConfigError(f"--sampling must be a JSON object of fields of the API: {error}.") from error


class Conversation:
    """Reads lines, writes answers, and keeps both."""

    def __init__(self, model: Model, system: str) -> None:
        self._model = model
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._failed = False

    def run(self) -> int:
        """Talk until the input ends. Returns the exit code."""
        if sys.stdin.isatty():
            print(f"{self._model.name}: {HELP}.")
        while (line := _read()) is not None and line != "/exit":
            if line == "/new":
                self._messages = list(self._first)
            elif line:
                self._ask(line)
        return int(self._failed)

    def _ask(self, line: str) -> None:
        pieces: list[str] = []

        def write(text: str, kept: bool) -> None:
            if kept:
                pieces.append(text)
            print(text.translate(CONTROL), end="", flush=True)

        self._messages.append({"role": "user", "content": line})
        try:
            self._model.answer(self._messages, write)
        except KeyboardInterrupt:
            pass  # what was said so far stays in the conversation
        except LoomError as error:
            self._failed = True
            self._messages.pop()
            if pieces:
                print()
            print(f"loom: error: {error}", file=sys.stderr)
            return
        print()
        self._messages.append({"role": "assistant", "content": "".join(pieces)})


def _read() -> str | None:
    """A line, or None at the end. Ctrl-C drops what was typed."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise ConfigError(f"the input is not UTF-8: {error}.") from error


# -- an engine of its own --------------------------------------------------------------------------------


class _Local:
    """An engine in this process."""

    def __init__(self, llm: LLM, fields: dict[str, Any]) -> None:
        self._llm, self._fields = llm, fields
        self.name = llm.name

    def answer(self, messages: list[Message], write: Write) -> None:
        try:
            for delta in self._llm.stream(messages=messages, **self._fields):
                write(delta.text, True)
        except TypeError as error:
            raise ConfigError(f"--sampling: {error}.") from error


@contextmanager
def _local(config: Config, fields: dict[str, Any]) -> Iterator[Model]:
    from app.offline import LLM  # deferred: imports torch, which --url does without

    logs.set_up("warning")
    with LLM.from_config(config) as llm:
        yield _Local(llm, fields)


# -- a running server ------------------------------------------------------------------------------------


class _Remote:
    """A server with OpenAI's API."""

    def __init__(
        self, runner: asyncio.Runner, session: aiohttp.ClientSession, name: str, fields: dict[str, Any]
    ) -> None:
        self._runner, self._session, self._fields = runner, session, fields
        self.name = name

    def answer(self, messages: list[Message], write: Write) -> None:
        self._runner.run(self._answer(messages, write))

    async def _answer(self, messages: list[Message], write: Write) -> None:
        body = {"model": self.name, "messages": messages, "stream": True, **self._fields}
        with _as_remote_error():
            async with self._session.post("v1/chat/completions", json=body) as response:
                await _check(response)
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        _write_event(_fields(line[6:]), write)


@contextmanager
def _remote(url: str, key: str, fields: dict[str, Any]) -> Iterator[Model]:
    """The model of the server at `url`. Raises `ConfigError` where no server answers."""
    with asyncio.Runner() as runner:
        session = runner.run(_session(url, key))
        try:
            name = runner.run(_name(session))
            yield _Remote(runner, session, name, fields)
        except RemoteError as error:
            raise ConfigError(f"--url {url}: {error}") from error
        finally:
            runner.run(session.close())


async def _session(url: str, key: str) -> aiohttp.ClientSession:
    socket = url.removeprefix(UNIX) if url.startswith(UNIX) else ""
    base = "http://localhost" if socket else url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} must begin with http://, https:// or {UNIX}")
    try:
        _ = urlsplit(base).port  # it is checked as it is read
        return aiohttp.ClientSession(
            f"{base}/",
            connector=aiohttp.UnixConnector(socket) if socket else None,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(sock_connect=10),  # an answer may take as long as it does
            read_bufsize=2**20,  # also the longest line
        )
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from error


async def _name(session: aiohttp.ClientSession) -> str:
    with _as_remote_error():
        async with session.get("v1/models") as response:
            await _check(response)
            return str((await response.json())["data"][0]["id"])


@contextmanager
def _as_remote_error() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, HttpProcessingError, OSError, msgspec.DecodeError, ValueError) as error:
        raise RemoteError(str(error) or type(error).__name__) from error
    except (TypeError, AttributeError, LookupError) as error:
        raise RemoteError(f"it does not answer as OpenAI's API: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise `RemoteError` with the server's own words for an error."""
    if response.status != 200:
        text = await response.text()
        with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError):
            text = _fields(text)["error"]["message"]
        raise RemoteError(f"{response.status}: {str(text)[:1000]}")


def _write_event(event: dict[str, Any], write: Write) -> None:
    """Write the text of one event. Raises `RemoteError` for an error."""
    if (error := event.get("error")) is not None:
        raise RemoteError(str(error.get("message", error)))
    delta = event["choices"][0]["delta"] if event.get("choices") else {}
    if thought := delta.get("reasoning_content"):
        write(thought, False)
    if text := delta.get("content"):
        write(text, True)
