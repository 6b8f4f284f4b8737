"""Cases of `bench.kernels.compile`: what begins a step, chooses and accepts its tokens, and drafts the next.

Qwen3-8B's vocabulary and pages, 256 rows. As there: tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from core.config import MAX_NODES
from core.models import LinearSpec
from gpu.kernels.attention import decode
from gpu.kernels.attention.decode_config import verify_config
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages
from gpu.kernels.delta import gated_delta
from gpu.kernels.ngram import look_up
from gpu.kernels.paths import move_paths
from gpu.kernels.sampling import drafts as draft_kernels
from gpu.kernels.sampling import kernels
from gpu.kernels.sampling.sample import perturb
from gpu.kernels.step import begin_step
from gpu.kv.states import StatePool
from gpu.sample.kernels import MaskRows
from gpu.sample.penalties import Counts
from gpu.sample.token_tables import token_tables
from gpu.state.draft_rows import ONE_TOKEN, Block, DraftRows
from gpu.state.entry import Limits
from gpu.state.history import History, history_words
from gpu.state.recurrent import DeltaInputs
from gpu.state.served import make_served
from gpu.state.tables import SlotTables
from gpu.step.buffers import HiddenShape, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.steps import Forward

CPU = torch.device("cpu")
LINEAR = LinearSpec(
    layers=frozenset({0}), key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, mixed=True
)
ROWS, PAGES, PAGE, VOCAB, HIDDEN, STEP = 256, 128, 16, 151_936, 4096, 2048


class _Step:
    """The memory of steps of rows with up to `drafts` drafts."""

    def __init__(self, drafts: int = 0, trees: bool = False, places: int = 0) -> None:
        samples = ROWS * (2 if drafts else 1)
        limits = Limits(ROWS, 64, STEP, 8192, PAGES, samples, drafts, trees)
        self.tables = SlotTables(ROWS, PAGES, CPU, drafts, trees)
        self.buffers = StepBuffers(self.tables, limits, HiddenShape(HIDDEN, torch.bfloat16), places)
        self.rings = Rings(Entries(limits, 4, CPU), CPU)
        self.chosen = torch.zeros(samples, dtype=torch.int64)
        self.decode = Forward(samples, samples, 0, samples, query=1 + drafts, adapters=places > 0)
        self.mixed = Forward(STEP, samples, 64, samples, query=1 + drafts, adapters=places > 0)

    def begin(self, mixed: bool, pdl: bool) -> None:
        """Compile the first kernels of a step."""
        key = self.mixed if mixed else self.decode
        view, samples = self.buffers.view(key), self.buffers.samples.first(key.samples)
        begin_step(self.rings.entries, self.tables, view, samples, page_size=PAGE, pdl=pdl)

    def linear(self, mixed: bool, pdl: bool) -> None:
        """Compile linear attention, as in Qwen3-Next."""
        key = self.mixed if mixed else self.decode
        pool = StatePool(LINEAR, ROWS + 1, 1, torch.bfloat16, CPU, self.tables.most_drafts)
        wide = torch.empty(key.tokens, LINEAR.channels + LINEAR.value_size, dtype=torch.bfloat16)
        heads = torch.empty(2, key.tokens, LINEAR.value_heads)
        weight = torch.empty(LINEAR.channels, LINEAR.kernel, dtype=torch.bfloat16)
        inputs = DeltaInputs(wide[:, : LINEAR.channels], heads[0], heads[1], weight, LINEAR)
        gated_delta(pool, 0, self.buffers.view(key), inputs, pdl=pdl)

    def accept(self, counted: bool, pdl: bool) -> None:
        """Compile the last kernels of a step."""
        counts = Counts(8, 1024, CPU) if counted else None
        kernels.accept(self.chosen, self.buffers.rows, self.rings.cursor, self.rings.answers, counts, pdl=pdl)

    def adjust(self, pdl: bool) -> None:
        """Compile the kernels that change logits for rows that ask for it."""
        rows, counts = self.buffers.rows.first(32), Counts(8, VOCAB, CPU)
        logits = torch.empty(32, VOCAB)
        masks = MaskRows(torch.zeros(32, dtype=torch.int32), torch.zeros(4, VOCAB // 32, dtype=torch.int32))
        kernels.start_counts(self.rings.entries, counts, new_slots=4, marks=2048)
        kernels.mask_rows(logits, masks, rows.live, pdl=pdl)
        kernels.adjust(logits, rows, token_tables(ROWS + 1, CPU), masks, pdl=pdl)
        kernels.penalise(logits, rows, counts, pdl=pdl)
        perturb(logits, rows, pdl=pdl)
        perturb(logits, rows, torch.zeros(VOCAB, dtype=torch.int32), pdl=pdl)

    def paths(self, pdl: bool) -> None:
        """Compile the kernels that move accepted paths to the front: of hidden states, and of pages."""
        rows = self.buffers.rows
        move_paths(self.buffers.sample_hidden[None], rows, pdl=pdl)
        pages = torch.empty(4, 64 * PAGE, 2048, dtype=torch.bfloat16)
        move_paths(pages, rows, self.buffers.begun()[1], pdl=pdl)

    def attend(self, pdl: bool) -> None:
        """Compile attention to rows with drafts."""
        query, kv = self.decode.query, 8
        config = verify_config(128, kv, 132, self.decode.tokens, query, group=4)
        view = self.buffers.view(self.decode)
        both = torch.empty(64 * PAGE, 2, kv, 128, dtype=torch.bfloat16)
        plan = plan_decode(
            view.decode_slots, view.decode_lengths, config, longest=query, num_rows=view.num_decode,
            ancestors=view.ancestors, pdl=pdl,
        )  # fmt: skip
        space = decode.decode_workspace(self.decode.tokens, 32, kv, 128, config, CPU)
        layer = Pages(both[:, 0], both[:, 1], self.tables.page_table, PAGE, 0.1)
        q = torch.empty(self.decode.tokens, 32, 128, dtype=torch.bfloat16)
        decode.paged_decode(q, layer, plan, space, config, ancestors=view.ancestors, pdl=pdl)

    def draft(self, block: Block, shifted: bool, pdl: bool) -> None:
        """Compile a draft model's steps, without its layers."""
        rows = DraftRows.of(self.tables, block)._replace(page_size=PAGE, shifted=shifted)
        samples, live = self.buffers.samples.first(self.decode.samples), self.buffers.rows.live
        for key in (self.decode, self.mixed):
            behind = torch.zeros(key.chunks, dtype=torch.int32) if key.chunks else None
            view = self.buffers.view(key)._replace(ancestors=None)
            draft_kernels.follow(view, samples, live, self.chosen, rows, behind, pdl=pdl)
            draft_kernels.start(view, samples, rows, pdl=pdl)
        states = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16)
        draft_kernels.keep((states, states), rows.ends, (states, states), pdl=pdl)
        draft_kernels.keep((states, states.clone()), None, (states, states), pdl=pdl)
        logits = torch.empty(len(rows.slots), 32_000)
        names = torch.zeros(32_000, dtype=torch.int32)
        for few in (rows, rows.first(8)):
            draft_kernels.draw(logits[: len(few.slots)], names, few, 0, pdl=pdl)
            draft_kernels.draw(logits[: len(few.slots)], None, few, 0, pdl=pdl)

    def look_up(self, served: int, pdl: bool) -> None:
        """Compile prompt lookup, in `served` tokens of others too."""
        index = make_served(ROWS + 1, served, CPU)
        history = History(history_words(ROWS + 1, 8192, CPU), self.tables.most_drafts, 4, 2, index)
        look_up(history, self.tables, self.buffers.samples, self.chosen, ROWS, pdl=pdl)


