"""Routing, and its pairs in tiles: exactly the stable sort of the twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import scalar
from gpu.experts import Choice, Experts
from gpu.kernels.jit import cdiv, pow2_divisor
from gpu.kernels.moe.route import max_blocks, route
from gpu.ops import plain


def expected_blocks(experts: torch.Tensor, count: int, block_m: int) -> list[tuple[int, ...]]:
    """(expert, first place, rows) of every tile of `experts` [n, k]: an expert's units dealt out to them."""
    found: list[tuple[int, ...]] = []
    first, unit = 0, pow2_divisor(block_m)
    for expert, rows in enumerate(torch.bincount(experts.flatten(), minlength=count).tolist()):
        tiles, units, end = cdiv(rows, block_m), cdiv(rows, unit), first + rows
        for i in range(tiles):
            height = min(unit * len(range(i, units, tiles)), end - first)
            found.append((expert, first, height))
            first += height
    return found


def check_tiles(logits: torch.Tensor, live: int, top_k: int, block_m: int) -> None:
    experts, device = logits.shape[1], logits.device
    routing, tiles = route(logits, top_k, block_m, num_rows=scalar(live, device))
    weights, found = reference.route(logits[:live].float(), top_k, True)
    assert torch.equal(routing.experts[:live].long(), found)
    assert bool((routing.experts[live:] == -1).all())
    assert not routing.weights[live:].any()
    torch.testing.assert_close(routing.weights[:live], weights)
    assert torch.equal(tiles.pairs[: live * top_k].long(), found.flatten().argsort(stable=True))
    blocks = [tuple(block) for block in tiles.blocks.T.tolist()]
    expected = expected_blocks(found.cpu(), experts, block_m)
    assert blocks[: len(expected)] == [(*tile, 0) for tile in expected]
    assert all(block[2] == 0 for block in blocks[len(expected) :])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "live", "experts", "top_k", "block_m"),
    [(1, 1, 128, 8, 16), (7, 3, 20, 3, 16), (40, 40, 8, 2, 4), (90, 81, 16, 4, 192), (90, 90, 4, 2, 12)],
)
def test_tiles(
    rows: int, live: int, experts: int, top_k: int, block_m: int, kind: torch.dtype, device: torch.device
) -> None:
    logits = torch.randn(rows, experts, device=device).to(kind)
    logits[0, :5] = 9.0  # ties go to the lowest expert
    check_tiles(logits, live, top_k, block_m)


@pytest.mark.parametrize("chunks", [128, 2], ids=["a span a chunk", "spans"])
def test_tiles_of_many_rows(chunks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are sorted by comparing: each chunk ranks its own, in one span or in several."""
    monkeypatch.setattr("gpu.kernels.moe.route.SMALL", 60)
    monkeypatch.setattr("gpu.kernels.moe.route.CHUNKS", chunks)
    logits = torch.randn(300, 20, device=device).bfloat16()
    logits[7, 4:] = -torch.inf  # an expert that no value speaks for
    check_tiles(logits, 290, 3, 16)


def test_weights_that_are_not_renormalised(device: torch.device) -> None:
    logits = torch.randn(3, 12, device=device)
    routing, _ = route(logits, 2, 16, renormalise=False)
    torch.testing.assert_close(routing.weights, reference.route(logits, 2, False)[0])


CHOICES = {
    "V3": (16, Choice(sigmoid=True, groups=4, top_groups=2, scale=2.5)),
    "one group": (20, Choice(sigmoid=True, scale=1.5)),
    "V2": (15, Choice(groups=5, top_groups=2, scale=16.0)),  # groups of 3, no power of two
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_scores_with_a_bias_in_groups(
    name: str, renormalise: bool, kind: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels, for few rows and for many, route as the plain operations do."""
    experts, choice = CHOICES[name]
    if choice.sigmoid:
        choice = choice._replace(bias=torch.randn(experts, device=device))
    logits = torch.randn(19, experts, device=device).to(kind)
    logits[17:] = float("nan")  # padded rows may hold anything
    layer = Experts(logits, logits, 3, renormalise, choice=choice)
    weights, chosen = plain.route(logits[:17].float(), layer)
    for most in (19, 2):
        monkeypatch.setattr("gpu.kernels.moe.route.SMALL", most)
        routing, tiles = route(
            logits, 3, 16, renormalise=renormalise, choice=choice, num_rows=scalar(17, device)
        )
        assert routing.experts.tolist() == [*chosen.tolist(), [-1] * 3, [-1] * 3]
        torch.testing.assert_close(routing.weights[:17], weights)
        assert torch.equal(tiles.pairs[:51].long(), chosen.flatten().argsort(stable=True))


def test_groups_of_logits_that_are_no_numbers(device: torch.device) -> None:
    """No expert is out of bounds: an address that is would cost the process its device."""
    _, choice = CHOICES["V3"]
    logits = torch.full((2, 16), float("nan"), device=device)
    logits[1] = -float("inf")
    bias = torch.zeros(16, device=device)
    routing, _ = route(logits, 3, 16, choice=choice._replace(bias=bias))
    assert bool(((routing.experts >= 0) & (routing.experts < 16)).all())


def test_the_table_holds_the_worst_case() -> None:
    # one row everywhere but for one expert that takes what is left
    for rows, experts, top_k, block_m in ((1, 8, 2, 16), (9, 8, 2, 4), (33, 4, 1, 16), (100, 128, 8, 16)):
        pairs = rows * top_k
        lone = min(experts - 1, pairs - 1)
        tiles = lone + -(-(pairs - lone) // block_m)
        assert tiles <= max_blocks(rows, experts, top_k, block_m) <= pairs
