"""The captured step against the plain one: the same plans, the same tokens, whatever rows ask for.

No graph is captured here: the launches are plain calls on the same fixed buffers, in the sizes and
with the padding that graphs have.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.helper.process import HelperProcess
from app.text.tokenizer import Tokenizer
from core.executor import Capabilities
from core.grammar import GrammarSpec
from core.plan import Chunk, NewSlot, Save, StepFailure, StepPlan, StepResult
from core.request import SamplingParams
from core.request.params import Hidden
from gpu.executor import LocalExecutor
from gpu.grammar import Compiler
from gpu.grammar.stepper import Grammar
from gpu.kernels.step import begin_step
from gpu.kv.pool import KvPool
from gpu.runner import Uncaptured
from gpu.step.graphs import Plain
from gpu.step.rings import Rings, Ticket
from gpu.step.steps import Forward, PaddedSizes
from gpu.thread import device_thread
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.graph_runner import PAGE, PAGES, PROMPT, ROWS, Both
from tests.rigs.runner import CPU
from tests.rigs.tiny_model import Tiny

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the interpreter's; a GPU has tests/gpu/test_cuda.py",
)


CAPABILITIES = Capabilities(
    num_pages=PAGES, page_size=PAGE, max_rows=ROWS, context_length=PAGES * PAGE, vocab_size=tiny_model.VOCAB,
    max_step_tokens=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Models with two layers: the interpreter is slow, and `test_ops` covers the layers themselves."""
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def both(tiny: Tiny) -> Both:
    return Both(tiny.path)


def run(both: Both, params: Sequence[SamplingParams], steps: int, **chunk: int) -> None:
    """A row per entry, admitted in two steps, the first prompt in two chunks; then decode."""
    rig, slots = both.rig, range(1, len(params) + 1)
    news = [rig.new(slot, PROMPT[slot:], params=each) for slot, each in zip(slots, params, strict=True)]
    prompts = [ints(PROMPT[slot:]) for slot in slots]
    first = Chunk(1, 0, prompts[0][:7], False, target=int(prompts[0][7]), **chunk)
    both.step(chunks=[first], new=news[:1])
    rest = [Chunk(slot, 0, prompts[slot - 1], True, **chunk) for slot in slots[1:]]
    both.step(chunks=[Chunk(1, 7, prompts[0][7:], True, **chunk), *rest], new=news[1:])
    for _ in range(steps):
        both.step(decode=list(slots))


def test_after_a_warm_up_of_every_size(tiny: Tiny) -> None:
    run(Both(tiny.path, Plain), [SamplingParams(temperature=0.0)], 1)


def test_kernels_of_all_sizes_are_compiled_before_the_first_graph(tiny: Tiny) -> None:
    """Compilation happens in the context of `Machine.ahead`, and nothing else does: `NoWarmUp` calls
    nothing."""
    inside, calls = [False], list[bool]()

    @contextmanager
    def ahead() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def begin(*args: Any, **options: Any) -> None:
        calls.append(inside[0])
        begin_step(*args, **options)

    both = Both(tiny.path, ahead=ahead, begin=begin)
    sizes = [key for key in PaddedSizes(ROWS, 128, ROWS).all() if isinstance(key, Forward)]
    assert calls == [True] * len(sizes)
    run(both, [SamplingParams(max_tokens=2)], steps=1)
    calls.clear()
    with device_thread(CPU):
        both.runner.use_model(both.rig.model)
        both.runner.prepare()
    assert calls == [], "buffers hold rows of the steps before"


def test_states_of_linear_attention(tmp_path: Path) -> None:
    """A chunk begins in another's middle; states are saved within a chunk and behind a decode step."""
    kinds = ["linear_attention", "full_attention"]
    path = tiny_model.build("qwen3.5", tmp_path, num_hidden_layers=2, layer_types=kinds).path
    both = Both(path)
    rig, greedy = both.rig, SamplingParams(temperature=0.0, logprobs=2)
    both.step(
        chunks=[Chunk(1, 0, ints(PROMPT[:11]), False, target=PROMPT[11])],
        new=[rig.new(1, PROMPT, params=greedy)],
        saves=[Save(1, 4, 5), Save(1, 8, 2)],
    )
    shared = rig.new(2, PROMPT, shared=rig.pages[1][:2], params=greedy, checkpoint=2)
    chunks = [Chunk(1, 11, ints(PROMPT[11:]), True), Chunk(2, 8, ints(PROMPT[8:]), True)]
    first = both.step(chunks=chunks, new=[shared])
    assert first.tokens[0] == first.tokens[1]
    both.step(decode=[2, 1])
    after = both.step(decode=[2, 1], saves=[Save(1, 16, 3)])
    both.step(decode=[1])
    again = rig.new(3, [*PROMPT, 0, 0, 7], shared=rig.pages[1][:4], params=greedy, checkpoint=3)
    both.step(decode=[1], chunks=[Chunk(3, 16, ints([7]), True)], new=[again])
    assert after.tokens[0] == after.tokens[1]


