"""Tiny checkpoints with a layer for multi-token prediction, and its arithmetic over a whole text at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.rigs import tiny_model

LAYERS = 2
"""Of the model; the layer behind them is the one of multi-token prediction."""
PREFIX = f"model.layers.{LAYERS}."


class TinyMtp(NamedTuple):
    """A saved checkpoint, the transformers model whose last layer is its layer for multi-token prediction,
    and the tensors that this one has beside a decoder layer's."""

    path: Path
    reference: transformers.PreTrainedModel
    own: dict[str, torch.Tensor]

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, hidden] behind the last norm of the model, of tokens `ids` [n]."""
        model = self.reference.model
        x, rotation = self._embedded(ids)
        for layer in model.layers[:LAYERS]:
            x = layer(x, attention_mask=_causal(len(ids)), position_embeddings=rotation)
        return model.norm(x)[0]

    def predict(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab] and states [n, hidden] of `ids` [n], the tokens behind those whose `states`
        [n, hidden] are given."""
        x, rotation = self._embedded(ids)
        pair = [self._norm("enorm", x), self._norm("hnorm", states[None])]
        x = torch.cat(pair, -1) @ self.own["eh_proj.weight"].T
        layer = self.reference.model.layers[LAYERS]
        x = layer(x, attention_mask=_causal(len(ids)), position_embeddings=rotation)
        out = self._norm("shared_head.norm", x)[0]
        return self.reference.lm_head(out), out

    def _embedded(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = self.reference.model.embed_tokens(ids[None])
        return x, self.reference.model.rotary_emb(x, torch.arange(len(ids))[None])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.reference.config.rms_norm_eps
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * self.own[f"{name}.weight"]


def _causal(n: int) -> torch.Tensor:
    return torch.full((1, 1, n, n), float("-inf")).triu(1)


def build(variant: str, directory: Path, right: bool = False, **more: Any) -> TinyMtp:
    """`variant` of `tiny_model` with a layer more, under the names that public checkpoints have. With `right`
    each token follows from the one before it alone, and the layer knows how."""
    made = tiny_model.build(variant, directory, **{"num_hidden_layers": LAYERS + 1, **more})
    file, hidden = directory / "model.safetensors", made.reference.config.hidden_size
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(3)
    own = {
        f"{name}.weight": 0.5 + torch.rand(hidden, generator=draw)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    own["eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=draw)
    if right:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        own["enorm.weight"] = torch.ones(hidden)
        own["eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
        own["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    own_names = {PREFIX + name: tensor for name, tensor in own.items()}
    own_names |= {PREFIX + name: tensors[theirs].clone() for name, theirs in copies.items()}
    save_file(tensors | own_names, file, metadata={"format": "pt"})
    told = json.loads((directory / "config.json").read_text())
    told |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in told:
        told["mlp_layer_types"] = told["mlp_layer_types"][:LAYERS]
    (directory / "config.json").write_text(json.dumps(told))
    return TinyMtp(directory, made.reference, own)
