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

import argparse
import asyncio
import contextlib
import json
import lzma
import random
import re
import time
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec
import numpy as np

from app.compose import Live, load
from app.engine.job import Job, Piece
from app.helper.process import HelperProcess
from app.parsers.grammar import Wanted, constraint
from app.parsers.registry import REASONING, TOOLS
from app.text.tokenizer import Tokenizer
from bench.results import RESULTS, write
from core.config import Config, ModelConfig, ScheduleConfig
from core.errors import RequestError
from core.grammar import GrammarSpec
from core.request import SamplingParams
from core.types import Finish, FinishReason
from gpu.grammar import Compiler
from gpu.grammar.stepper import Grammar

WIDTH = 151_936
"""Logits of the Qwen3 models: 267 more than tokens in the tokenizer."""
ENDS = (151_645, 151_643)
SEED = 0


class Case(NamedTuple):
    """One schema of the data set, and its instances with their labels."""

    path: str
    schema: Any
    tests: list[tuple[Any, bool]]


def cases(data: Path) -> list[Case]:
    """All schemas, shuffled."""
    found = []
    with lzma.open(data, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            tests = [(test["data"], test["valid"]) for test in entry["case"]["tests"]]
            found.append(Case(entry["path"], entry["case"]["schema"], tests))
    random.Random(SEED).shuffle(found)
    return found


def suite(directory: Path) -> list[Case]:
    """The groups of the official suite's draft 2020-12, with formats as assertions. `format.json`, which
    expects formats as annotations, is left out."""
    found = []
    root = directory / "tests" / "draft2020-12"
    for path in sorted([*root.glob("*.json"), *root.glob("optional/**/*.json")]):
        if path != root / "format.json":
            for group in json.loads(path.read_text()):
                tests = [(test["data"], test["valid"]) for test in group["tests"]]
                found.append(Case(str(path.relative_to(root)), group["schema"], tests))
    return found


class Tally:
    """Counts over all schemas."""

    def __init__(self, before: list[int] | None = None, lenient: bool = False) -> None:
        self.lenient = lenient
        """Compile schemas as under "strict": false."""
        self.before = before
        """Tokens of a thinking before each instance; None: the instance is the whole answer."""
        self.thinking: list[float] = []
        """Seconds per mask within the thinking."""
        self.schemas = 0
        self.refused: Counter[str] = Counter()
        self.warned = 0
        """Schemas with keywords that are not enforced."""
        self.compile: list[float] = []
        self.fills: list[float] = []
        self.valid = 0
        self.invalid = 0
        self.accepted: list[str] = []
        """Schemas whose invalid instances were accepted."""
        self.rejected: Counter[str] = Counter()
        """Valid instances that were rejected, by reason."""

    def figures(self) -> dict[str, Any]:
        failed = sum(self.refused.values())
        return {
            "schemas": self.schemas,
            "compile_failed": failed,
            "supported_share": round(1 - failed / self.schemas, 4),
            "compile_failed_by": dict(self.refused.most_common(40)),
            **({"warned": self.warned} if self.lenient else {}),
            "valid_instances": self.valid,
            "valid_rejected": sum(self.rejected.values()),
            "valid_rejected_share": round(sum(self.rejected.values()) / max(self.valid, 1), 5),
            "valid_rejected_by": dict(self.rejected),
            "valid_rejected_because": {name: WHY[name] for name in self.rejected if name in WHY},
            "invalid_instances": self.invalid,
            "invalid_accepted": len(self.accepted),
            "invalid_accepted_in": self.accepted[:20],
            "compile_ms": _percentiles(self.compile, 1e3),
            "mask_us": _percentiles(self.fills, 1e6) | {"mean": round(float(np.mean(self.fills)) * 1e6, 1)},
            "masks": len(self.fills),
        } | ({"thinking_mask_us": _percentiles(self.thinking, 1e6)} if self.thinking else {})


ORDER = "property order: keys come as the schema lists them"
NUMBER = "number spelling: 2.0 for an integer, exponents"
LIMIT = "complexity limit"
BESIDE = "keywords beside $ref hold, as from draft 2019-09 on"
WHY = {
    ORDER: "Declared properties must be generated first and in the order of the schema, so that the grammar "
    "is linear in the schema. The instance has the same properties in another order; every set of values can "
    "be generated in the required order.",
    NUMBER: "Numbers with bounds or multipleOf are generated without exponents, and integers without a "
    "fraction: 2 instead of 2.0.",
    LIMIT: "Github_easy---o21053 (both instances) and Github_trivial---o78117: a pattern of a hundred words "
    "within a length of 5,000, and an unanchored pattern of property names, exceed the lexer's limit of "
    "expressions when their string begins. The request ends with this reason. With higher limits one mask "
    "takes 340 to 900 ms, which would delay every other row.",
    BESIDE: "Github_hard---o13693 has 'required' beside a '$ref': draft 7 ignores it there, later drafts do "
    "not; the generated output is valid under both.",
}
"""Why valid instances are rejected."""
THINKING = (
    '<think>\nThe user wants <b>JSON</b>. If a < b, I should say so; "quotes" are fine.\n\nSo: 1, 2, 3.\n'
)


def _percentiles(values: list[float], scale: float) -> dict[str, float]:
    points = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, at)) * scale, 2) for name, at in points.items()}


