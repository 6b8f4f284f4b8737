"""Replays what `--dump-requests` wrote, with the recorded arrival times, and compares the outcome with the
recorded one: `python -m bench.replay DIR --base-url http://127.0.0.1:8000`.

`--unfinished` replays only what ran when the server failed or died. Bodies are sent as they were received, to
the same routes; replayed clients wait for their whole answer, also those that once left early."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from app.http.dump import Accepted, Ended
from bench.load.client import Client, Target
from bench.load.records import Record
from bench.load.report import align, failures, percentiles
from bench.load.stream import Stream
from bench.load.worker import raise_file_limit

TAIL = 64 * 1024
"""Bytes of an answer in which its usage is looked for."""

_ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Routes whose streams the load generator reads."""
_FIRST = {"/v1/messages": b"_delta", "/v1/responses": b".delta", "/v2/chat": b"-delta"}
"""Bytes in the first event with text, by route; on other routes any event counts."""
_LINES = ("/api/chat", "/api/generate")
"""Routes that stream unless a request says no."""
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?([0-9]{1,12})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)": ?([0-9]{1,12})')
_ERROR = re.compile(rb'"type": ?"(?:error|response\.failed)"|^(?:data: )?\{"error"', re.MULTILINE)
_PATH = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
"""Characters of a header's value that HTTP allows, as the server took it."""
_SKIPPED = ("Content-Type", "User-Agent", "Traceparent")
"""Headers that are the replay's own, or would extend a trace that has ended."""


class Recorded(NamedTuple):
    """A request of a dump; without an end it was running when the server died."""

    request: Accepted
    end: Ended | None

    @property
    def finished(self) -> bool:
        """Whether the request had its outcome before the server failed."""
        return self.end is not None and not self.end.failed


class Pair(NamedTuple):
    """A request as it was recorded, and as it was replayed."""

    recorded: Recorded
    replayed: Record


class OtherStream(Stream):
    """Records the end, usage and, if streamed, the time to first token of any route's answer.

    Owner: event loop.
    """

    __slots__ = ("_first",)

    def __init__(self, record: Record, first: bytes | None) -> None:
        """`first` is in the first event with text; None: the answer is not streamed."""
        super().__init__(record, "chat", (None, None), keep=False)
        self._first = first

    def feed(self, data: bytes, now: float) -> None:
        """See `Stream.feed`."""
        if self._first is not None and not self._times and self._first in data:
            self._times.append(now)
        self._rest = (self._rest + data)[-TAIL:]

    def close(self, now: float, whole: bool) -> None:
        """See `Stream.close`."""
        record = self.record
        record.out, record.prompt = (_last(pattern, self._rest) for pattern in (_OUTPUT, _PROMPT))
        record.usage = record.prompt > 0
        if not whole:
            self.fail("truncated", "", now)
        elif found := _ERROR.search(self._rest):
            self.fail("stream error", self._rest[found.start() :][:300].decode("utf-8", "replace"), now)
        record.end = record.end or now


def _last(pattern: re.Pattern[bytes], data: bytes) -> int:
    found = pattern.findall(data)
    return int(found[-1]) if found else 0


def load(paths: Iterable[Path], unfinished: bool = False) -> list[Recorded]:
    """Requests of files, or of all files in directories, by time of arrival; only those that were not
    finished, if so asked. ValueError for a line that is none of a dump's, but a last line may be cut off."""
    requests: dict[str, Accepted] = {}
    ends: dict[str, Ended] = {}
    for path in paths:
        for file in sorted(path.glob("requests-*.jsonl")) if path.is_dir() else (path,):
            for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
                if not line.endswith(b"\n"):
                    continue  # the server died while it wrote it
                found = _decoded(line, f"{file}, line {number}")
                if isinstance(found, Accepted):
                    requests[found.key] = found
                else:
                    ends[found.key] = found
    all_ = (Recorded(request, ends.get(request.key)) for request in requests.values())
    kept = [each for each in all_ if not (unfinished and each.finished)]
    return sorted(kept, key=lambda each: each.request.at)


def _decoded(line: bytes, where: str) -> Accepted | Ended:
    try:
        found = msgspec.json.decode(line, type=Accepted | Ended)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not of a dump: {error}") from error
    if isinstance(found, Accepted) and not (
        found.method == "POST"
        and _PATH.fullmatch(found.path)
        and all(name.isascii() and _VALUE.fullmatch(value) for name, value in found.headers.items())
    ):
        raise ValueError(f"{where} is not of a dump: its method, path or a header cannot be sent")
    return found


async def replay(recorded: Sequence[Recorded], target: Target, speed: float = 1.0) -> list[Pair]:
    """Send each request when it is due: at the recorded distance from the first, divided by `speed`. The
    server's errors are in the records."""
    client = Client(target, "chat")
    try:
        begin = time.perf_counter()
        tasks = []
        for index, each in enumerate(recorded):
            due = begin + (each.request.at - recorded[0].request.at) / speed
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(_send(client, target, index, each.request)))
        records = await asyncio.gather(*tasks)
    finally:
        client.close()
    return [Pair(each, record) for each, record in zip(recorded, records, strict=True)]


