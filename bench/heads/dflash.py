"""DFlash (arXiv 2602.06036): a few layers that draft a whole block in one forward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from bench.heads.data import Batch
from bench.heads.layers import Attention, Head, Mlp, Pair, RmsNorm, Size, attend, soft_loss
from bench.heads.target import Rotation, Seen, Target

ANCHORS = 32
"""Blocks of each sequence of a batch in training."""
FALL = 2.5
"""A draft's weight in the loss falls by e over this many positions: drafts behind a wrong one are lost. The
paper has 4 for blocks of 8, most of which its targets accept; of a target of 135M less than half."""
CHUNK = 64
"""Blocks of each sequence at once in evaluation."""


class Layer(nn.Module):
    """A Qwen3 layer whose keys and values are of the target's context and the block."""

    def __init__(self, target: Target, size: Size) -> None:
        super().__init__()
        hidden, eps = target.spec.hidden, target.spec.norm_eps
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Attention(target, size, hidden, norms=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(hidden, size.intermediate)

    def forward(self, x: Tensor, rotation: Rotation, context: Pair, visible: Tensor) -> Tensor:
        """States [B, G, n, hidden] of as many blocks; `context` and `visible` as in `attend`."""
        normed = self.input_layernorm(x)
        q, own = self.self_attn.queries(normed, rotation), self.self_attn.pair(normed, rotation)
        x = x + self.self_attn.o_proj(attend(q, context, visible, own))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlash(Head):
    """The head. A block is the last known token, the anchor, and masks; a mask's state predicts the token at
    its own position. The context are the positions before the anchor."""

    architecture = "DFlashDraftModel"
    model_type = "qwen3"

    def __init__(self, target: Target, size: Size, mask_token: int) -> None:
        super().__init__(target, size)
        spec = target.spec
        self._mask_token = mask_token
        self.hidden_norm = RmsNorm(spec.hidden, spec.norm_eps)
        self.layers = nn.ModuleList([Layer(target, size) for _ in range(size.layers)])
        self.norm = RmsNorm(spec.hidden, spec.norm_eps)
        self.norm.weight.data.copy_(target.norm)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "block_size": self.size.block,
            "num_target_layers": self.target.spec.layers,
            "dflash_config": {
                "mask_token_id": self._mask_token,
                # Layers whose output is read, which is the input of the next.
                "target_layer_ids": [layer - 1 for layer in self.size.aux],
                "causal": False,
            },
        }

    def context(self, seen: Seen) -> list[Pair]:
        """Keys and values [B, T, kv_heads, d] of each layer, of the target's states."""
        hidden = self.hidden_norm(self.fc(seen.join(self.size.aux)))
        rotation = self.target.rotation(torch.arange(hidden.shape[1], device=hidden.device))
        return [cast(Layer, layer).self_attn.pair(hidden, rotation) for layer in self.layers]

    def block(self, ids: Tensor, anchors: Tensor, context: list[Pair]) -> Tensor:
        """States [B, G, block - 1, hidden] of the masks behind anchors, int64 positions [B, G] in `ids`."""
        places = anchors[..., None] + torch.arange(self.size.block, device=ids.device)
        tokens = torch.full_like(places, self._mask_token)
        tokens[..., 0] = ids.gather(1, anchors)
        visible = torch.arange(ids.shape[1], device=ids.device) < anchors[..., None]
        rotation = self.target.rotation(places)
        x = self.target.embed(tokens)
        for layer, pair in zip(self.layers, context, strict=True):
            x = layer(x, rotation, pair, visible)
        found: Tensor = self.norm(x[:, :, 1:])
        return found

    def logits(self, states: Tensor) -> Tensor:
        """[..., vocab]."""
        return self.target.logits(states.to(self.target.head.dtype))

    def loss(self, batch: Batch, seen: Seen) -> Tensor:
        last = batch.length - 1
        shares = torch.rand(len(last), ANCHORS, device=last.device)
        anchors = (batch.start[:, None] + shares * (last - batch.start)[:, None]).long()
        states = self.block(batch.ids, anchors, self.context(seen))
        steps = torch.arange(self.size.block - 1, device=last.device)
        sources = anchors[..., None] + steps
        row, group, step = (sources < last[:, None, None]).nonzero(as_tuple=True)
        wanted = self.target.logits(seen.final[row, sources[row, group, step]])
        losses = soft_loss(self.logits(states[row, group, step]), wanted)
        weights = (-step / FALL).exp()
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    def drafts(self, batch: Batch, seen: Seen, count: int) -> Tensor:
        """Drafts as `Head.drafts` returns them; a block proposes at most `block - 1` tokens."""
        if count >= self.size.block:
            raise ValueError(f"a block of {self.size.block} has {self.size.block - 1} drafts, not {count}")
        context = self.context(seen)
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        found = [
            self.logits(self.block(batch.ids, anchors, context)[:, :, :count]).argmax(-1)
            for anchors in torch.split(places, CHUNK, 1)
        ]
        return torch.cat(found, 1)
