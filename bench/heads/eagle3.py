"""EAGLE-3 (arXiv 2503.01840): one layer that drafts token by token, fed with its own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.heads.data import Batch
from bench.heads.layers import Attention, Head, Mlp, Pair, RmsNorm, Size, attend, soft_loss
from bench.heads.target import Rotation, Seen, Target

UNROLL = 5
"""Drafts of a chain in training: training-time test."""
DECAY = 0.8
"""Weight of a draft's loss, relative to the draft before it."""


class MidLayer(nn.Module):
    """A Llama layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, target: Target, size: Size) -> None:
        super().__init__()
        hidden, eps = target.spec.hidden, target.spec.norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.self_attn = Attention(target, size, 2 * hidden, norms=False)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(hidden, size.intermediate)

    def queries(self, embedded: Tensor, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Pair]:
        """Queries, and keys and values, of embeddings and hidden states [..., hidden]."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        return self.self_attn.queries(x, rotation), self.self_attn.pair(x, rotation)

    def finish(self, hidden: Tensor, found: Tensor) -> Tensor:
        """The layer's output, of its input `hidden` and what the heads found [..., heads * d]."""
        hidden = hidden + self.self_attn.o_proj(found)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3(Head):
    """The head. Its entry at position p is of the hidden state of p and the token of p + 1."""

    architecture = "LlamaForCausalLMEagle3"
    model_type = "llama"

    def __init__(self, target: Target, size: Size, vocabulary: Tensor) -> None:
        """`vocabulary` holds the target's ids by falling frequency; the head takes the first of them."""
        super().__init__(target, size)
        spec = target.spec
        self.midlayer = MidLayer(target, size)
        self.norm = RmsNorm(spec.hidden, spec.norm_eps)
        self.norm.weight.data.copy_(target.norm)
        if size.draft_vocab:
            ids = vocabulary[: size.draft_vocab].sort().values.cpu()
            self.lm_head = nn.Linear(spec.hidden, size.draft_vocab, bias=False)
            self.lm_head.weight.data.copy_(target.head[ids.to(target.head.device)])
            self.register_buffer("d2t", ids - torch.arange(size.draft_vocab))

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "draft_vocab_size": self.size.draft_vocab or self.target.spec.vocab_size,
            "target_hidden_size": self.target.spec.hidden,
            "eagle_aux_hidden_state_layer_ids": list(self.size.aux),
            "norm_before_residual": False,
            "norm_before_fc": False,
        }

    def token_ids(self) -> Tensor:
        """The target's ids, int64 [draft_vocab], of a head with a vocabulary of its own."""
        d2t = self.get_buffer("d2t")
        return d2t + torch.arange(len(d2t), device=d2t.device)

    def unroll(self, ids: Tensor, seen: Seen, count: int) -> Iterator[Tensor]:
        """States for `logits`, [B, T, hidden], of drafts 0 to count - 1: draft i of row t is that of position
        t + 2 + i, where the target has seen positions to t and the tokens to t + 1 + i are those of `ids`.

        The chain of row t sees the entries of positions to t, which are of the target's states, and its own
        entries behind them, which are of its own.
        """
        width = ids.shape[1]
        places = torch.arange(width, device=ids.device)
        visible = (places[:, None] >= places)[None]
        hidden = self.fc(seen.join(self.size.aux))
        entries: list[Pair] = []
        for step in range(count):
            tokens = F.pad(ids[:, step + 1 :], (0, min(step + 1, width)))
            q, pair = self.midlayer.queries(
                self.target.embed(tokens), hidden, self.target.rotation(places + step)
            )
            entries.append(pair)
            own = Pair(*(_stacked([each[i] for each in entries[1:]], entries[0][i]) for i in (0, 1)))
            found = attend(q[:, :, None], entries[0], visible, own).squeeze(2)
            hidden = self.midlayer.finish(hidden, found)
            yield self.norm(hidden)

    def logits(self, states: Tensor) -> Tensor:
        """[..., draft vocabulary]."""
        if self.size.draft_vocab:
            found: Tensor = self.lm_head(states)
            return found
        return self.target.logits(states.to(self.target.head.dtype))

    def loss(self, batch: Batch, seen: Seen) -> Tensor:
        rows = self.target.head[self.token_ids()] if self.size.draft_vocab else self.target.head
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        total = torch.zeros((), device=batch.ids.device)
        for step, states in enumerate(self.unroll(batch.ids, seen, UNROLL)):
            drafted = places + 2 + step
            known = (places >= batch.start[:, None] - 1) & (drafted < batch.length[:, None])
            row, place = known.nonzero(as_tuple=True)
            if len(row):
                wanted = F.linear(seen.final[row, place + 1 + step], rows)
                total = total + DECAY**step * soft_loss(self.logits(states[row, place]), wanted).mean()
        return total

    def drafts(self, batch: Batch, seen: Seen, count: int) -> Tensor:
        best = [self.logits(states).argmax(-1) for states in self.unroll(batch.ids, seen, count)]
        found = torch.stack(best, -1)
        if self.size.draft_vocab:
            found = self.token_ids()[found]
        # Row t of `unroll` is where position t + 1 holds the last known token.
        return F.pad(found[:, :-1], (0, 0, 1, 0))


def _stacked(entries: list[Tensor], like: Tensor) -> Tensor:
    """[B, T, m, kv_heads, d] of m tensors as `like` [B, T, kv_heads, d]."""
    return torch.stack(entries, 2) if entries else like[:, :, None][:, :, :0]