async def measure(arguments: argparse.Namespace) -> Tally:
    """Measure every schema, or as many as the time allows."""
    tokenizer = Tokenizer.load(arguments.tokenizer, WIDTH, ENDS)
    compiler = Compiler(tokenizer.token_table(WIDTH), HelperProcess(), cache_bytes=2**24)
    compiler.prepare()
    before = tokenizer.encode(f"{THINKING}</think>\n\n", add_special=False).tolist()
    tally = Tally(before if arguments.behind else None, arguments.lenient)
    deadline = time.monotonic() + arguments.seconds
    selected = suite(arguments.suite) if arguments.suite else cases(arguments.data)
    try:
        for case in selected[: arguments.behind or arguments.schemas or None]:
            if time.monotonic() > deadline:
                break
            await _one(case, compiler, tokenizer, tally)
            if tally.schemas % 1_000 == 0:
                print(tally.schemas, "schemas,", len(tally.accepted), "invalid accepted", flush=True)
    finally:
        compiler.close()
        tokenizer.close()
    return tally


async def _one(case: Case, compiler: Compiler, tokenizer: Tokenizer, tally: Tally) -> None:
    tally.schemas += 1
    begun = time.perf_counter()
    try:
        text = json.dumps(case.schema, ensure_ascii=False)
        spec: GrammarSpec | None = GrammarSpec("json_schema", text, lenient=tally.lenient)
        if tally.before is not None:
            spec = constraint(Wanted(answer=spec, thinking="possible"), TOOLS["hermes"], REASONING["think"])
        assert spec is not None
        grammar = await compiler.compile(spec)
    except RequestError as error:
        tally.refused[_keyword(error.message)] += 1
        return
    finally:
        tally.compile.append(time.perf_counter() - begun)
    assert isinstance(grammar, Grammar)
    tally.warned += bool(grammar.warnings)
    for value, valid in case.tests:
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        try:
            ids = tokenizer.encode(written, add_special=False).tolist()
        except RequestError:
            continue  # a lone surrogate, which no tokenizer can encode
        fills: list[float] = []
        ids = (tally.before or []) + ids
        stopped = _feed(grammar, ids, fills)
        if stopped is not None and stopped.reason:  # recompile a broken grammar, as `Matchers` does
            grammar.broken = True
            grammar = await compiler.compile(spec)
            assert isinstance(grammar, Grammar)
        tally.thinking += fills[: len(tally.before or [])]
        tally.fills += fills[len(tally.before or []) :]
        tally.valid += valid
        tally.invalid += not valid
        if not valid and stopped is None:
            tally.accepted.append(case.path)
        if valid and stopped is not None:
            start = len(tally.before or [])
            texts = [
                tokenizer.decode(ids[start:end], skip_special=False) for end in (stopped.at, stopped.at + 1)
            ]
            tally.rejected[stopped.reason or _explain(*texts)] += 1


