"""Ranks that are GPUs of one host: each writes into the memory of the others.

`make_peers` allocates on every GPU what the others write into, `PeerRank` launches the exchanges
(`gpu.kernels.ranks`) on its own. What the host decides for all goes through `gpu.ranks.RankGroup`, as on a
CPU.

A rank that waits for another occupies its GPU until that one comes. So nothing that the launch threads do in
between may wait for a device: kernels are loaded and memory is taken while nobody waits (`PeerRank.apart`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.errors import ConfigError
from gpu.kernels.jit import cdiv
from gpu.kernels.ranks import (
    COLUMNS,
    EMPTY,
    INBOXES,
    GatherPeers,
    Peers,
    Place,
    push_gather,
    push_rows,
    push_sum,
)
from gpu.ranks import Rank, RankGroup
from gpu.thread import device_thread

PAIR = 2
"""Width of the mean squares that norms over the heads of all ranks exchange, float32 in every model. Their
inboxes are their own: those of one width take turns by row."""

HELD = 256 * 2**20
"""Bytes that torch's allocator keeps for work that no graph holds: taking memory from the driver may wait for
the device."""


class Exchanged(NamedTuple):
    """The largest that ranks exchange.

    tokens   rows of a sum: tokens of a step
    hidden   its width, in `dtype`
    samples  rows of logits, float32
    vocab    tokens of the whole vocabulary
    """

    tokens: int
    hidden: int
    dtype: torch.dtype
    samples: int
    vocab: int

    def blocks(self, ranks: int) -> int:
        """Programs of a row of logits."""
        return cdiv(cdiv(self.vocab, ranks), COLUMNS)

    def held_bytes(self, ranks: int) -> int:
        """On each rank."""
        sums = INBOXES * ranks * self.tokens * (self.hidden * self.dtype.itemsize + 4 * PAIR)
        return sums + self.samples * (4 * self.vocab + 8 * ranks * self.blocks(ranks)) + HELD


class PeerGroup(RankGroup):
    """Ranks that are GPUs. Waiting kernels look at `word` int32 [1], which is the host's."""

    def __init__(self, ranks: int, word: Tensor) -> None:
        super().__init__(ranks)
        self.word = word

    def abort(self, reason: str) -> None:
        """See `RankGroup.abort`; kernels that wait end too, with whatever they have."""
        self.word.fill_(1)
        super().abort(reason)


class PeerRank(Rank):
    """One rank of a `PeerGroup`. Owner: its launch thread."""

    def __init__(
        self,
        group: PeerGroup,
        number: int,
        sums: tuple[Peers, Peers],
        gathers: GatherPeers,
        limits: Exchanged,
    ) -> None:
        """`sums` of [any, hidden] and of [any, PAIR]."""
        super().__init__(group, number)
        (self._sums, self._pairs), self._gathers, self._vocab = sums, gathers, limits.vocab
        self._sum_place = Place(number, group.ranks, limits.tokens)
        self._gather_place = Place(number, group.ranks, limits.samples * limits.blocks(group.ranks))

    def reduce_sum(self, part: Tensor, num_rows: Tensor | None = None, pdl: bool = False) -> Tensor:
        """See `gpu.ranks.Rank.reduce_sum`, of [n, hidden] in the model's dtype or float32 [n, PAIR]."""
        peers = self._pairs if part.shape[1] == PAIR else self._sums
        return push_sum(part.contiguous(), peers, self._sum_place, num_rows=num_rows, pdl=pdl)

    def add_rms_norm(
        self,
        part: Tensor,
        residual: Tensor,
        norm: tuple[Tensor, float],
        keep: Tensor | None,
        num_rows: Tensor,
        pdl: bool,
    ) -> Tensor:
        """The sum over ranks of `part`, added to the residual and normed in the same kernel (`push_sum`)."""
        return push_sum(
            part,
            self._sums,
            self._sum_place,
            residual=residual,
            norm=norm,
            keep=keep,
            num_rows=num_rows,
            pdl=pdl,
        )

    def embed(self, table: Tensor, ids: Tensor, num_rows: Tensor, pdl: bool) -> Tensor:
        """Rows `ids` of a table of which this rank has a part, `table`."""
        return push_rows(table, ids, self._sums, self._sum_place, num_rows=num_rows, pdl=pdl)

    def gather(self, part: Tensor) -> Tensor:
        """See `gpu.ranks.Rank.gather`, of logits: as many columns as the vocabulary has tokens, which the
        next call writes over."""
        return push_gather(part, self._gathers, self._gather_place, self._vocab)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While kernels are compiled, loaded and captured: exchanges wait for nobody, and what they find is
        worth nothing. Begins and ends on all ranks together."""
        self._meet()
        self._sums.gate.zero_()
        yield
        torch.empty(HELD, dtype=torch.uint8, device=self._sums.gate.device)  # the allocator keeps it
        self._meet()
        for sums in (self._sums, self._pairs):
            sums.turns.zero_()
            sums.inboxes[self.shard.rank].fill_(EMPTY)
        self._gathers.turns.zero_()
        self._gathers.flags[self.shard.rank].zero_()
        self._sums.gate.fill_(1)
        self._meet()

    def _meet(self) -> None:
        """All ranks have ended what they launched."""
        torch.cuda.synchronize()
        self._exchange(None)


def make_peers(devices: Sequence[torch.device], limits: Exchanged) -> tuple[RankGroup, Sequence[Rank]]:
    """A rank on each of the GPUs. Raises `ConfigError` where one cannot reach another's memory."""
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise ConfigError(
                f"--tp {len(devices)}: {one} has no access to the memory of {other}. Choose others by "
                "--base-gpu-id and --gpu-id-step, or one GPU a replica by --dp."
            )
    group = PeerGroup(len(devices), torch.from_numpy(np.zeros(1, np.int32)).pin_memory())
    return group, peer_ranks(group, devices, limits)


def peer_ranks(group: PeerGroup, devices: Sequence[torch.device], limits: Exchanged) -> Sequence[PeerRank]:
    """A rank of the group on each device, with the memory that all of them write into."""
    ranks = len(devices)
    cells = limits.samples * limits.blocks(ranks)
    size = (INBOXES, ranks, limits.tokens)
    sums = [_filled(EMPTY, each, *size, limits.hidden, dtype=limits.dtype) for each in devices]
    pairs = [_filled(EMPTY, each, *size, PAIR, dtype=torch.float32) for each in devices]
    logits = [_filled(0, each, limits.samples, limits.vocab, dtype=torch.float32) for each in devices]
    logit_flags = [_filled(0, each, 2, ranks, cells) for each in devices]
    with device_thread(devices[0]):
        for own, others in permutations(logit_flags, 2):
            own.copy_(others)  # torch grants access when it first copies
    made: list[PeerRank] = []
    for number, device in enumerate(devices):
        gate = _filled(0, device, 1)
        adds, means = (
            Peers(tuple(inboxes), _filled(0, device, limits.tokens), gate, group.word)
            for inboxes in (sums, pairs)
        )
        gathers = GatherPeers(tuple(logits), tuple(logit_flags), _filled(0, device, cells), gate, group.word)
        made.append(PeerRank(group, number, (adds, means), gathers, limits))
    return made


def _filled(value: float, device: torch.device, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    with device_thread(device):
        return torch.full(shape, value, dtype=dtype, device=device)
