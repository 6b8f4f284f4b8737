"""The kernels of the sampling stage. Two modules have them all: `gpu.sample.torch_kernels` for a CPU, and
`gpu.kernels.sampling.kernels` in Triton.

Logits are float32 [rows, vocab] and changed in place; padded rows stay as they are. None waits for the
device. `pdl` is programmatic dependent launch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from gpu.sample.penalties import Counts
from gpu.sample.rows import Rows
from gpu.sample.token_tables import TokenTables
from gpu.state.entry import EntryRing


class MaskRows(NamedTuple):
    """What grammars allow: `which` int32 [rows] is a row's mask in `bits` int32 [masks, words], -1 for none.
    Bit i of word w allows token 32 w + i; what lies behind is forbidden."""

    which: Tensor
    bits: Tensor


class Scores(NamedTuple):
    """For each row of logits: the largest float32 [n], the logarithm of the sum of all exponentials relative
    to it float32 [n], which is NaN where the row is not finite, and the rank of a token from 1 int64 [n].
    Among equals the lowest id comes first."""

    high: Tensor
    log_sum: Tensor
    ranks: Tensor

    def normalised(self, logits: Tensor) -> Tensor:
        """Log-probabilities of some `logits` [n, any] of these rows. Less the sum alone they would lose
        digits where all logits are large."""
        return logits.sub(self.high.unsqueeze(1)).sub_(self.log_sum.unsqueeze(1))


class SamplingKernels(Protocol):
    """See the module."""

    def start_counts(self, ring: EntryRing, counts: Counts, *, new_slots: int, marks: int) -> None:
        """Clear the count rows of a ring entry's new slots, then mark what they have of prompt and output."""
        ...

    def mask_rows(self, logits: Tensor, masks: MaskRows, live: Tensor, *, pdl: bool = False) -> None:
        """Forbid what the rows' grammars do not allow; `live` as in `Rows`."""
        ...

    def adjust(
        self, logits: Tensor, rows: Rows, tokens: TokenTables, masks: MaskRows, *, pdl: bool = False
    ) -> None:
        """Add logit_bias; forbid stop ids before `stop_from`, unless the row's grammar allows nothing
        else."""
        ...

    def penalise(self, logits: Tensor, rows: Rows, counts: Counts, *, pdl: bool = False) -> None:
        """Repetition, frequency and presence penalties of the slots that have counts. For a draft's sample
        the drafts up to it count as well."""
        ...

    def choose(
        self, logits: Tensor, rows: Rows, tokens: Tensor, *, filtered: bool, pdl: bool = False
    ) -> None:
        """Write a token per row to `tokens` int64 [rows], -1 where the logits are not finite. Without
        `filtered` no row has top_k, top_p or min_p."""
        ...

    def score(self, logits: Tensor, tokens: Tensor) -> Scores:
        """Scores of float32 `logits` [n, vocab] and a token of each row, int64 [n]."""
        ...

    def best_tokens(self, logits: Tensor, k: int) -> Tensor:
        """Ids int64 [n, k] of the largest of float32 `logits` [n, vocab], in order, the lowest id first among
        equals; `k` is at most vocab. A row with NaN gets some ids."""
        ...

    def accept(
        self,
        tokens: Tensor,
        rows: Rows,
        cursor: Tensor,
        out: Tensor,
        counts: Counts | None = None,
        *,
        pdl: bool = False,
    ) -> None:
        """Take each row's sampled `tokens` int64 [samples] up to the first that its next draft does not
        equal, none of a row at its limit. Write the row's length and last token, there 0 for -1, and to the
        current entry of the answer ring `out` the tokens taken, row by row, and behind them, where rows may
        have drafts, a word for each row: its tokens, and from `COUNT_BITS` on its drafts. With `counts`,
        count the tokens for the slots that have any; -1 is not counted.

        In a tree the path is taken whose every draft is what was sampled at its parent. Its samples are moved
        to where a chain's would be, in `tokens`, and `Paths.moved` says from where. `out` gets another word
        for each row: which drafts its path has."""
        ...

    def move_paths(
        self, entries: Tensor, rows: Rows, cells: Tensor | None = None, *, pdl: bool = False
    ) -> None:
        """Move what the path that `accept` took of each row has in `entries` int32 [layers, any, width] to
        where a chain would have it. A token's entry is that of its index, or of its cell of `cells` int32
        [tokens]."""
        ...

    def draw_weights(self, logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
        """What `tokens` int64 [rows] were drawn by: weights float32 [rows, vocab], 0 where a filter forbids;
        of a greedy row those of its logits. All rows are true."""
        ...
