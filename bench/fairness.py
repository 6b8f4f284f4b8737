"""Delay that one API key's long prompts cause to another key: `python -m bench.fairness --model DIR [flags]`.

One client sends prompts of --input-len tokens and gets answers of --output-len, one at a time with --gap
seconds between them. Its median time to the first token is measured alone, then beside a client with another
key that keeps --at-once prompts of --long tokens running, then alone again:

    times      median first token beside the long prompts over that alone    limit 2.0

Starts a server with random weights and a file with two keys. Bias: the client shares the server's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench.flags import add_name, add_sizes, command, sized
from bench.load.client import Client, Target
from bench.load.prompts import Source
from bench.load.records import Record
from bench.load.workloads import Workload
from bench.results import write
from bench.servers import SERVER, serving

LIMIT = 2.0
KEYS = ("long-prompts-key", "short-prompts-key")
MODEL = "served"


def write_keys(path: Path) -> None:
    """The file of `--api-keys-file`; only its owner may read it."""
    path.touch(0o600)
    path.write_text("".join(f'[keys.key{at}]\nkey = "{key}"\n' for at, key in enumerate(KEYS)))


class Caller:
    """Sends the prompts of a workload, each once. Owner: event loop."""

    def __init__(self, url: str, key: str, work: Workload) -> None:
        self._client = Client(Target.of(url, key), "completions")
        self._source = Source(work, MODEL)
        self._sent = 0
        self.first_tokens: list[float] = []
        """Seconds to the first token of each request."""

    async def send(self) -> None:
        """Send one request. Raises `RuntimeError` if it fails."""
        self._sent += 1
        record: Record
        record, _ = await self._client.send(self._source.request(self._sent))
        if record.bad is not None or record.ttft is None:
            raise RuntimeError(f"a request failed: {record.bad} {record.detail}")
        self.first_tokens.append(record.ttft)

    async def keep(self, at_once: int) -> None:
        """Keep `at_once` requests running until cancelled."""

        async def again() -> None:
            while True:
                await self.send()

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(again())

    async def median_first_token(self, requests: int, gap: float) -> float:
        """Median of the first tokens of `requests` requests, one after the other with a pause behind each."""
        self.first_tokens.clear()
        for _ in range(requests):
            await self.send()
            await asyncio.sleep(gap)
        return median(self.first_tokens)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


async def measure(url: str, at_once: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    sizes = {"long": args.long, "short": args.input_len}
    long, short = (
        sized(f"{name}-{at_once}", args, input_len=length)  # another run's prompts would be cached
        for name, length in sizes.items()
    )
    other, client = Caller(url, KEYS[0], long), Caller(url, KEYS[1], short)
    try:
        before = await client.median_first_token(args.requests, args.gap)
        traffic = asyncio.create_task(other.keep(at_once))
        await asyncio.sleep(args.settle)
        beside = await client.median_first_token(args.requests, args.gap)
        served = len(other.first_tokens)
        if traffic.done():
            traffic.result()  # it only ends by failing
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)
        await asyncio.sleep(args.settle)
        after = await client.median_first_token(args.requests, args.gap)
    finally:
        other.close()
        client.close()
    alone = (before + after) / 2
    return {
        "at_once": at_once,
        "alone_ms": [round(1e3 * each, 1) for each in (before, after)],
        "beside_ms": round(1e3 * beside, 1),
        "times": round(beside / alone, 2),
        "long_prompts": served,
        "holds": beside <= LIMIT * alone,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write bench/results/NAME.json."""
    parser = command(__doc__)
    add_name(parser, "fairness")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8], help="long prompts, in turn")
    parser.add_argument("--long", type=int, default=12_000)
    add_sizes(parser, 1_000, 40)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--gap", type=float, default=0.35)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before and after the long prompts")
    args, flags = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_keys(keys := Path(folder) / "keys.toml")
        served = [*SERVER, *flags, "--served-model-name", MODEL, "--api-keys-file", str(keys)]
        with serving(served, Path(folder) / "server.log") as url:
            runs = [uvloop.run(measure(url, at_once, args)) for at_once in args.at_once]
    sizes = {name: getattr(args, name) for name in ("long", "input_len", "output_len", "requests", "gap")}
    write(args.name, {**sizes, "server_flags": flags, "runs": runs})


if __name__ == "__main__":
    main()
