"""Whether a model's matrices run in FP8, in int8 or in 4 bits, or its experts in MXFP4, and whether ranks can
divide them so."""

from __future__ import annotations

import torch

from core.config import ModelConfig
from core.errors import ConfigError
from core.models import ModelSpec
from core.models.quant import BLOCK, MXFP4_GROUP
from core.models.spec import W8A8, Fp8, Int4, Mxfp4
from gpu.device import HOPPER
from gpu.parts import Target
from gpu.quant import int8, q4
from gpu.quant.int4 import SPANS, WORD, span
from gpu.weights.int4 import EIGHT


def choose_fp8(spec: ModelSpec, model: ModelConfig, target: Target) -> Fp8:
    """How the layers' matrices run in FP8. Raises `ConfigError` where FP8 was asked for and they cannot."""
    reason = ""
    if spec.transformers:
        reason = _through_transformers(spec, target)
    elif not target.captures(spec):
        reason = "it is there on a GPU (--device cuda), for models that generate or embed causally"
    elif target.facts.capability < HOPPER:
        reason = "products of scaled rows need compute capability 9.0, {} has {}.{}".format(
            target.facts.name, *target.facts.capability
        )
    elif target.dtype != torch.bfloat16:
        reason = "it computes in --dtype bfloat16 alone"
    match model.quantization:
        case "auto" if not reason:
            return spec.stored_fp8
        case "none" | "auto" | "int8":
            return ""
        case asked if reason:
            raise ConfigError(f"--quantization {asked} is refused: {reason}.")
        case "fp8":
            return spec.stored_fp8 or "rows"
        case "fp8-blocks":
            _check_blocks(spec, "--quantization fp8-blocks", "--quantization fp8, scaled by channel")
            return "blocks"


def choose_w8a8(spec: ModelSpec, model: ModelConfig, target: Target) -> W8A8 | None:
    """Which of the layers' matrices run in int8; elsewhere those of a checkpoint are dequantised while they
    are read. Raises `ConfigError` where they were asked to and cannot."""
    reason = ""
    if spec.transformers:
        reason = _through_transformers(spec, target)
    elif not spec.causal:
        reason = f"{spec.architecture} is an encoder, and runs in 16 or 32 bits"
    if model.quantization == "int8" and reason:
        raise ConfigError(f"--quantization int8 is refused: {reason}.")
    if model.quantization == "int8":
        return spec.stored_w8a8 or W8A8()
    return spec.stored_w8a8 if model.quantization == "auto" and not reason else None


def _through_transformers(spec: ModelSpec, target: Target) -> str:
    """Why a model that transformers runs is not quantised."""
    return f"{spec.architecture} runs through transformers, in {str(target.dtype).removeprefix('torch.')}"


def choose_int4(spec: ModelSpec, model: ModelConfig, target: Target) -> Int4 | None:
    """How the layers' matrices run in 4 bits: as the checkpoint has them, where there are kernels for it.
    Elsewhere they are dequantised while loading."""
    runs = target.captures(spec) and target.dtype.itemsize == 2
    return spec.stored_int4 if runs and model.quantization == "auto" else None


def choose_mxfp4(spec: ModelSpec, model: ModelConfig, target: Target) -> Mxfp4 | None:
    """How experts run in MXFP4; see `choose_int4`."""
    runs = target.captures(spec) and target.dtype == torch.bfloat16
    return spec.stored_mxfp4 if runs and model.quantization == "auto" else None


def is_quantised(spec: ModelSpec) -> bool:
    """Whether the checkpoint is quantised."""
    stored = spec.stored_fp8, spec.stored_int4, spec.stored_w8a8, spec.stored_mxfp4, spec.stored_gguf
    return any(each not in ("", None, False) for each in stored)


def choose_int8(spec: ModelSpec, model: ModelConfig, target: Target) -> bool:
    """Whether matrices that the checkpoint has quantised, in whatever format, have 8 or 4 bits on a CPU.
    Elsewhere they are dequantised while loading, as models over latents are."""
    stored = is_quantised(spec) and spec.stored_w8a8 is None
    ours = spec.causal and not spec.transformers and spec.latent is None
    ours = ours and model.quantization == "auto" and target.dtype == torch.float32
    return stored and ours and target.device.type == "cpu" and int8.runs_here()


