"""`python -m app generate`: answers a file of requests without a server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from app import logs
from app.api.answers import ANSWERS
from app.batch.journal import Journal, Tally, drop_failed, is_journal
from app.batch.lines import BadLine, Line, answered, bad, failed, parse_line, read_lines, unanswered
from app.offline import LLM
from app.process import INTERRUPTED
from app.settings import GenerateFlags
from core.config import Config
from core.errors import ConfigError, LoomError

log = logging.getLogger(__name__)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

ANY_MODEL = "any"
"""`--model-name` for files written for other models: the models that lines name are ignored."""


def run(config: Config, flags: GenerateFlags) -> int:
    """Answer every line of the input without an answer in the output; failed lines are tried again. Returns
    the exit code: 1 when any line of the output is an error. Raises `ConfigError`."""
    logs.set_up("warning")
    source, results = Path(flags.input).expanduser(), Path(flags.output).expanduser()
    tally = Tally()
    try:
        _check_files(source, results)
        total = sum(1 for _ in read_lines(source))
        if retried := drop_failed(results):
            print(f"{retried} lines that failed are tried again", file=sys.stderr)
        journal = Journal(results, tally)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename or results}: {error.strerror}.") from error
    try:
        if tally.ids:
            print(f"{len(tally.ids)} of {total} lines are done already", file=sys.stderr)
        with LLM.from_config(config) as llm:
            generation = Generation(llm, journal, tally, flags.model_name)
            return asyncio.run(generation.run(source, total, flags.concurrency))
    except KeyboardInterrupt:
        print("interrupted: run the same command to continue", file=sys.stderr)
        return INTERRUPTED
    finally:
        journal.close()


def _check_files(source: Path, results: Path) -> None:
    """Raise `ConfigError` for what cannot be read twice, and for an output that is none of this command's,
    whose last line would be cut off."""
    for file in (source, results):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ConfigError(f"cannot use {file}: it must be a regular file, which can be read twice.")
    if results.is_file():
        if source.exists() and results.samefile(source):
            raise ConfigError(f"--input and --output are the same file, {results}. Name another --output.")
        if not is_journal(results):
            raise ConfigError(f"--output {results} has other lines than results. Name another file.")


class Generation:
    """One run over a file. Owner: its own event loop."""

    def __init__(self, llm: LLM, journal: Journal, tally: Tally, model_name: str) -> None:
        self._llm = llm
        self._model_name = model_name
        self._journal = journal
        self._tally = tally
        self._seen: set[str] = set()

    async def run(self, source: Path, total: int, concurrency: int) -> int:
        """Exit code 0 or 1."""
        lines = read_lines(source)
        done = len(self._tally.ids)
        with tqdm(total=total, initial=min(done, total), unit="line", disable=None) as bar:
            workers = min(concurrency or self._llm.window, max(total, 1))
            await self._work_together(workers, lines, bar)
        tally = self._tally
        print(f"{tally.completed} lines answered, {tally.failed} failed", file=sys.stderr)
        if self._llm.failure is not None:
            print(f"stopped early, the engine failed: {self._llm.failure}", file=sys.stderr)
            return 1
        return int(tally.failed > 0)

    async def _work_together(self, workers: int, lines: Iterator[tuple[int, bytes]], bar: Any) -> None:
        """Raises `ConfigError` when a file cannot be read or written, as on a full disk."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work(lines, bar))
        except* OSError as failed:
            first = next(error for error in failed.exceptions if isinstance(error, OSError))
            reason = first.strerror or first
            raise ConfigError(f"stopped at a file: {reason}. Run the same command to continue.") from first

    async def _work(self, lines: Iterator[tuple[int, bytes]], bar: Any) -> None:
        """One of several workers that share `lines`."""
        for number, text in lines:
            before = len(self._tally.ids)
            record = await self._line(number, text)
            if self._llm.failure is not None:
                return  # not the line's fault: it runs again next time
            if record is not None:
                self._journal.append(record)
                self._tally.add(record)
            bar.update(len(self._tally.ids) - before if record is not None else 0)

    async def _line(self, number: int, text: bytes) -> bytes | None:
        """The record of a line; None if it has one already."""
        try:
            line = read_request(number, text)
            if line.custom_id in self._seen:
                message = f"The custom_id {line.custom_id[:100]!r} was used before."
                raise bad(number, "duplicate_custom_id", message)
        except BadLine as wrong:
            id = f"line-{number}"
            return None if id in self._tally.ids else unanswered(id, wrong.error.code, wrong.error.message)
        self._seen.add(line.custom_id)
        if line.custom_id in self._tally.ids:
            return None
        body = for_model(line.body, self._model_name) if self._model_name else line.body
        work = asyncio.wrap_future(self._llm.submit(line.url, body))
        (answer,) = await asyncio.gather(work, return_exceptions=True)
        if not isinstance(answer, BaseException):
            return answered(line.custom_id, 200, answer)
        if not isinstance(answer, LoomError):
            log.error("line %d failed", number, exc_info=answer)
        return failed(line.custom_id, answer)


def read_request(number: int, text: bytes) -> Line:
    """A batch line, or a plain object with `prompt` or `messages` and other fields of their endpoint, whose
    id is `line-NUMBER` unless it has a `custom_id`. Raises `BadLine`."""
    try:
        fields = _fields(text.strip())
        custom_id = msgspec.json.decode(fields.get("custom_id", b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse_line(number, text, ANSWERS)  # which raises with the reason
    present = {name for name, value in fields.items() if bytes(value) != b"null"}
    if present & {"url", "body"}:
        return parse_line(number, text, ANSWERS)
    if ("prompt" in present) == ("messages" in present):
        message = "A line needs 'url' and 'body', or one of 'prompt' and 'messages'."
        raise bad(number, "invalid_line", message)
    url = "/v1/chat/completions" if "messages" in present else "/v1/completions"
    return Line(number, custom_id or f"line-{number}", url, text)


def for_model(body: bytes, name: str) -> bytes:
    """A request's body without its `model` if that is `name`, or in any case for `ANY_MODEL`."""
    try:
        fields = _fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # its answer says what is wrong
    model = bytes(fields.get("model", b""))
    if name == ANY_MODEL or model == msgspec.json.encode(name):
        fields.pop("model", None)
    return msgspec.json.encode(fields)
