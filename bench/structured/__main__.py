"""JSON schema support: which schemas compile, which instances are accepted, what a mask costs.

    python -m bench.structured --data FILE --tokenizer DIR
                      masks, over every schema of MaskBench
      --behind 1000   the same for that many of them, behind a thinking
      --generate 300  SmolLM2 generates, jsonschema validates
      --hostile       inter-token latency of a stream beside hostile grammars
      --lenient       masks, with schemas under "strict": false
      --suite DIR     without --data: the official JSON-Schema-Test-Suite

The first feeds each schema's valid and invalid instances (compact JSON) token by token through the masks: a
token is accepted only if its bit is set, and the text counts as accepted if an end token may follow. Schemas
are shuffled, so a run that `--seconds` ends has measured a random sample. Compile times are those of a
client: checks, thread, helper process and first masks included. Bias: labels are those of the data set; one
process on a shared machine, one row at a time, so the time of a mask is an upper bound.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from bench.flags import command
from bench.results import RESULTS, write
from bench.structured.answers import generate
from bench.structured.hostile import hostile
from bench.structured.masks import measure
from bench.structured.schemas import add_sources

PARTS = ("behind_thinking", "generated", "neighbour", "lenient", "test_suite")
"""Keys in the result file of the runs with options."""


def main() -> None:
    """Measure and update bench/results/structured.json; figures of other parts are kept."""
    parser = command(__doc__, "python -m bench.structured")
    add_sources(parser)
    parser.add_argument("--schemas", type=int, default=0, help="maximum number; 0: all")
    parser.add_argument("--seconds", type=float, default=840)
    parser.add_argument(
        "--behind", type=int, default=0, help="number of schemas to measure behind a thinking"
    )
    parser.add_argument("--generate", type=int, default=0, help="number of schemas to generate answers for")
    parser.add_argument("--tokens", type=int, default=200, help="max_tokens of each generated answer")
    parser.add_argument("--lenient", action="store_true", help='compile schemas as under "strict": false')
    parser.add_argument("--suite", type=Path, help="the unpacked JSON-Schema-Test-Suite, instead of --data")
    parser.add_argument("--hostile", action="store_true", help="measure a stream beside hostile grammars")
    arguments = parser.parse_args()
    if arguments.data is None and arguments.suite is None:
        parser.error("--data FILE is required without --suite")
    chosen = {
        "generated": arguments.generate,
        "test_suite": arguments.suite,
        "lenient": arguments.lenient,
        "behind_thinking": arguments.behind,
        "neighbour": arguments.hostile,
    }
    part = next((name for name, wanted in chosen.items() if wanted), "")
    run = {"generated": generate, "neighbour": hostile}.get(part, measure)
    kept = RESULTS / "structured.json"
    figures: dict[str, Any] = {}
    if kept.exists():
        figures = msgspec.json.decode(kept.read_bytes())
        del figures["name"], figures["conditions"]
    found = asyncio.run(run(arguments))
    if part:
        figures[part] = found
    else:
        figures = {"tokenizer": "Qwen3", **found} | {name: figures[name] for name in PARTS if name in figures}
    write("structured", figures)


if __name__ == "__main__":
    main()