def test_greedy_and_drawn_rows(both: Both) -> None:
    run(
        both,
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.8, seed=5),
            SamplingParams(temperature=1.5, top_p=0.8, seed=2**40 + 3),
            SamplingParams(temperature=1.2, top_k=7, min_p=0.02, seed=11),
        ],
        6,
    )


def test_rows_that_no_graph_holds(both: Both) -> None:
    run(
        both,
        [
            SamplingParams(temperature=0.0, logprobs=3),
            SamplingParams(temperature=0.0, logprobs=0, min_tokens=3, stop_ids=frozenset({5})),
            SamplingParams(temperature=0.9, seed=8, logit_bias=((5, 4.0), (9, -100.0))),
        ],
        4,
    )


PENALISED = (
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=2, frequency_penalty=0.7, presence_penalty=0.3, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=-1.0),
)


def test_penalties(both: Both) -> None:
    run(both, PENALISED, 12)


def test_penalties_beside_rows_that_no_graph_holds(both: Both) -> None:
    """The counts are the same, whoever samples the row."""
    run(both, [*PENALISED, SamplingParams(temperature=0.0, logprobs=0)], 4)
    for _ in range(3):
        both.step(decode=[1, 2, 3])


def test_penalties_know_the_output_of_a_retracted_row(both: Both) -> None:
    new = both.rig.new(1, PROMPT, params=PENALISED[1])
    again = NewSlot(1, new.params, new.prompt, ints([9, 9, 7]), 0)
    both.step(chunks=[Chunk(1, 0, ints([*PROMPT, 9, 9, 7]), True)], new=[again])
    for _ in range(6):
        both.step(decode=[1])


