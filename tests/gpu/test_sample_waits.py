"""The launch thread reads nothing back: all that it does to a step works on tensors that hold nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from core.plan import Chunk, NewSlot, StepPlan
from core.request.params import SamplingParams
from core.types import NO_TOKENS, LogprobsMode
from gpu.grammar.matchers import Masks
from gpu.hidden import HiddenRows
from gpu.models.base import CausalModel
from gpu.prompt import score_prompts
from gpu.sample.kernels import SamplingKernels, Scores
from gpu.sample.rows import Rows
from gpu.sample.weights import draw_weights
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import PackedRows, place
from gpu.step.rings import Entries, Rings
from gpu.step.sampling import Choice, Logits, Sampled, Sampling, SamplingDevice, SamplingStage
from tests.rigs.arrays import ints

META = torch.device("meta")
"""Whatever would read a value of such a tensor raises."""

ROWS, VOCAB, HIDDEN = 6, 300, 8


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors that were sent to the host: copies that nobody waits for."""
    sent: list[torch.Tensor] = []

    def download(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    for module in ("gpu.sample.logprobs", "gpu.hidden"):
        monkeypatch.setattr(f"{module}.download", download)
    return sent


def nothing(*args: Any, **options: Any) -> None:
    return None


def score(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    return Scores(logits.sum(1), logits.sum(1), tokens.clone())


def best_tokens(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty(len(logits), k, dtype=torch.int64, device=META)


TOLD = SimpleNamespace(score=score, best_tokens=best_tokens)


class Stage:
    """A stage on a device without memory; `launched` are the keys of its launches."""

    def __init__(self) -> None:
        self.launched: list[object] = []
        names = ("start_counts", "mask_rows", "adjust", "penalise", "choose", "accept")
        kernels = SimpleNamespace(**dict.fromkeys(names, nothing), draw_weights=draw_weights, **vars(TOLD))
        columns = tuple(torch.zeros(n, dtype=torch.int32, device=META) for n in (ROWS, ROWS, 1))
        self.rings = Rings(Entries(Limits(ROWS, ROWS, 64, 3, 4, ROWS), 4, META), META)
        rows = Rows(*columns, SlotTables(ROWS, 4, META))
        device = SamplingDevice(rows, self.rings, cast(SamplingKernels, kernels))
        processors = {"lift": lambda logits, output, params: logits[3].add_(1.0)}
        self.stage = SamplingStage(device, VOCAB, self._head, processors)

    def _head(self, rows: int, adapters: bool) -> torch.Tensor:
        return torch.zeros(rows, VOCAB, device=META)

    def __getitem__(self, key: Any) -> Any:
        self.launched.append(key)
        return self.stage.work(key)

    def begin(self, *params: SamplingParams) -> None:
        new = tuple(NewSlot(i + 1, each, ints(range(9)), ints([4]), 0) for i, each in enumerate(params))
        plan = StepPlan(1, NO_TOKENS, new_slots=new)
        self.stage.prepare(plan, self.rings.write(plan))

    def sample(self, rows: int, masks: Masks | None = None) -> Sampled:
        return self.stage.launch(StepPlan(1, ints(range(1, rows + 1))), rows, masks, self)


PLAIN = SamplingParams(seed=1)
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "masked_logprobs", "processed_logprobs")
OPTIONS = [
    *(SamplingParams(logprobs=3, logprobs_mode=mode, entropy=True) for mode in MODES),
    SamplingParams(top_k=5, support=True),
    SamplingParams(logprobs=20, logprob_ids=(7, 9)),
    SamplingParams(logit_bias=((3, 1.0),), min_tokens=4, stop_ids=frozenset({1, 2})),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(processor="lift"),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("params", OPTIONS)
def test_no_option_waits(params: SamplingParams, masked: bool, downloads: list[torch.Tensor]) -> None:
    stage = Stage()
    stage.begin(PLAIN, params, PLAIN)
    masks = Masks([1, 2], [2, 3], np.zeros((2, 10), np.int32)) if masked else None
    sampled = stage.sample(3, masks)
    assert stage.launched == [Logits(3), Choice(3)], "the other rows are launched as ever"
    assert bool(downloads) == params.wants_logprobs
    assert list(sampled.processed.rows) == ([1] if params.processor else [])
    assert all(len(tensor) == 1 for tensor in downloads), "more than the row that asked"


def test_plain_rows_take_one_launch(downloads: list[torch.Tensor]) -> None:
    stage = Stage()
    stage.begin(PLAIN, msgspec.structs.replace(PLAIN, top_p=0.5))
    assert stage.sample(1) == Sampled()
    assert stage.sample(2) == Sampled()
    assert stage.launched == [Sampling(1, filtered=False), Sampling(2, filtered=True)]
    assert not downloads


def test_masks_go_with_their_rows(downloads: list[torch.Tensor]) -> None:
    stage = Stage()
    stage.begin(PLAIN, SamplingParams(repetition_penalty=2.0))
    stage.sample(2, Masks([0], [1], np.zeros((1, 10), np.int32)))
    stage.sample(2)
    stage.sample(1)
    assert stage.launched == [*[Logits(2), Choice(2)] * 2, Sampling(1, filtered=False)]


class Head:
    """A model's last product."""

    def logits(self, hidden: torch.Tensor, slot: int = 0) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB, device=META)


def test_prompts_and_hidden_states_do_not_wait(downloads: list[torch.Tensor]) -> None:
    chunks = (
        Chunk(1, 0, ints(range(9)), True, logprobs=2, logprob_ids=(4,), target=-1),
        Chunk(2, 0, ints(range(7)), True, hidden="all", hidden_start=2),
        Chunk(3, 4, ints(range(5)), False, hidden="sum", logprobs=0, target=6),
    )
    plan = StepPlan(1, NO_TOKENS, chunks)
    hidden, model = torch.zeros(plan.num_tokens, HIDDEN, device=META), Head()
    count = torch.zeros(1, dtype=torch.int32, device=META)
    packed = PackedRows(plan, place(plan), count, count)
    scores = score_prompts(model.logits, cast(SamplingKernels, TOLD), hidden, packed)
    taken = HiddenRows().take(cast(CausalModel, model), hidden, None, packed)
    assert sorted(scores) == [1, 3] and sorted(taken.hidden) == [2, 3]
    assert len(downloads) == 2 * 2 + 2
