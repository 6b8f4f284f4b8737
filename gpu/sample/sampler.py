"""From a step's logits to its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import NewSlot, RowLogprobs, Support
from core.types import NAN_TOKEN
from gpu.grammar.matchers import Masks
from gpu.sample.bias import BiasTable
from gpu.sample.filters import survivors
from gpu.sample.logprobs import entropies, only, raw_logprobs, row_logprobs, support
from gpu.sample.mask import allows_besides, mask_logits
from gpu.sample.noise import bits, exponential, row_keys
from gpu.sample.params import (
    AFTER_ALL,
    AFTER_MASK,
    BIASED,
    COUNTED,
    DRAWS,
    ENTROPY,
    LOGPROBS,
    MIN_TOKENS,
    PROCESSED,
    SUPPORT,
    ParamTable,
    SlotParams,
)
from gpu.sample.penalties import Counts
from gpu.sample.processors import Processor, Processors
from gpu.sample.select import argmax


class Sampled(NamedTuple):
    """`tokens` int64 [n], -1 where a row's logits were not finite; `logprobs` by row, for the rows
    that asked and have a token; `failed` says by row whose processor raised, and what."""

    tokens: Tensor
    logprobs: dict[int, RowLogprobs]
    failed: dict[int, str]


class Sampler:
    """Owner: launch thread. What every slot wants, and the choice of its next token.

    The steps of a row, each skipped when no row of the batch needs it: raw log-probabilities; the
    operator's logit processor; the grammar's mask; logit_bias; stop ids masked before min_tokens;
    repetition, frequency, presence penalty; then for greedy rows the argmax, lowest id on ties, for
    others temperature, top_k, top_p, min_p and a race of the tokens that are left.

    The race: token i wins with probability weight_i / sum of weights if its weight over its
    exponential noise is the largest. That is Gumbel-max, argmax(logit + gumbel) with gumbel =
    -log(exponential), exponentiated: one logarithm less per token.

    A row's token depends on its logits, its slot's parameters and counts, its seed and position.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        count_rows: int,
        device: torch.device,
        processors: Mapping[str, Processor] = MappingProxyType({}),
    ) -> None:
        """`processors` by the names that slots give."""
        self._processors = Processors(processors)
        self._params = ParamTable(max_rows + 1)  # slot 0 is the dump and stays neutral
        self._bias = BiasTable(max_rows + 1, device)
        self._counts = Counts(count_rows, vocab_size, device)
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._named: dict[int, tuple[int, ...]] = {}
        """By slot, the tokens whose log-probabilities it wants besides the best."""

    @property
    def counts(self) -> Counts:
        """Of the tokens of penalised slots."""
        return self._counts

    def apply(self, new_slots: Sequence[NewSlot], start_counts: bool = True) -> None:
        """Take over slots. Nothing of their former owners remains, but in the counts where somebody else
        starts them."""
        self._params.write(new_slots)
        self._processors.apply(new_slots)
        for new in new_slots:
            self._bias.set(new.slot, new.params)
            self._named.pop(new.slot, None)
            if new.params.logprob_ids:
                self._named[new.slot] = new.params.logprob_ids
            if new.count_row >= 0 and start_counts:
                self._counts.reset(new.count_row, new.known, new.output)

    def needs(self, slots: NDArray[np.int32]) -> int:
        """Union of what `slots` [n] want, flags of `gpu.sample.params`."""
        return self._params.needs(slots)

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, masks: Masks | None = None) -> Sampled:
        """Choose a token per row: `logits` float32 [n, vocab], changed in place; `slots`,
        `positions` int64 [n], a position being that of the token to choose.

        A row has no token (-1) if a logit is NaN or plus infinity or all are minus infinity, also
        when processor, bias, mask or penalties made it so. Sampled tokens are counted for penalised slots.
        """
        host_slots, host_positions = slots.cpu().numpy(), positions.cpu().numpy()
        needs = self._params.needs(host_slots)
        if not needs and masks is None:
            return Sampled(_greedy(logits).tokens, {}, {})
        rows = self._params.read(host_slots)
        asked = [i for i, row in enumerate(rows) if row.needs & LOGPROBS]
        raw = raw_logprobs(logits[asked]) if asked else None
        processed = host_slots.tolist() if needs & PROCESSED else []
        failed = self._processors.run(logits, processed)
        if masks is not None:
            mask_logits(logits, masks)
        if needs & (BIASED | MIN_TOKENS | COUNTED):
            self._adjust(logits, host_slots.tolist(), host_positions.tolist(), rows, masks)
        tokens, best = _greedy(logits)
        supports: dict[int, Support] = {}
        if needs & DRAWS:
            supports = self._draw(tokens, best, logits, host_positions, rows)
        if needs & COUNTED:
            counted = [i for i, row in enumerate(rows) if row.needs & COUNTED]
            count_rows = torch.tensor([rows[i].count_row for i in counted], device=logits.device)
            self._counts.add(count_rows, tokens[counted])
        self._processors.accept(processed, tokens)
        if raw is None:
            return Sampled(tokens, {}, failed)
        shown = self._shown(raw, logits, {i: rows[i] for i in asked}, masks)
        told = self._tell((raw, shown), tokens, {i: (int(host_slots[i]), rows[i]) for i in asked}, supports)
        return Sampled(tokens, told, failed)

    def _shown(
        self, raw: Tensor, logits: Tensor, asked: Mapping[int, SlotParams], masks: Masks | None
    ) -> Tensor:
        """`raw` [asked, vocab] as each of the rows `asked` wants it told, in the same memory unless an
        entropy is still to come of it. `logits` [n, vocab] are those that tokens were chosen by; what may
        not be chosen is minus infinity there."""
        if not any(row.needs & (AFTER_MASK | AFTER_ALL) for row in asked.values()):
            return raw
        masked = frozenset(masks.rows if masks is not None else ())
        shown = raw.clone() if any(row.needs & ENTROPY for row in asked.values()) else raw
        for place, (i, row) in enumerate(asked.items()):
            if row.needs & AFTER_MASK and i in masked:
                shown[place].masked_fill_(logits[i].isneginf(), -torch.inf)
                shown[place] = raw_logprobs(shown[place])
            elif row.needs & AFTER_ALL:
                shown[place] = self._drawn(logits[i], row)
        return shown

    def _drawn(self, logits: Tensor, row: SlotParams) -> Tensor:
        """Log-probabilities [vocab] of what a row drew from; of a greedy one, of its last logits."""
        best = float(logits.max())
        if not row.needs & DRAWS or not math.isfinite(best):
            return raw_logprobs(logits)
        field = survivors(logits, self._ids, best, row.rule)
        left = torch.full_like(logits, -torch.inf)
        left[field.ids.long()] = (field.weights / field.weights.sum(dtype=torch.float64)).log().float()
        return left

    def _tell(
        self,
        likely: tuple[Tensor, Tensor],
        tokens: Tensor,
        asked: Mapping[int, tuple[int, SlotParams]],
        supports: Mapping[int, Support],
    ) -> dict[int, RowLogprobs]:
        """What the rows `asked` want to know, by slot and parameters, of their `tokens`: log-probabilities,
        and what else. `likely` are the model's own and those to show, [asked, vocab] each, in their order. A
        greedy row had no other choice."""
        raw, shown = likely
        order = list(asked)
        chosen, ks = tokens[order].tolist(), [max(row.logprobs, 0) for _, row in asked.values()]
        answers = row_logprobs(shown, chosen, ks, self._named_by([slot for slot, _ in asked.values()]))
        at = [place for place, (_, row) in enumerate(asked.values()) if row.needs & ENTROPY]
        found = dict(zip(at, entropies(raw[at]), strict=True)) if at else {}
        told: dict[int, RowLogprobs] = {}
        for place, (i, answer) in enumerate(zip(order, answers, strict=True)):
            if answer is None:
                continue
            wants = asked[i][1].needs
            if wants & (ENTROPY | SUPPORT):
                left = supports.get(i, only(chosen[place])) if wants & SUPPORT else None
                answer = msgspec.structs.replace(answer, entropy=found.get(place), support=left)
            told[i] = answer
        return told

    def _named_by(self, slots: list[int]) -> list[tuple[int, ...]]:
        """Tokens that each of `slots` named; nothing where none did, as almost always."""
        return [self._named.get(slot, ()) for slot in slots] if self._named else []

    def _adjust(
        self,
        logits: Tensor,
        slots: list[int],
        positions: list[int],
        rows: list[SlotParams],
        masks: Masks | None,
    ) -> None:
        """Bias, min_tokens and penalties, in place. What the grammar forbade stays forbidden: it is
        minus infinity, whatever is added or multiplied."""
        for i, (slot, position, row) in enumerate(zip(slots, positions, rows, strict=True)):
            if row.needs & BIASED:
                self._bias.add_bias(logits[i], slot)
            early = row.needs & MIN_TOKENS and position - row.prompt_len < row.min_tokens
            if early and (masks is None or allows_besides(masks, i, self._bias.stops(slot))):
                self._bias.mask_stops(logits[i], slot)
            if row.needs & COUNTED:
                self._counts.penalise(logits[i], row.count_row, row.penalty)

    def _draw(
        self,
        tokens: Tensor,
        best: Tensor,
        logits: Tensor,
        positions: NDArray[np.int64],
        rows: list[SlotParams],
    ) -> dict[int, Support]:
        """Overwrite the greedy `tokens` of the rows that draw; what those drew from that want to know."""
        supports: dict[int, Support] = {}
        seeds = np.array([row.seed for row in rows], np.int64)
        keys = row_keys(seeds, positions).to(logits.device)
        finite = (tokens != NAN_TOKEN).tolist()
        for i, (row, top) in enumerate(zip(rows, best.tolist(), strict=True)):
            if row.needs & DRAWS and finite[i]:
                field = survivors(logits[i], self._ids, top, row.rule)
                weights = field.weights.clone() if row.needs & SUPPORT else None
                race = field.weights.div_(exponential(bits(keys[i], field.ids)))
                winner = argmax(race)
                tokens[i] = field.ids[winner]
                if weights is not None:
                    supports[i] = support(field.ids, weights, int(winner))
        return supports


class _Greedy(NamedTuple):
    """Each row's argmax, -1 if its largest logit `best` is not finite."""

    tokens: Tensor
    best: Tensor


def _greedy(logits: Tensor) -> _Greedy:
    ids = argmax(logits)
    best = logits.gather(1, ids.unsqueeze(1)).squeeze(1)  # NaN wins the argmax, so one look is enough
    return _Greedy(torch.where(best.isfinite(), ids, NAN_TOKEN), best)