def step_cases(pdl: bool) -> dict[str, Callable[[], Any]]:
    """See `bench.kernels.compile`."""
    kinds: dict[str, tuple[Any, ...]] = {
        "": (),
        " drafts": (3,),
        " trees": (15, True),
        " lora": (0, False, 8),
        " both": (15, True, 8),
    }
    block = Block(8, 5, causal=False)
    found: dict[str, Callable[[], Any]] = {}

    def begin(kind: tuple[Any, ...], mixed: bool) -> None:
        _Step(*kind).begin(mixed, pdl)

    def linear(mixed: bool, drafts: int) -> None:
        _Step(drafts).linear(mixed, pdl)

    def accept(kind: tuple[Any, ...], counted: bool) -> None:
        _Step(*kind).accept(counted, pdl)

    for mixed in (False, True):
        found[f"delta{' mixed' * mixed}"] = partial(linear, mixed, 0)
        found[f"delta drafts{' mixed' * mixed}"] = partial(linear, mixed, 3)
    for name, kind in kinds.items():
        for mixed in (False, True):
            found[f"begin{name}{' mixed' * mixed}"] = partial(begin, kind, mixed)
        if kind[2:] == ():
            found[f"accept{name}"] = partial(accept, kind, False)
            found[f"accept{name} counts"] = partial(accept, kind, True)
    return found | {
        "adjust": lambda: _Step().adjust(pdl),
        "paths": lambda: _Step(15, True).paths(pdl),
        "attend trees": lambda: _Step(15, True).attend(pdl),
        "attend most": lambda: _Step(MAX_NODES, True).attend(pdl),
        "draft chain": lambda: _Step(3).draft(ONE_TOKEN, False, pdl),
        "draft head": lambda: _Step(3).draft(ONE_TOKEN, True, pdl),
        "draft block": lambda: _Step(7).draft(block, False, pdl),
        "lookup": lambda: _Step(4).look_up(0, pdl),
        "lookup served": lambda: _Step(4).look_up(1_000_000, pdl),
    }
