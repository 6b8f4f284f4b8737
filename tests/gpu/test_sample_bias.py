"""Additions to logits by id, and how a slot's change hands."""

from __future__ import annotations

import torch

from core.request.params import SamplingParams
from gpu.sample.bias import BiasTable

VOCAB = 10


def table(*owners: SamplingParams) -> BiasTable:
    """A table whose slot 1 had `owners`, one after the other."""
    biases = BiasTable(2, torch.device("cpu"))
    for params in owners:
        biases.set(1, params)
    return biases


def changed(biases: BiasTable, slot: int) -> tuple[dict[int, float], set[int]]:
    """What the slot adds to zeros, by id, and the ids it masks."""
    added, masked = torch.zeros(VOCAB), torch.zeros(VOCAB)
    biases.add_bias(added, slot)
    biases.mask_stops(masked, slot)
    return (
        {i: float(added[i]) for i in added.nonzero().squeeze(1).tolist()},
        set(masked.isneginf().nonzero().squeeze(1).tolist()),
    )


FIRST = SamplingParams(logit_bias=((2, 1.5), (4, -3.0)), min_tokens=2, stop_ids=frozenset({7, 8}))
SECOND = SamplingParams(logit_bias=((4, 2.0),), min_tokens=1, stop_ids=frozenset({8}))


def test_a_slot_adds_its_own_and_no_other_does() -> None:
    assert changed(table(FIRST), 1) == ({2: 1.5, 4: -3.0}, {7, 8})
    assert changed(table(FIRST), 0) == ({}, set())


def test_a_new_owner_replaces_everything() -> None:
    assert changed(table(FIRST, SECOND), 1) == ({4: 2.0}, {8})
    assert changed(table(FIRST, SamplingParams(stop_ids=frozenset({7}))), 1) == ({}, set())


def test_an_id_named_twice_is_added_twice() -> None:
    assert changed(table(SamplingParams(logit_bias=((3, 1.0), (3, 0.5)))), 1) == ({3: 1.5}, set())


def test_a_mask_hides_neither_nan_nor_infinity() -> None:
    logits = torch.zeros(VOCAB)
    logits[7], logits[8] = torch.nan, torch.inf
    table(FIRST).mask_stops(logits, 1)
    assert logits[7].isnan()
    assert logits[8].isnan()