class Stopped(NamedTuple):
    """Position at which an instance was rejected, and the reason if the matcher broke."""

    at: int
    reason: str = ""


def _feed(grammar: Grammar, ids: list[int], fills: list[float]) -> Stopped | None:
    """Feed `ids` and an end token through the masks; None when all were allowed."""
    stepper, state, _ = grammar.matcher()
    bits = np.zeros((1, stepper.words), np.int32)
    for at, token in enumerate([*ids, ENDS[0]]):
        begun = time.perf_counter()
        stepper.fill([state], [0], bits)
        fills.append(time.perf_counter() - begun)
        if not int(bits[0, token >> 5]) >> (token & 31) & 1:
            (broken,) = stepper.accept([state], [ENDS[0]])
            limit = broken is not None and ("too many" in broken.lower() or "limit" in broken.lower())
            return Stopped(at, LIMIT if limit else "")
        (reason,) = stepper.accept([state], [token])
        if reason is not None:
            return Stopped(at, LIMIT)
    return None


def _keyword(message: str) -> str:
    """The keyword or cause of a compile error, for counting."""
    if found := re.search(r"keyword '([^']+)'|keys: \[\"([^\"]+)", message):
        return found[1] or found[2]
    for words, name in _CAUSES.items():
        if words in message:
            return name
    return message[:60]


_CAUSES = {
    "Unknown format": "format",
    "oneOf constraints": "oneOf",
    "min/maxProperties": "minProperties/maxProperties beside optional properties",
    "Unsatisfiable": "unsatisfiable",
    "circular references": "$ref in a circle, with siblings",
    "Pointer": "$ref to nothing",
    "Resource": "$ref to another document",
    "look": "pattern: lookaround",
    "backreference": "pattern: backreference",
    "regex": "pattern",
    "disjoint": "patternProperties that overlap",
    "stack level": "too complex",
    "too many": "too complex",
    "too large": "too complex",
    "longer than": "too complex",
    "items": "too complex",
}


def _explain(before: str, after: str) -> str:
    """Why a valid instance may have been rejected: `before` is its accepted prefix, `after` one token
    longer."""
    if _in_key(before):
        return ORDER
    if re.search(r"[:,\[]-?[0-9][-0-9.eE+]*$", before):
        return NUMBER
    if _in_key(after):
        return ORDER
    return BESIDE if after[-1:] in "}]" else "other"


def _in_key(text: str) -> bool:
    """Whether `text`, a prefix of a JSON value, ends inside an object's key or where a key must begin."""
    stack: list[str] = []
    inside = escaped = False
    expects_key = False
    for char in text:
        if inside:
            inside = escaped or char != '"'
            escaped = char == "\\" and not escaped
            continue
        if char == '"':
            inside = True
        elif char in "{[":
            stack.append(char)
            expects_key = char == "{"
        elif char in "}]":
            stack.pop()
            expects_key = False
        elif char == ",":
            expects_key = stack[-1:] == ["{"]
        elif char == ":":
            expects_key = False
    return expects_key


# -- generated output ------------------------------------------------------------------------------


