"""Kernels between the forwards of drafts in a chain: they write what a CPU does, and draw what the target
would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu.draft import kernels as plain
from gpu.draft.kernels import DraftKernels
from gpu.kernels.sampling import drafts as triton_kernels
from gpu.sample import torch_kernels
from gpu.sample.rows import DraftSamples, Rows
from gpu.state.draft_rows import ONE_TOKEN, Block, DraftRows
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import Samples
from tests.rigs.runner import CPU

SLOTS, PAGES, PAGE, MOST, VOCAB = 7, 8, 4, 3, 3000
PLAIN: DraftKernels = plain
KERNELS: list[DraftKernels] = [plain, triton_kernels]

# Behind a step of two decode rows of three and one token, a chunk that ends its prompt and one that does not:
# slots 5, 2, 3, and a sample and two tokens of padding.
IDS = [11, 12, 13, 21, 31, 32, 33, 41, 0, 0]
POSITIONS = [8, 9, 10, 16, 4, 5, 6, 0, 0, 0]
DECODE_SLOTS = [5, 5, 5, 2]
SAMPLE_ROWS = [0, 3, 6, 1, 2, 0]
SAMPLE_SLOTS = [5, 2, 3, 5, 5, 0]
SAMPLE_POSITIONS = [9, 17, 6, 10, 11, 0]
CHOSEN = [101, -1, 103, 104, 105, 0]
LENGTHS = {5: 10, 2: 17, 3: 6}
"""Slot 5 accepted one draft of two."""


def tables(device: torch.device) -> SlotTables:
    """Slot 2 is at its limit; all have pages of numbers of their own."""
    made = SlotTables(SLOTS - 1, PAGES, device, MOST)
    made.page_table.copy_(torch.arange(1, 1 + SLOTS * PAGES).view(SLOTS, PAGES))
    for slot, length in LENGTHS.items():
        made.length[slot], made.last_token[slot] = length, 200 + slot
        made.limit[slot] = 17 if slot == 2 else 60
        made.seed[slot] = 2**40 + slot
    made.temperature[5], made.temperature[2] = 0.7, 1.3
    return made


def step(device: torch.device) -> tuple[StepView, Samples]:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    page_table, none = tables(device).page_table, ints([])
    slots = [*DECODE_SLOTS, 3, 3, 3, 4, 0, 0]
    cells = [
        int(page_table[slot, at // PAGE]) * PAGE + at % PAGE
        for slot, at in zip(slots, POSITIONS, strict=True)
    ]
    cells[3] = cells[8] = cells[9] = 0  # at its limit, and padding
    view = StepView(
        10, 4, 2, ints([8, 4, 2, 5]), ints(IDS), ints(POSITIONS), ints(cells), page_table,
        ints(DECODE_SLOTS), ints([at + 1 for at in POSITIONS[:4]]), none, none, ints([4, 7, 8]), none,
    )  # fmt: skip
    drafts = DraftSamples(ints([3]), ints([0, 2, 2, 2, 0, 0]), ints([1]))
    return view, Samples(ints(SAMPLE_ROWS), ints(SAMPLE_SLOTS), ints(SAMPLE_POSITIONS), drafts)


def begun(device: torch.device, shifted: bool, rows: int, block: Block = ONE_TOKEN) -> DraftRows:
    made = DraftRows.of(tables(device), block)
    made.gaps.skipped[3] = 2  # of one row
    return made._replace(page_size=PAGE, shifted=shifted).first(rows)


def contents(rows: DraftRows) -> list[list[float]]:
    """All that kernels write; of the dump no drafts."""
    view, live = rows.view, int(rows.view.counts[0])
    written = (
        view.counts, view.ids, view.positions, view.kv_slot_mapping, view.decode_slots, view.decode_lengths,
        rows.ends, rows.slots, rows.positions[:live], rows.tables.drafts[1:],
    )  # fmt: skip
    return [each.tolist() for each in written]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("told", [None, -1, 7])
def test_a_draft_model_reads_successors(
    kernels: DraftKernels, shifted: bool, told: int | None, device: torch.device
) -> None:
    where = CPU if kernels is PLAIN else device
    live, chosen = torch.tensor([5], dtype=torch.int32), torch.tensor(CHOSEN)
    rows = begun(where, shifted, 4)
    behind = None if told is None else torch.tensor([-1, told], dtype=torch.int32, device=where)
    view, last = kernels.follow(*step(where), live.to(where), chosen.to(where), rows, behind)
    # What a row has no token for stands as 0; the draft that was rejected has a successor nobody reads. Of a
    # chunk inside its prompt the host may know it.
    successors = [101, 104, 105, 0, 32, 33, 103, max(told or 0, 0), 0, 0]
    assert view.ids.tolist() == (successors if shifted else IDS)
    assert last.tolist()[:3] == [1, 3, 6]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_draft_model_closes_gaps(kernels: DraftKernels, device: torch.device) -> None:
    where = CPU if kernels is PLAIN else device
    live, chosen = torch.tensor([5], dtype=torch.int32, device=where), torch.tensor(CHOSEN, device=where)
    rows, given = begun(where, shifted=False, rows=6), step(where)
    skipped, taken = rows.gaps
    skipped[5], taken[5] = 1, 6  # of the text before position 8 it has not two tokens more
    skipped[2], taken[2] = 0, 14
    view, _ = kernels.follow(*given, live, chosen, rows, None)
    # A prompt under way has no gap, whatever its slot had before; no gap of slot 4, which does not sample.
    assert skipped.tolist() == [0, 0, 2, 0, 0, 3, 0]
    assert [taken[slot] for slot in LENGTHS] == list(LENGTHS.values())
    assert view.positions.tolist() == [5, 6, 7, 14, *POSITIONS[4:]]
    assert view.decode_lengths.tolist() == [6, 7, 8, 15]
    first = PAGE * (1 + 5 * PAGES + 1)
    # What is stored in the dump stays there.
    assert view.kv_slot_mapping.tolist() == [
        first + 1,
        first + 2,
        first + 3,
        0,
        *given[0].kv_slot_mapping[4:],
    ]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("at", [None, [4, 0, 1]])
def test_states_of_last_tokens_are_kept(
    kernels: DraftKernels, at: list[int] | None, device: torch.device
) -> None:
    where = CPU if kernels is PLAIN else device
    rows = None if at is None else torch.tensor(at, dtype=torch.int32, device=where)
    first, second = torch.randn(5, 24, device=where), torch.randn(5, 24, device=where)
    for states in ((first, second), (first, first)):
        out = torch.zeros(6, 24, device=where), torch.zeros(6, 24, device=where)
        kernels.keep(states, rows, out)
        for got, given in zip(out, states, strict=True):
            want = given if at is None else given[at]
            assert torch.equal(got[: len(want)], want)
            assert not got[len(want) :].any()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rows", [3, 5])
def test_drafts_begin_behind_the_last_token(shifted: bool, rows: int, device: torch.device) -> None:
    found = []
    for kernels, where in ((plain, CPU), (triton_kernels, device)):
        made = begun(where, shifted, rows)
        kernels.start(*step(where), made)
        found.append(contents(made))
        tables, view = made.tables, made.view
        # The decode rows have pages up to 12 and 20, the last one for a limit of 17; the prompt up to 8.
        assert made.ends.tolist()[:3] == [12, 17, 8]
        assert tables.drafts[[5, 2, 3], 0].tolist() == [2 + shifted, 0 + shifted, 2 + shifted]
        # The draft model has two entries less of slot 3.
        assert view.positions.tolist()[:3] == [10, 16, 4]
        assert view.kv_slot_mapping.tolist()[:3] == [4 * (5 * PAGES + 3) + 2, 0, 4 * (3 * PAGES + 2)]
        assert view.kv_slot_mapping.tolist()[3:] == [0] * (rows - 3)
        assert view.decode_lengths.tolist()[3:] == [1] * (rows - 3)
        assert view.counts.tolist() == [3, 3, 0, 3]
    assert found[0] == found[1]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rows", [5, 6])
def test_drafts_are_drawn_as_the_targets_tokens(
    reduced: bool, shifted: bool, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 3 is greedy, slots 5 and 2 draw; the second row's logits have no token at the second draft."""
    monkeypatch.setattr(triton_kernels, "_FEW", 5)  # in single blocks, and in runs of them
    ids = torch.randperm(VOCAB)[:2100].sort().values if reduced else None
    pairs = [(plain, CPU), (triton_kernels, device)]
    made = [begun(where, shifted, rows) for _, where in pairs]
    for (kernels, where), each in zip(pairs, made, strict=True):
        kernels.start(*step(where), each)
    known = torch.ones(3)
    for at in range(MOST):
        logits = torch.randn(rows, VOCAB if ids is None else len(ids)) * 3
        logits[2, [40, 1900]] = 30.0  # a tie
        if at == 1:
            logits[1, 5] = float("nan")
        for (kernels, where), each in zip(pairs, made, strict=True):
            kernels.draw(logits.to(where), None if ids is None else ids.to(where), each, at)
        assert contents(made[0]) == contents(made[1])
        torch.testing.assert_close(
            made[1].tables.survival.cpu(), made[0].tables.survival, atol=1e-6, rtol=1e-4
        )
        want, own = by_the_target(logits, ids, at), made[0].tables
        drafts = own.drafts[[5, 2, 3], 1 + at]
        assert drafts.tolist() == want.clamp(min=0).tolist()
        heat = torch.tensor([0.7, 1.3, 1.0])
        index = drafts if ids is None else torch.searchsorted(ids, drafts.long()).clamp(max=len(ids) - 1)
        known = known * (logits[:3] / heat[:, None]).softmax(-1)[range(3), index.long()].nan_to_num()
        torch.testing.assert_close(own.survival[[5, 2, 3], at], known, atol=1e-6, rtol=1e-4)
        assert made[0].view.positions.tolist()[3:] == [0] * (rows - 3)
        # A forward behind the pages is stored in the dump, and stays within them.
        assert made[0].view.positions[1] == 16 and made[0].view.kv_slot_mapping[1] == 0
        assert made[0].view.positions[0] == min(11 + at - shifted, 11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_block_is_drafted_at_once(
    causal: bool, first: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "_FEW", 5)
    block, found, rows = Block(3, 777, causal), [], 4
    logits = torch.randn(rows * 2, VOCAB) * 3
    for kernels, where in ((plain, CPU), (triton_kernels, device)):
        made = begun(where, False, rows, block)
        kernels.start(*step(where), made, first)
        tables, view, live = made.tables, made.view, 3 - first
        assert view.counts.tolist() == [3 * live, 3 * live, 0, 2 * live]
        assert view.decode_slots.tolist() == [slot for slot in [5, 2, 3, 0, 0][first:][:4] for _ in range(3)]
        # The slot at its limit has no page for a mask, the draft model two entries less of slot 3.
        last = [[10, 11, 11], [16, 16, 16], [4, 5, 6], [0, 0, 0]][first:]
        assert view.positions.view(rows, 3).tolist()[: len(last)] == last
        seen = [[11, 12, 12], [17, 17, 17], [5, 6, 7]] if causal else [[12] * 3, [17] * 3, [6] * 3]
        assert view.decode_lengths.view(rows, 3).tolist()[:live] == seen[first:]
        tokens = [[205, 777, 777], [202, 777, 777], [203, 777, 777], [0, 0, 0]][first:]
        assert view.ids.view(rows, 3).tolist()[: len(tokens)] == tokens
        assert made.positions.view(rows, 2).tolist()[:live] == [[11, 12], [18, 19], [7, 8]][first:]
        assert tables.drafts[[5, 2, 3], 0].tolist()[first:] == [1, 0, 1][first:]
        found.append((made, contents(made)))
        kernels.draw(logits.to(where), None, made, 0)
    (own, begun_), (other, as_begun) = found
    assert begun_ == as_begun and contents(own) == contents(other)
    torch.testing.assert_close(other.tables.survival.cpu(), own.tables.survival, atol=1e-6, rtol=1e-4)
    slots, heat = torch.tensor([5, 2, 3][first:]), torch.tensor([0.7, 1.3, 1.0][first:])
    known = torch.ones(len(slots))
    for at in range(2):
        mine = logits[at::2][: len(slots)]
        want = by_the_target(torch.cat([torch.zeros(first, VOCAB), mine]), None, at)[first:]
        assert own.tables.drafts[slots, 1 + at].tolist() == want.tolist()
        known = known * (mine / heat[:, None]).softmax(-1)[range(len(slots)), want]
        torch.testing.assert_close(own.tables.survival[slots, at], known, atol=1e-6, rtol=1e-4)


def by_the_target(logits: Tensor, ids: Tensor | None, made: int) -> Tensor:
    """Tokens that the target draws from the same logits, tokens that the draft lacks being impossible."""
    own = tables(CPU)
    whole = logits
    if ids is not None:
        whole = torch.full((len(logits), VOCAB), float("-inf"))
        whole[:, ids] = logits
    slots = torch.tensor([5, 2, 3], dtype=torch.int32)
    positions = own.length[slots.long()] + 1 + made
    tokens = torch.zeros(3, dtype=torch.int64)
    rows = Rows(slots, positions, torch.tensor([3]), own)
    torch_kernels.choose(whole, rows, tokens, filtered=False)
    return tokens