def choose_q4(spec: ModelSpec, model: ModelConfig, target: Target) -> float:
    """Return the share of weights, 0 to 1, that a CPU serves in 4 bits; the others have 8."""
    if not choose_int8(spec, model, target) or not q4.runs_here():
        return 0.0
    return float(q4.takes(spec.stored_int4.group)) if spec.stored_int4 is not None else spec.q4_share


def shard_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The spec of one of so many ranks. Raises `ConfigError` where these do not divide the model."""
    own = spec.shard(ranks)
    if own.int4 is not None:
        _check_groups(own, own.int4)
    if own.mxfp4 is not None and own.moe is not None and own.moe.intermediate % MXFP4_GROUP:
        raise ConfigError(
            f"--tp {ranks} of experts in MXFP4 is refused: {MXFP4_GROUP} does not divide intermediate_size "
            f"({own.moe.intermediate}) of each of {ranks} ranks. Use --quantization none, which dequantises "
            "them, or fewer ranks."
        )
    if ranks > 1 and own.fp8 == "blocks":
        _check_blocks(own, f"--tp {ranks} of FP8 in blocks", "--quantization none, or fewer ranks")
    return own


def _check_groups(spec: ModelSpec, int4: Int4) -> None:
    """Raises `ConfigError` for a rank's model some of whose matrices have a part of a group or of a word. The
    few dense layers of a model with experts may: `Linear` holds them in 16 bits."""
    inputs = {"hidden_size": spec.hidden, "queries": spec.q_size}
    outputs = {"keys": spec.kv_size, "queries": spec.q_size}
    if (latent := spec.latent) is not None:
        inputs = {"hidden_size": spec.hidden, "values": spec.heads * latent.value_dim}
        outputs = {"queries": spec.heads * latent.query_dim, "latents": spec.head_dim}
        if latent.q_rank:
            inputs["q_lora_rank"] = latent.q_rank
    if (moe := spec.moe) is None:
        inputs["intermediate_size"] = outputs["intermediate_size"] = spec.intermediate
    else:
        inputs["moe_intermediate_size"] = moe.intermediate
        inputs["shared_expert_intermediate_size"] = moe.shared
        outputs["intermediate_size"] = spec.intermediate
    odd = [
        f"{name} ({n})"
        for name, n in inputs.items()
        if n and (n % (int4.group or 1) or not span(n, int4.group or n))
    ]
    odd += [f"{name} ({n})" for name, n in outputs.items() if n % EIGHT and f"{name} ({n})" not in odd]
    if odd:
        of = f" of each of {spec.ranks} ranks" if spec.ranks > 1 else ""
        size = max(int4.group, WORD * SPANS[-1])
        raise ConfigError(
            f"Weights of 4 bits are refused: {size} does not divide {', '.join(odd)}{of}. Use --quantization "
            "none, which dequantises them" + (", or fewer ranks." if of else ".")
        )


def _check_blocks(spec: ModelSpec, asked: str, instead: str) -> None:
    """Raises `ConfigError` for a model some of whose matrices would stay as they are, however large."""
    sizes = {"hidden_size": spec.hidden, "queries": spec.q_size, "keys": spec.kv_size}
    if (latent := spec.latent) is not None:  # what makes latents is no multiple, and small
        sizes = {
            "hidden_size": spec.hidden,
            "q_lora_rank": latent.q_rank,
            "queries": spec.heads * latent.query_dim,
            "values": spec.heads * latent.value_dim,
        }
    moe = spec.moe
    if moe is not None:
        sizes["moe_intermediate_size"] = moe.intermediate
        sizes["shared_expert_intermediate_size"] = moe.shared
    if moe is None or len(moe.layers) < spec.layers:
        sizes["intermediate_size"] = spec.intermediate
    if odd := [f"{name} ({size})" for name, size in sizes.items() if size % BLOCK]:
        raise ConfigError(f"{asked} is refused: {BLOCK} does not divide {', '.join(odd)}. Use {instead}.")
