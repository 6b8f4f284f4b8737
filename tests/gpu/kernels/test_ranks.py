"""Sums and logits over GPUs, one rank after another: who is first stores its part and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.kernels.ranks import INBOXES
from gpu.peers import Exchanged, PeerGroup, PeerRank, make_peers, peer_ranks
from gpu.thread import device_thread

RANKS, TOKENS, HIDDEN, SAMPLES, VOCAB = 3, 6, 40, 5, 9000
"""The vocabulary is more than two programs of a rank, and does not divide."""


@pytest.fixture
def ranks(device: torch.device, dtype: torch.dtype) -> Iterator[list[PeerRank]]:
    with device_thread(device):
        group = PeerGroup(RANKS, torch.zeros(1, dtype=torch.int32, device=device))
        yield [*peer_ranks(group, [device] * RANKS, Exchanged(TOKENS, HIDDEN, dtype, SAMPLES, VOCAB))]


def wait(rank: PeerRank, whether: bool) -> None:
    rank._sums.gate.fill_(int(whether))


def in_turn(
    ranks: list[PeerRank], run: Sequence[Callable[[], Tensor]], counts: Sequence[Tensor]
) -> list[Tensor]:
    """Results of each of `run` when all other ranks have stored theirs: the first run is not worth anything,
    and is not counted."""
    before = [count.clone() for count in counts]
    for rank, each in zip(ranks, run, strict=True):
        wait(rank, False)
        each()
    found = []
    for rank, each, count, old in zip(ranks, run, counts, before, strict=True):
        count.copy_(old)
        wait(rank, True)
        found.append(each())
    return [each.clone() for each in found]


def test_sums_are_added_to_the_residual_and_normed(
    ranks: list[PeerRank], device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Exchanges of changing rows: each row counts its own, and two inboxes serve in turn."""
    for rows in (TOKENS, 1, 4, 4, TOKENS):
        check_sums(ranks, rows, device, dtype, tolerance)
    assert [int(each) for each in ranks[0]._sums.turns] == [5, 4, 4, 4, 2, 2]
    for at, rank in enumerate(ranks):
        # What was read last is there, what was read before it is empty again, of peers.
        for row, turn in enumerate(rank._sums.turns.tolist()):
            last, before = (rank._sums.inboxes[at][(turn - back) % INBOXES, :, row] for back in (1, 2))
            peers = [peer for peer in range(RANKS) if peer != at]
            assert not is_empty(last[peers]).any() and is_empty(before[peers]).all()


def is_empty(part: Tensor) -> Tensor:
    return (part == 0) & part.signbit()


def check_sums(
    ranks: list[PeerRank], rows: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    weight = torch.randn(HIDDEN, device=device).to(dtype)
    parts = [torch.randn(TOKENS, HIDDEN, device=device).to(dtype) for _ in range(RANKS)]
    parts[1][:, ::5] = -0.0  # what is never sent
    old = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)
    residuals, keeps = [old.clone() for _ in ranks], [torch.zeros_like(old) for _ in ranks]
    live = torch.tensor([rows], dtype=torch.int32, device=device)

    def run(at: int) -> Tensor:
        residuals[at].copy_(old)
        return ranks[at].add_rms_norm(parts[at], residuals[at], (weight, 1e-5), keeps[at], live, False)

    turns = [rank._sums.turns for rank in ranks]
    found = in_turn(ranks, [partial(run, at) for at in range(RANKS)], turns)
    total = (sum(part.float() for part in parts).to(dtype).float() + old.float()).to(dtype)
    want = torch.nn.functional.rms_norm(total.float(), (HIDDEN,), weight.float(), 1e-5)
    for each, residual, keep in zip(found, residuals, keeps, strict=True):
        assert torch.equal(each[:rows], found[0][:rows]), "ranks go on with equal bits"
        assert torch.equal(residual[:rows], total[:rows]) and torch.equal(keep[:rows], total[:rows])
        assert torch.equal(residual[rows:], old[rows:]), "padding is left alone"
        torch.testing.assert_close(each[:rows].float(), want[:rows], rtol=tolerance, atol=tolerance)


def test_a_sum_alone(ranks: list[PeerRank], device: torch.device, dtype: torch.dtype) -> None:
    parts = [torch.randn(4, HIDDEN, device=device).to(dtype) for _ in range(RANKS)]
    run = [partial(rank.reduce_sum, part) for rank, part in zip(ranks, parts, strict=True)]
    want = sum(part.float() for part in parts).to(dtype)
    for found in in_turn(ranks, run, [rank._sums.turns for rank in ranks]):
        assert torch.equal(found, want)


def test_a_sum_of_mean_squares(ranks: list[PeerRank], device: torch.device) -> None:
    """The sum is in float32, beside sums of hidden states, which have inboxes of their own."""
    parts = [torch.rand(4, 2, device=device) for _ in range(RANKS)]
    run = [partial(rank.reduce_sum, part) for rank, part in zip(ranks, parts, strict=True)]
    for found in in_turn(ranks, run, [rank._pairs.turns for rank in ranks]):
        torch.testing.assert_close(found, sum(parts))
    assert [int(each) for each in ranks[0]._sums.turns] == [0] * TOKENS


def test_rows_of_a_divided_table(ranks: list[PeerRank], device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(7 * RANKS, HIDDEN, device=device).to(dtype)
    ids = torch.tensor([0, 6, 7, 20, 13], dtype=torch.int32, device=device)
    live = torch.tensor([4], dtype=torch.int32, device=device)
    parts = table.view(RANKS, 7, HIDDEN)
    run = [partial(rank.embed, part, ids, live, False) for rank, part in zip(ranks, parts, strict=True)]
    for found in in_turn(ranks, run, [rank._sums.turns for rank in ranks]):
        assert torch.equal(found[:4], table[ids[:4].long()])


def test_logits_are_gathered_without_what_pads_the_vocabulary(
    ranks: list[PeerRank], device: torch.device
) -> None:
    size = -(-VOCAB // RANKS) + 40
    for rows in (SAMPLES, 2, 3):
        whole = torch.randn(rows, size * RANKS, device=device)
        parts = [whole[:, size * at : size * (at + 1)] for at in range(RANKS)]
        run = [partial(rank.gather, part) for rank, part in zip(ranks, parts, strict=True)]
        for found in in_turn(ranks, run, [rank._gathers.turns for rank in ranks]):
            assert torch.equal(found, whole[:, :VOCAB])


def test_whoever_waits_ends_when_the_group_is_aborted(
    ranks: list[PeerRank], device: torch.device, dtype: torch.dtype
) -> None:
    wait(ranks[0], True)
    ranks[0]._group.abort("a rank is gone")
    ranks[0].reduce_sum(torch.ones(1, HIDDEN, device=device, dtype=dtype))


def test_gpus_without_access_to_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match="--tp 2: cuda:0 has no access to the memory of cuda:1"):
        make_peers(devices, Exchanged(TOKENS, HIDDEN, torch.bfloat16, SAMPLES, VOCAB))
