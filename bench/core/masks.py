"""CPU time of the grammar masks of a step.

    python -m bench.core.masks --data FILE --tokenizer DIR [--rows 64] [--threads 1,2,4] [--drafts 4]

`rows` requests, each with its own schema of MaskBench (`shared`: all with one), replay valid instances token
by token. A step is what the launch path does: `Matchers.fill`, then `Matchers.accept`. `cpu` is CPU time of
all threads, which depends less on other processes. `python_us` is the time without the calls of the grammar
library. With `--drafts` rows have right drafts of which a step takes the first: the work of a step, not
of a token. Rows whose text has ended begin another. Bias: the texts are compact JSON, with fewer cheap tokens
(white space) than a model writes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from bench.flags import command
from bench.results import write
from bench.structured.masks import feed
from bench.structured.schemas import ENDS, WIDTH, add_sources, cases
from core.errors import RequestError
from core.grammar import CompiledGrammar, GrammarSpec
from core.plan import NewSlot, StepPlan
from core.request import SamplingParams
from gpu.grammar import Compiler
from gpu.grammar.matchers import Matchers
from gpu.grammar.stepper import Grammar, Matcher
from gpu.sample.rows import RowTokens
from gpu.state.tables import SlotTables

Text = tuple[CompiledGrammar, list[int]]


async def texts(compiler: Compiler, tokenizer: Tokenizer, data: Path, count: int) -> list[Text]:
    """Grammars, each with a text of at least 30 tokens that it accepts."""
    found: list[Text] = []
    for case in cases(data):
        valid = [value for value, label in case.tests if label]
        if not valid or len(found) == count:
            continue
        written = json.dumps(max(valid, key=lambda value: len(str(value))), separators=(",", ":"))
        try:
            grammar = await compiler.compile(GrammarSpec("json_schema", json.dumps(case.schema)))
        except RequestError:
            continue
        ids = tokenizer.encode(written, add_special=False).tolist()
        assert isinstance(grammar, Grammar)
        if len(ids) >= 29 and feed(grammar, ids, []) is None:
            found.append((grammar, [*ids, ENDS[0]]))
    return found


class NullStepper:
    """A stepper that does nothing, to measure the time of `Matchers` alone."""

    def __init__(self, words: int) -> None:
        self.words = words

    def fill(self, states: Sequence[Any], rows: Sequence[int], bits: Any) -> None:
        """Do nothing."""

    def fill_ahead(
        self, states: Sequence[Any], rows: Sequence[int], bits: Any, ahead: Sequence[Sequence[int]]
    ) -> list[int]:
        """Do nothing."""
        return [1 + len(tokens) for tokens in ahead]

    def lost(self, state: Any) -> bool:
        """Whether the state was lost: never."""
        return False

    def accept(self, states: Sequence[Any], tokens: Sequence[int]) -> list[str | None]:
        """Accept all."""
        return [None] * len(states)

    def ended(self, state: Any, token: int) -> bool:
        """Whether `token` is an end token."""
        return token in ENDS


class NullGrammar:
    """A grammar with a `NullStepper`."""

    def __init__(self, stepper: NullStepper) -> None:
        self._stepper = stepper

    def matcher(self) -> Any:
        """See `CompiledGrammar.matcher`."""
        return Matcher(self._stepper, None)


def drive(listed: list[Text], rows: int, steps: int, drafts: int = 0) -> dict[str, float]:
    """Microseconds of fill, accept, both, and CPU time over `steps` steps of `rows` rows with `drafts`."""
    tables = SlotTables(rows, 1, torch.device("cpu"), drafts)
    matchers, source = Matchers(tables), itertools.cycle(listed)
    running: list[list[int]] = [[] for _ in range(rows)]
    slots = np.arange(rows, dtype=np.int32)
    fills, accepts, cpu = [], [], []
    for step in range(steps):
        tokens, new = [], []
        for slot in range(rows):
            if not running[slot]:
                grammar, ids = next(source)
                running[slot] = ids[::-1]
                new.append(NewSlot(slot, SamplingParams(), slots[:1], slots[:0], 0, grammar=grammar))
            tokens.append(running[slot].pop())
        matchers.apply(new)
        for slot in range(rows) if drafts else ():
            ahead = [tokens[slot], *running[slot][::-1]][:drafts]
            tables.drafts[slot, : 1 + len(ahead)] = torch.tensor([len(ahead), *ahead])
        plan = StepPlan(step, slots, query_length=1 + drafts, drafts=drafts * rows)
        begun, used = time.perf_counter(), time.process_time()
        masks = matchers.fill(plan)
        filled = time.perf_counter()
        assert masks is not None
        failed = matchers.accept(masks, RowTokens(np.array(tokens, np.int32)))
        accepts.append(time.perf_counter() - filled)
        cpu.append(time.process_time() - used)
        fills.append(filled - begun)
        assert not failed, failed
    measured = {"fill": fills, "accept": accepts, "both": np.add(fills, accepts), "cpu": cpu}
    return {
        name: round(float(np.percentile(values, at)) * 1e6, 1)
        for which, values in measured.items()
        for name, at in ((f"{which}_p50_us", 50), (f"{which}_p99_us", 99))
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All thread counts, with a grammar per row and with one shared grammar."""
    tokenizer = Tokenizer.load(arguments.tokenizer, WIDTH, ENDS)
    table = tokenizer.token_table(WIDTH)
    figures: dict[str, Any] = {"rows": arguments.rows, "drafts": arguments.drafts, "width": WIDTH}
    for threads in map(int, arguments.threads.split(",")):
        compiler = Compiler(table, HelperProcess(), threads)
        compiler.prepare()
        listed = await texts(compiler, tokenizer, arguments.data, 2 * arguments.rows)
        for name, some in (("own", listed), ("shared", [max(listed, key=lambda each: len(each[1]))])):
            drive(some, arguments.rows, 50)  # warm-up: lexers fill their tables
            found = drive(some, arguments.rows, arguments.steps, arguments.drafts)
            figures[f"{name}_{threads}_threads"] = found
        compiler.close()
    null: Any = NullGrammar(NullStepper(-(-WIDTH // 32)))
    idle = drive([(null, ids) for _, ids in listed], arguments.rows, arguments.steps, arguments.drafts)
    figures["python_us"] = {key: value for key, value in idle.items() if "p50" in key}
    tokenizer.close()
    return figures


def main() -> None:
    """Measure and write bench/results/masks.json."""
    parser = command(__doc__)
    add_sources(parser)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--drafts", type=int, default=0)
    arguments = parser.parse_args()
    write("masks", asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
