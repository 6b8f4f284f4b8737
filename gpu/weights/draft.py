"""From a checkpoint to a draft model that can run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from core.errors import ModelError
from core.models import DraftSpec, family_of
from core.models.mtp import FIRST
from gpu.models.base import CausalModel
from gpu.models.dflash import DFlash
from gpu.models.draft import DraftModel
from gpu.models.eagle import Eagle, Eagle3
from gpu.models.mtp import Mtp
from gpu.thread import device_thread
from gpu.weights.dummy import fill_dummy
from gpu.weights.files import fill_from_safetensors, names_by_file
from gpu.weights.fill import Filler, Names
from gpu.weights.stage import copier

_MODELS: Mapping[str, type[DraftModel]] = {"eagle": Eagle, "eagle3": Eagle3, "dflash": DFlash, "mtp": Mtp}

_BASE = "model."
"""What a checkpoint may leave out."""

_ALIASES = {
    "midlayer.": f"{_BASE}layers.0.",
    f"{_BASE}midlayer.": f"{_BASE}layers.0.",
    "transformer.": f"{_BASE}layers.0.",  # EAGLE in the Speculators wrapper
    "fusion_fc.": f"{_BASE}fc.",
}

_UNUSED = ("t2d", f"{_BASE}t2d")
"""Which of the target's tokens the draft has: what d2t says, turned around."""

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""An MTP layer's copies of the target's tables."""

_NORMS = ("norm.weight", "norm_hidden.weight", "norm_embedding.weight")

_OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "fc.bias")


def load_draft(
    spec: DraftSpec, source: Path | None, target: CausalModel, dtype: torch.dtype, device: torch.device
) -> DraftModel:
    """The draft model of `spec` for `target`, filled from the directory `source` and sealed; of an MTP layer
    it is the target's checkpoint; None: random weights. Raises `ModelError`; nothing is half filled."""
    with device_thread(device):
        if source is not None and not spec.prefix:
            spec = msgspec.structs.replace(spec, own=_found(spec, source))
        model = _MODELS[spec.algorithm](spec, target, dtype, device)
        places = model.places()
        if source is None:
            fill_dummy({name: place for name, place in places.items() if place.is_floating_point()}, device)
        else:
            names, unused, int4 = Names(_ALIASES), list(_UNUSED), None
            if spec.prefix:
                names = Names(by_expert=family_of(spec.decoder.architecture).by_expert)
                unused, int4 = [spec.names[FIRST] + name for name in _COPIES], spec.decoder.stored_int4
            filler = Filler(places, copier(device), _BASE, tuple(unused), names)
            fill_from_safetensors(filler, source, device, lambda share: None, int4, spec.prefix)
            filler.finish(str(source))
            if spec.decoder.norm_offset:
                for name, place in places.items():
                    if name.endswith(_NORMS):
                        place.add_(spec.decoder.norm_offset)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last pieces are still on the bus
        model.seal()
        return model


def check_layer(source: Path, prefix: str) -> None:
    """Raises `ModelError` where the checkpoint at `source` has no tensor whose name begins as `prefix`: many
    leave the layers for multi-token prediction out that their config.json names."""
    if source.suffix == ".gguf":
        raise ModelError(
            f"{source}: layers for multi-token prediction come from safetensors, not from .gguf: serve it "
            "without --speculative-algorithm mtp, or name a directory with safetensors."
        )
    if not any(name.startswith(prefix) for names in names_by_file(source).values() for name in names):
        raise ModelError(
            f"{source} has no tensors {prefix}*, the layer for multi-token prediction: serve it without "
            "--speculative-algorithm mtp, or fetch a checkpoint that has them."
        )


def _found(spec: DraftSpec, source: Path) -> frozenset[str]:
    """The optional tensors that the checkpoint has. Raises `ModelError` where it lacks one that the target
    cannot lend."""
    if source.suffix == ".gguf":
        raise ModelError(f"{source}: draft models are read from safetensors, not from .gguf.")
    names = {name.removeprefix(_BASE) for names in names_by_file(source).values() for name in names}
    names |= {name.replace("fusion_fc.", "fc.") for name in names}
    if missing := sorted(spec.own - names):
        decoder = spec.decoder
        raise ModelError(
            f"{source} lacks {', '.join(missing)}, which the target cannot lend: the draft model has "
            f"{spec.draft_vocab} tokens and a hidden size of {decoder.hidden}, the target "
            f"{decoder.vocab_size} and {spec.target_hidden}."
        )
    return frozenset(names.intersection(_OPTIONAL))