async def _send(client: Client, target: Target, index: int, request: Accepted) -> Record:
    record = Record(index=index, sent=time.perf_counter())
    headers = {name: value for name, value in request.headers.items() if name not in _SKIPPED}
    streamed, endpoint = streams(request), _ENDPOINTS.get(request.path)
    if streamed and endpoint:
        stream = Stream(record, endpoint, (None, None), keep=False)
    else:
        stream = OtherStream(record, _FIRST.get(request.path, b"") if streamed else None)
    await client.post(target.head(request.path, headers), request.body.encode(), stream)
    return record


class _Body(msgspec.Struct):
    stream: bool | None = None


def streams(request: Accepted) -> bool:
    """Whether its answer is a stream."""
    try:
        asked = msgspec.json.decode(request.body, type=_Body).stream
    except msgspec.MsgspecError:
        asked = None
    return request.path in _LINES if asked is None else asked


def table(pairs: Sequence[Pair]) -> str:
    """A table of what was recorded beside what was replayed. A gap is the mean time of a token after the
    first, in streams. Tokens and times are of requests that were replayed without error and had an outcome,
    if any had; prompt tokens of those whose replay was told them."""
    ended = [(pair.recorded.end, pair.replayed) for pair in pairs]
    some = any(pair.recorded.finished for pair in pairs)
    good = [
        (pair.recorded.end if pair.recorded.finished else None, pair.replayed)
        for pair in pairs
        if pair.replayed.bad is None and (pair.recorded.finished or not some)
    ]
    told = [(end, new) for end, new in good if new.usage]
    live = [(end, new) for end, new in good if new.ttft is not None]
    errors = sum(end is not None and bool(end.error) for end, _ in ended)
    rows = [
        ("", "recorded", "replayed"),
        _counts("requests", len(pairs), len(pairs)),
        _counts("without an outcome", sum(end is None for end, _ in ended), 0),
        _counts("errors", errors, sum(new.bad is not None for _, new in ended)),
        _counts("prompt tokens", sum(e.prompt_tokens for e, _ in told if e), sum(n.prompt for _, n in told)),
        _counts("output tokens", sum(e.output_tokens for e, _ in good if e), sum(n.out for _, n in good)),
        *_times("TTFT", [e.first_token_ms for e, _ in live if e], [new.ttft for _, new in live]),
        *_times("gap", [_gap(end) for end, _ in live if end], [new.tpot for _, new in live]),
        *_times("total", [end.total_ms for end, _ in good if end], [new.e2e for _, new in good]),
    ]
    found = failures(new for _, new in ended)
    return "\n".join([align(rows), *(f"{n['count']} x {kind}: {n['example']}" for kind, n in found.items())])


def _counts(name: str, recorded: int, replayed: int) -> tuple[str, ...]:
    return name, f"{recorded:,}", f"{replayed:,}"


def _times(
    name: str, recorded: Iterable[float | None], replayed: Iterable[float | None]
) -> list[tuple[str, ...]]:
    """Table rows of p50 and p99. `recorded` is in milliseconds, `replayed` in seconds."""
    old = percentiles(ms for ms in recorded if ms is not None)
    new = percentiles(1e3 * seconds for seconds in replayed if seconds is not None)
    return [
        (f"{name} {point} (ms)", *(f"{found[point]:,.1f}" if found else "-" for found in (old, new)))
        for point in ("p50", "p99")
    ]


def _gap(end: Ended) -> float | None:
    if end.first_token_ms is None or end.output_tokens < 2:
        return None
    return (end.total_ms - end.first_token_ms) / (end.output_tokens - 1)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.replay", description=__doc__)
    parse.add_argument(
        "dump", nargs="+", type=Path, metavar="FILE", help="of --dump-requests, or its directory"
    )
    parse.add_argument("--base-url", default="http://127.0.0.1:8000", help="server, without /v1")
    parse.add_argument("--api-key", default="", help="sent as a bearer token: dumps have none")
    parse.add_argument("--speed", type=float, default=1.0, help="2 sends twice as fast, inf all at once")
    parse.add_argument(
        "--unfinished", action="store_true", help="only what ran when the server failed or died"
    )
    parse.add_argument("--timeout", type=float, default=600.0, help="seconds that one request may take")
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every request had an answer, 1 otherwise, 2 for arguments that do not fit."""
    parse = parser()
    args = parse.parse_args(argv)
    if not args.speed > 0:
        parse.error(f"--speed must be above 0, got {args.speed:g}")
    try:
        target = Target.of(args.base_url, args.api_key, args.timeout)
        recorded = load(args.dump, args.unfinished)
    except (OSError, ValueError) as error:
        parse.error(str(error))
    if not recorded:
        print("no such requests in the dump")
        return 0
    raise_file_limit()
    pairs = asyncio.run(replay(recorded, target, args.speed))
    print(table(pairs))
    return int(any(pair.replayed.bad is not None for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
