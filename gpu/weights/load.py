"""From a checkpoint to a model that can run."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

import torch

from core.models import ModelSpec, family_of
from core.models.mtp import further_layers
from core.models.spec import Int4
from gpu.layers.delta import GATED_NORM
from gpu.models.base import CausalModel
from gpu.models.bert import Bert
from gpu.models.decoder import TABLE, Decoder
from gpu.quant import q4
from gpu.quant.rows import FileRows
from gpu.shard import ALONE, Shard
from gpu.thread import device_thread
from gpu.weights.dummy import fill_dummy
from gpu.weights.files import (
    Progress,
    equal_tables,
    fill_from_safetensors,
    find_table,
    names_by_file,
    table_in_files,
)
from gpu.weights.fill import Filler, Names
from gpu.weights.gguf import fill_from_gguf, q4_layers_of_gguf, table_of_gguf
from gpu.weights.stage import copier

log = logging.getLogger(__name__)


def load_model(
    spec: ModelSpec,
    source: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda share: None,
    shard: Shard = ALONE,
) -> CausalModel:
    """Build the model of `spec` and fill it from `source`: a Hugging Face directory, a .gguf file,
    or None for random weights. Raises `ModelError`; nothing is half filled. `spec` is that of one of
    `shard.ranks` ranks, which reads its part alone."""
    if spec.transformers:
        return _through_transformers(spec, source, dtype, device, progress)
    family = family_of(spec.architecture)
    with device_thread(device):
        model: CausalModel
        if spec.encoder:
            model = Bert(spec, dtype, device)
        else:
            model = Decoder(spec, dtype, device, shard, _table(spec, source), _q4_layers(spec, source))
        places = model.places()
        if source is None:
            fill_dummy(places, device, model.slices)
            progress(1.0)
            return model
        stacked = spec.moe is not None and spec.moe.stacked
        renamed = {**family.renamed, **_renamed_head(spec, source, shard)}
        names = Names(renamed=renamed, fused=family.fused, stacked=stacked, by_expert=family.by_expert)
        further = further_layers(spec, source.suffix == ".gguf")
        filler = Filler(places, copier(device), family.base, family.unused + further, names, model.slices)
        if source.suffix == ".gguf":
            fill_from_gguf(filler, source, device, progress)
        else:
            fill_from_safetensors(filler, source, device, progress, spec.stored_int4)
        filler.finish(str(source))
        if spec.norm_offset and source.suffix != ".gguf":  # whose converter has added it
            for name, place in places.items():
                if name.endswith("norm.weight") and not name.endswith(GATED_NORM):
                    place.add_(spec.norm_offset)
        _tell_skipped(filler.skipped, spec.architecture, further)
        _tell_quantised(filler.quantised, spec)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last pieces are still on the bus
            torch.cuda.empty_cache()  # what was quantised in passing
        return model


def _table(spec: ModelSpec, source: Path | None) -> FileRows | None:
    """The embedding where it stays in its file: that of a quantised checkpoint on a CPU."""
    if not spec.int8 or source is None:
        return None
    return table_of_gguf(source) if source.suffix == ".gguf" else table_in_files(source)


def _renamed_head(spec: ModelSpec, source: Path, shard: Shard) -> dict[str, str]:
    """What stands for the name of a tied head in a checkpoint that has the table under that name alone, as
    safetensors' `save_model` writes it. The first rank warns of a head that is another table."""
    if not spec.tied or source.suffix == ".gguf":
        return {}
    files = names_by_file(source)
    table, head = find_table(files, "embed_tokens.weight"), find_table(files, "lm_head.weight")
    if head is None:
        return {}
    if table is None:
        return {"lm_head.": f"{TABLE}."}
    if not shard.rank and not equal_tables(table, head):
        log.warning(
            "%s is not the embedding, and is not used, because of tie_word_embeddings in config.json; "
            "transformers 5 uses it, and so does --hf-overrides '{\"tie_word_embeddings\": false}'",
            head.name,
        )
    return {}


class _Int4Layers(Container[str]):
    """The names of the layers that are quantised in a checkpoint in 4 bits."""

    def __init__(self, int4: Int4) -> None:
        self._int4 = int4

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._int4.has(name)


def _q4_layers(spec: ModelSpec, source: Path | None) -> Container[str]:
    """Return the names of layers that the checkpoint has in 4 bits and a CPU serves in 4 bits."""
    if not spec.int8 or source is None or not q4.runs_here():
        return ()
    if source.suffix != ".gguf":
        return _Int4Layers(spec.stored_int4) if spec.stored_int4 and q4.takes(spec.stored_int4.group) else ()
    layers = q4_layers_of_gguf(source, family_of(spec.architecture).fused)
    return layers | {"lm_head"} if spec.tied and TABLE in layers else layers


def _tell_skipped(skipped: list[str], architecture: str, further: tuple[str, ...]) -> None:
    """Log which tensors of a checkpoint belong to nothing here: those that begin as one of `further` are of
    layers behind the last."""
    if not skipped:
        return
    drafts = sum(name.startswith(further) for name in skipped)
    how = [
        "as a language model alone" * (drafts < len(skipped)),
        "without its layers for multi-token prediction, but for drafts (--speculative-algorithm mtp)"
        * (drafts > 0),
    ]
    log.info(
        "%d tensors are not used (%s, ...): %s is served %s",
        len(skipped), skipped[0], architecture, ", ".join(filter(None, how)),
    )  # fmt: skip


def _tell_quantised(quantised: list[str], spec: ModelSpec) -> None:
    """Warn of matrices that were quantised while loading though nobody asked: the checkpoint has 8 bits,
    but not of these."""
    asked = (spec.fp8, spec.w8a8) != (spec.stored_fp8, spec.stored_w8a8)
    if quantised and spec.eight_bits and not asked:
        log.warning(
            "%d matrices are not in 8 bits as the others of this checkpoint, or not scaled so, and were "
            "quantised while loading (%s, ...); --quantization none runs all of them in 16 bits",
            len(quantised),
            sorted(quantised)[0],
        )


def _through_transformers(
    spec: ModelSpec, source: Path | None, dtype: torch.dtype, device: torch.device, progress: Progress
) -> CausalModel:
    """`load_model` of an architecture without a family. It is verified: what its class does is known by
    running it alone."""
    from gpu.models.transformers_model import TransformersModel  # 2 s, and not for families

    with device_thread(device):
        model = TransformersModel(spec, dtype, device)
        if source is None:
            fill_dummy(model.places(), device)
        else:
            names = (name for each in names_by_file(source).values() for name in each)
            unused = tuple(filter(model.ignored.search, names))
            filler = Filler(model.places(), copier(device), model.prefix, unused)
            fill_from_safetensors(filler, source, device, progress)
            filler.finish(str(source))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last pieces are still on the bus
        model.verify()
        progress(1.0)
        plainly = " and without CUDA graphs" if spec.uncaptured and device.type == "cuda" else ""
        log.info("%s runs through transformers%s: no family here has it", spec.architecture, plainly)
        return model