async def generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answers of the default model under schemas of the data set, validated by jsonschema."""
    live = _live(16)
    tally: Counter[str] = Counter()
    try:
        gate = asyncio.Semaphore(16)
        chosen = await _chosen(live, arguments)
        await asyncio.gather(
            *(_write(live, gate, i, case, arguments.tokens, tally) for i, case in enumerate(chosen))
        )
    finally:
        live.close()
    return {
        "model": "SmolLM2-135M-Instruct, fp32, CPU, temperature 0.7",
        "max_tokens": arguments.tokens,
        **{name: tally[name] for name in ("schemas", "finished", "cut", "valid", "invalid", "failed")},
    }


def _live(rows: int) -> Live:
    """The default model for `rows` requests at once, started on the running loop."""
    model, schedule = ModelConfig(offline=True, context_length=2048), ScheduleConfig(max_running=rows)
    live = load(Config(model=model, schedule=schedule), lambda stage, share: None)
    live.replicas.start(asyncio.get_running_loop())
    return live


async def _chosen(live: Live, arguments: argparse.Namespace) -> list[Case]:
    """Schemas that compile and have a valid instance of moderate length, so that the model can finish."""
    assert live.grammars is not None
    chosen: list[Case] = []
    for case in cases(arguments.data):
        sizes = [len(json.dumps(value)) for value, valid in case.tests if valid]
        schema = json.dumps(case.schema, ensure_ascii=False)
        if not sizes or min(sizes) > 250 or len(schema) > 1_500:
            continue
        with contextlib.suppress(RequestError):
            await live.grammars.compile(GrammarSpec("json_schema", schema))
            chosen.append(case)
        if len(chosen) == arguments.generate:
            break
    return chosen


async def _write(
    live: Live, gate: asyncio.Semaphore, i: int, case: Case, tokens: int, tally: Counter[str]
) -> None:
    schema = json.dumps(case.schema, ensure_ascii=False)
    turn = {"role": "user", "content": f"Write one short example, as JSON, for this schema:\n{schema}"}
    job = Job(
        id=f"case-{i}",
        prompt=await live.loaded.template.render_async([turn], add_generation_prompt=True),
        sampling=SamplingParams(temperature=0.7),
        max_tokens=tokens,
        seed=i,
        grammar=GrammarSpec("json_schema", schema),
    )
    pieces: list[str] = []
    ends: list[Finish] = []

    def sink(index: int, piece: Piece) -> None:
        pieces.append(piece.text)
        if piece.finish is not None:
            ends.append(piece.finish)

    async with gate:
        run = await live.loaded.engine.start(job, sink)
        await run.wait()
    tally["schemas"] += 1
    if ends[0].reason is FinishReason.STOP:
        tally["finished"] += 1
        tally["valid" if _valid("".join(pieces), case) else "invalid"] += 1
    else:
        tally["cut" if ends[0].reason is FinishReason.LENGTH else "failed"] += 1


def _valid(text: str, case: Case) -> bool:
    """Validate with jsonschema, in decimals: in binary floats 152.08 is not a multiple of 0.01."""
    schema = json.loads(json.dumps(case.schema), parse_float=Decimal)
    validator = jsonschema.validators.validator_for(schema)
    try:
        validator(schema).validate(json.loads(text, parse_float=Decimal))
    except (ValueError, jsonschema.ValidationError) as error:
        print("INVALID", case.path, text[:200], error)
        return False
    return True


# -- neighbours ------------------------------------------------------------------------------------


def _wide(count: int) -> GrammarSpec:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return GrammarSpec("json_schema", json.dumps({"type": "object", "properties": properties}))


HOSTILE: list[GrammarSpec | None] = [
    GrammarSpec("regex", "((a{1,100}){1,100}){1,100}"),
    GrammarSpec("regex", r"(\w|\W){0,5000}"),
    GrammarSpec("regex", "a" * 1_000_000),
    GrammarSpec("regex", "(a|b)*a(a|b){200}"),
    GrammarSpec("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    GrammarSpec("json_schema", '{"anyOf":[{"$ref":"#"},{"type":"integer"}]}'),
    GrammarSpec(
        "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}})
    ),
    GrammarSpec(
        "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1_000)}})
    ),
    GrammarSpec("ebnf", 'start: e\ne: e e | "a" | e "b" e'),
    GrammarSpec(
        "ebnf", "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(300)) + 'r300: "y"'
    ),
    GrammarSpec("ebnf", 'start: ("a"{0,1000}){0,1000}'),
    GrammarSpec("choice", json.dumps([f"{i}" for i in range(20_000)])),
    GrammarSpec(
        "structural_tag",
        json.dumps({"format": {"type": "regex", "pattern": "((\\w|\\W){0,400}){0,400}"}}),
    ),
]


async def hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Inter-token latency of one stream beside two plain streams, and beside two clients that send
    hostile grammars while it runs."""
    live = _live(4)
    tally: Counter[str] = Counter()
    gaps: dict[str, list[float]] = {"beside_plain": [], "beside_hostile": []}
    try:
        plain: list[GrammarSpec | None] = [None]
        for name, sources in (("beside_plain", plain), ("beside_hostile", HOSTILE)):
            over = asyncio.Event()
            others = [
                asyncio.ensure_future(_others(live, sources[i:] + sources[:i], over, f"{name}-{i}", tally))
                for i in (0, len(sources) // 2)
            ]
            gaps[name] = await _stream(live, name)
            over.set()
            await asyncio.gather(*others)
    finally:
        live.close()
    return {
        "model": "SmolLM2-135M-Instruct, fp32, CPU, three rows",
        **{f"gap_ms_{name}": _percentiles(found, 1e3) for name, found in gaps.items()},
        "hostile_requests": dict(tally),
    }


async def _stream(live: Live, id: str, tokens: int = 600) -> list[float]:
    """Seconds between the tokens of one stream."""
    times: list[float] = []
    sampling = SamplingParams(temperature=0.0)
    job = Job(id=id, prompt="Once upon a time", sampling=sampling, max_tokens=tokens, ignore_eos=True)
    run = await live.loaded.engine.start(job, lambda index, piece: times.append(time.perf_counter()))
    await run.wait()
    return [after - before for before, after in pairwise(times)]


async def _others(
    live: Live, sources: list[GrammarSpec | None], over: asyncio.Event, id: str, tally: Counter[str]
) -> None:
    """Send one request after another until `over` is set."""
    count, pieces = 0, list[Piece]()
    while not over.is_set():
        grammar = sources[count % len(sources)]
        if grammar is not None and count >= len(
            sources
        ):  # avoid the grammar cache, as a hostile client would
            grammar = msgspec.structs.replace(grammar, text=grammar.text + " " * count)
        count += 1
        job = Job(id=f"{id}-{count}", prompt="Once", max_tokens=50, seed=1, grammar=grammar, ignore_eos=True)
        try:
            run = await live.loaded.engine.start(job, lambda index, piece: pieces.append(piece))
        except RequestError:
            tally["refused"] += 1
            continue
        await run.wait()
        finish = pieces[-1].finish
        if grammar is not None and finish is not None:
            tally[finish.reason.value] += 1


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the flags for schemas and tokenizer."""
    parser.add_argument(
        "--data", type=Path, help="MaskBench's schemas with their tests, one JSON object a line, as .jsonl.xz"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with Qwen3's tokenizer")


PARTS = ("behind_thinking", "generated", "neighbour", "lenient", "test_suite")
"""Keys in the result file of the runs with options."""


def main() -> None:
    """Measure and update bench/results/structured.json; figures of other parts are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
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
    kept = RESULTS / "structured.json"
    figures: dict[str, Any] = {}
    if kept.exists():
        figures = msgspec.json.decode(kept.read_bytes())
        del figures["name"], figures["conditions"]
    if arguments.generate:
        figures["generated"] = asyncio.run(generate(arguments))
    elif arguments.suite:
        figures["test_suite"] = asyncio.run(measure(arguments)).figures()
    elif arguments.lenient:
        figures["lenient"] = asyncio.run(measure(arguments)).figures()
    elif arguments.behind:
        figures["behind_thinking"] = asyncio.run(measure(arguments)).figures()
    elif arguments.hostile:
        figures["neighbour"] = asyncio.run(hostile(arguments))
    else:
        tally = asyncio.run(measure(arguments))
        figures = {"tokenizer": "Qwen3", **tally.figures()} | {
            name: figures[name] for name in PARTS if name in figures
        }
    write("structured", figures)


if __name__ == "__main__":
    main()
