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
"""Layers of the model; the layer behind them is the one of multi-token prediction."""
PREFIX = f"model.layers.{LAYERS}."
HYBRIDS = {
    "num_hidden_layers": LAYERS + 1,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "mlp_only_layers": [],
}
"""Changes to variants with linear attention."""
HYBRID_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.", "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.", "": "mtp.layers.0.",
}  # fmt: skip


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
            mask = None if hasattr(layer, "linear_attn") else _causal(len(ids))
            x = layer(x, attention_mask=mask, position_embeddings=rotation)
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
        weight = self.own[f"{name}.weight"] + _is_hybrid(self.reference)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _is_hybrid(model: transformers.PreTrainedModel) -> bool:
    """Whether the model is one whose norms have weights less 1."""
    return hasattr(model.config, "linear_num_key_heads")


def _causal(n: int) -> torch.Tensor:
    return torch.full((1, 1, n, n), float("-inf")).triu(1)


def build(variant: str, directory: Path, right: bool = False, **more: Any) -> TinyMtp:
    """`variant` of `tiny_model` with a layer more, under the names that public checkpoints have. With `right`
    each token follows from the one before it alone, and the layer knows how."""
    hybrid = variant.startswith(("qwen3-next", "qwen3.5"))
    given = HYBRIDS if hybrid else {"num_hidden_layers": LAYERS + 1}
    made = tiny_model.build(variant, directory, **{**given, **more})
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
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor.zero_()
        own["enorm.weight"] = torch.full((hidden,), 1.0 - hybrid)
        own["eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
        own["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    stored = tensors | {PREFIX + name: tensor for name, tensor in own.items()}
    if hybrid:
        stored = {_hybrids(name): tensor for name, tensor in stored.items()}
    else:
        stored |= {PREFIX + name: tensors[theirs].clone() for name, theirs in copies.items()}
    save_file(stored, file, metadata={"format": "pt"})
    told = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    if not hybrid:
        told["num_nextn_predict_layers"] = 1
    for name in ("mlp_layer_types", "layer_types"):
        if name in told:
            told[name] = told[name][:LAYERS]
    (directory / "config.json").write_text(json.dumps(told))
    return TinyMtp(directory, made.reference, own)


def _hybrids(name: str) -> str:
    """A tensor's name in the checkpoint of a hybrid."""
    own = name.removeprefix(PREFIX)
    if own == name:
        return name
    begin = next(begin for begin in HYBRID_NAMES if own.startswith(begin))
    return HYBRID_NAMES[begin] + own.removeprefix(begin)