def test_an_order_larger_than_its_entry(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.step.shape.PAGE_WRITES", 3)
    run(Both(tiny.path), PENALISED, 4)


@pytest.mark.parametrize("positions", [256, 6])
def test_prompt_logprobs(both: Both, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are equal also for chunks that are scored slice by slice."""
    monkeypatch.setattr("gpu.prompt.POSITIONS", positions)
    run(both, [SamplingParams(temperature=0.0)] * 2, 1, logprobs=2)


@pytest.mark.parametrize("hidden", ["first", "last", "sum", "all"])
def test_hidden_states_come_from_graphs(both: Both, hidden: Hidden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of prompts in pieces, of prompts beside rows and of decode rows, with prompt
    log-probabilities: no forward is launched plainly, which would slow down all rows of the step."""
    plain = plain_forwards(both, monkeypatch)
    rig, states = both.rig, SamplingParams(temperature=0.0, hidden="all")
    first = Chunk(1, 0, ints(PROMPT[:7]), False, target=PROMPT[7], logprobs=1, hidden=hidden)
    both.step(chunks=[first], new=[rig.new(1, PROMPT, params=states)])
    both.step(chunks=[Chunk(1, 7, ints(PROMPT[7:]), True, logprobs=1, hidden=hidden)])
    second = Chunk(2, 0, ints(PROMPT[3:]), True, hidden=hidden)
    found = both.step(decode=[1], chunks=[second], new=[rig.new(2, PROMPT[3:])])
    assert found.hidden.keys() == {1, 2}
    assert both.step(decode=[2, 1]).hidden.keys() == {1}
    assert plain == [False] * 4


def plain_forwards(both: Both, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward from now on is launched plainly."""
    plain, forward = list[bool](), both.runner._forward

    def watched(key: Forward, uncaptured: Uncaptured | None = None, brief: bool = False) -> torch.Tensor:
        plain.append(uncaptured is not None)
        return forward(key, uncaptured, brief)

    monkeypatch.setattr(both.runner, "_forward", watched)
    return plain


@pytest.mark.parametrize("variant", ["olmo2", "gemma3", "granite", "qwen3-moe", "qwen3-next"])
def test_hidden_states_behind_every_kind_of_last_layer(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms before, behind and on both sides, factors, experts and gated heads."""
    both = Both(tiny_model.build(variant, tmp_path).path)
    plain, rig = plain_forwards(both, monkeypatch), both.rig
    both.step(chunks=[Chunk(1, 0, ints(PROMPT[:5]), True)], new=[rig.new(1, PROMPT[:5])])
    asking = Chunk(2, 0, ints(PROMPT), True, logprobs=1, hidden="all")
    both.step(decode=[1], chunks=[asking], new=[rig.new(2, PROMPT)])
    both.step(decode=[1, 2])
    assert plain == [False] * 3


def test_hidden_states_of_longer_steps_are_launched_plainly(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.step.buffers.TAIL_TOKENS", 63)
    both = Both(tiny.path)
    plain = plain_forwards(both, monkeypatch)
    both.step(chunks=[Chunk(1, 0, ints(PROMPT), True, hidden="all")], new=[both.rig.new(1, PROMPT)])
    assert plain == [True]


def test_prompts_of_embeddings(both: Both) -> None:
    """Cut, beside decode rows and ids, with what is told of a prompt and without; penalties skip them."""
    rows = np.random.default_rng(5).normal(0, 0.3, (len(PROMPT), both.rig.spec.hidden)).astype(np.float32)
    blank, rig = ints([0] * len(PROMPT)), both.rig
    both.step(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=[rig.new(1, PROMPT)])
    new = rig.new(2, blank.tolist(), params=PENALISED[0])
    new = NewSlot(2, new.params, new.prompt, new.output, 0, embedded=len(rows))
    both.step(decode=[1], chunks=[Chunk(2, 0, blank[:7], False, embeds=rows[:7])], new=[new])
    ids = Chunk(3, 0, ints(PROMPT[:9]), True)
    both.step(
        decode=[1], chunks=[ids, Chunk(2, 7, blank[7:], True, embeds=rows[7:])], new=[rig.new(3, PROMPT)]
    )
    told = Chunk(4, 0, ints([*blank[:8], *PROMPT[8:]]), True, embeds=rows[:8], hidden="all")
    both.step(decode=[2, 3], chunks=[told], new=[rig.new(4, blank.tolist())])
    for _ in range(3):
        both.step(decode=[4, 2, 1])


def test_a_slot_starts_anew_behind_a_cached_prefix(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot has so many keys that its chunk takes a deep graph."""
    monkeypatch.setattr("gpu.step.steps.DEEP_KEYS", 2 * PAGE)
    rig = both.rig
    run(both, [SamplingParams(temperature=0.0)], 2)
    pages = rig.pages[1][:2]
    tail = PROMPT[1 + 2 * PAGE :]
    new = rig.new(3, PROMPT[1:], shared=pages, params=SamplingParams(temperature=0.7, seed=1))
    both.step(decode=[1], chunks=[Chunk(3, 2 * PAGE, ints(tail), True)], new=[new])
    both.step(decode=[3, 1])


def test_a_step_without_samples(both: Both) -> None:
    chunk = Chunk(2, 0, ints(PROMPT), False)
    assert both.step(chunks=[chunk], new=[both.rig.new(2, PROMPT)]).tokens.shape == (0,)


@pytest.fixture(scope="module")
def digits() -> Grammar:
    """Five digits, then the end. The model has 256 tokens and they are all bytes."""
    table = Tokenizer.load(None, tiny_model.VOCAB, [3]).token_table(tiny_model.VOCAB)
    compiler = Compiler(table, HelperProcess())
    try:
        return asyncio.run(compiler.compile(GrammarSpec("regex", "[0-9]{5}")))
    finally:
        compiler.close()


def constrained(both: Both, slot: int, grammar: Grammar, params: SamplingParams) -> NewSlot:
    new = both.rig.new(slot, PROMPT, params=params)
    return NewSlot(slot, params, new.prompt, ints([]), 0, grammar=grammar)


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.0, logprobs=1)])
def test_masked_rows_beside_free_ones(both: Both, digits: Grammar, params: SamplingParams) -> None:
    news = [constrained(both, 1, digits, params), both.rig.new(2, PROMPT)]
    both.step(chunks=[Chunk(slot, 0, ints(PROMPT), True) for slot in (1, 2)], new=news)
    out = [both.step(decode=[2, 1]).tokens[1] for _ in range(4)]
    assert all(chr(token).isdigit() for token in out)
    assert both.step(decode=[2, 1]).tokens[1] == 3


def test_rows_that_may_not_stop_yet(both: Both, digits: Grammar) -> None:
    """Stop ids that the model would choose, beside a grammar's ends, and counted from a retraction on."""
    free = [int(both.step(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=[both.rig.new(1, PROMPT)]).tokens[0])]
    free += [int(both.step(decode=[1]).tokens[0]) for _ in range(7)]
    stops = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=9, stop_ids=frozenset(free))
    ends = SamplingParams(temperature=0.0, min_tokens=99, max_tokens=99, stop_ids=frozenset({3, 48, 49}))
    again = both.rig.new(3, PROMPT, params=stops)
    news = [
        both.rig.new(1, PROMPT, params=stops),
        constrained(both, 2, digits, ends),
        NewSlot(3, stops, again.prompt, ints([9, 9]), 0),
        both.rig.new(4, PROMPT),
    ]
    chunks = [Chunk(slot, 0, ints(PROMPT), True) for slot in (1, 2, 4)]
    chunks.insert(2, Chunk(3, 0, ints([*PROMPT, 9, 9]), True))
    told = [both.step(chunks=chunks, new=news)] + [both.step(decode=[1, 2, 3, 4]) for _ in range(5)]
    tokens = [result.tokens.tolist() for result in told]
    assert not set(free) & {row[0] for row in tokens[:4]}
    assert not set(free) & {row[2] for row in tokens[:2]}
    assert all(50 <= row[1] <= 57 for row in tokens[:5])  # digits that end nothing
    assert tokens[5][1] == 3  # nothing else is left
    assert [row[3] for row in tokens] == free[:6]


def test_steps_ahead_of_their_answers(tiny: Tiny, digits: Grammar) -> None:
    """Three steps are launched before the first is answered; masks wait for tokens, results do not change."""
    both = Both(tiny.path)  # the executor closes its runner
    rig, slots = both.rig, [1, 2, 3]

    def plans() -> list[StepPlan]:
        drawn = SamplingParams(temperature=0.8, seed=4)
        news = [constrained(both, 1, digits, GREEDY), rig.new(2, PROMPT), rig.new(3, PROMPT, params=drawn)]
        begin = rig.plan(chunks=[Chunk(slot, 0, ints(PROMPT), True) for slot in slots], new=news)
        return [begin, *(rig.plan(decode=slots) for _ in range(5))]

    with device_thread(CPU):
        want = [rig.runner.launch(plan).wait() for plan in plans()]
    arrived = threading.Semaphore(0)
    executor = LocalExecutor([both.runner], CAPABILITIES)
    executor.start(arrived.release)
    got: list[StepResult] = []
    for at, plan in enumerate(plans()):
        executor.submit(plan)
        while at - len(got) >= 2:
            arrived.acquire()
            got += [result for result in executor.results() if isinstance(result, StepResult)]
    executor.close()
    got += [result for result in executor.results() if isinstance(result, StepResult)]
    assert [result.tokens.tolist() for result in got] == [result.tokens.tolist() for result in want]


def test_a_step_whose_answer_is_lost_ends_the_executor(
    tiny: Tiny, digits: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait raises, as after an error of the device, and the launch of the next step, which waits for the
    masked tokens of this one, must not wait for ever."""
    both = Both(tiny.path)
    news = [constrained(both, 1, digits, GREEDY)]
    plans = [both.rig.plan(chunks=[Chunk(1, 0, ints(PROMPT), True)], new=news), both.rig.plan(decode=[1])]

    def lost(self: Rings, ticket: Ticket) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Rings, "read", lost)
    executor = LocalExecutor([both.runner], CAPABILITIES)
    executor.start(lambda: None)
    for plan in plans:
        executor.submit(plan)
    executor.close()
    assert executor.results() == [StepFailure(plans[0].step, "RuntimeError: device lost")]


def test_weights_and_pages_may_go_and_come(tiny: Tiny) -> None:
    both = Both(tiny.path)
    run(both, [SamplingParams(temperature=0.0)], 1)
    spec = both.rig.spec
    with device_thread(CPU):
        both.runner.use_pool(None)
        both.runner.use_model(None)
        with pytest.raises(AssertionError, match="given back"):
            both.runner.launch(both.rig.plan(decode=[1]))
        heads = spec.kv_shape
        both.runner.use_pool(KvPool(spec.layers, PAGES + 1, PAGE, heads, torch.float32, CPU))
        both.runner.use_model(both.rig.model)
        both.runner.prepare()
    both.rig.free = list(range(PAGES, 0, -1))
    run(both, [SamplingParams(temperature=0.0)], 2)
