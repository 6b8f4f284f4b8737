"""Which schemas compile, which of their instances the masks accept, and the times of both."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from app.helper.process import HelperProcess
from app.parsers.grammar import Wanted, constraint
from app.parsers.registry import REASONING, TOOLS
from app.text.tokenizer import Tokenizer
from bench.structured.schemas import ENDS, WIDTH, Case, cases, suite
from core.errors import RequestError
from core.grammar import GrammarSpec
from gpu.grammar import Compiler
from gpu.grammar.stepper import Grammar


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
            "compile_ms": percentiles(self.compile, 1e3),
            "mask_us": percentiles(self.fills, 1e6) | {"mean": round(float(np.mean(self.fills)) * 1e6, 1)},
            "masks": len(self.fills),
        } | ({"thinking_mask_us": percentiles(self.thinking, 1e6)} if self.thinking else {})


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


def percentiles(values: list[float], scale: float) -> dict[str, float]:
    points = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, at)) * scale, 2) for name, at in points.items()}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of every schema, or of as many as the time allows."""
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
    return tally.figures()


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
        stopped = feed(grammar, ids, fills)
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


def feed(grammar: Grammar, ids: list[int], fills: list[float]) -> Stopped | None:
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
