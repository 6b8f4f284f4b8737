"""GGUF files of tiny models, written as llama.cpp's converter does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
import transformers

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GROUPED = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_HYBRID = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
HYBRIDS = ("qwen35", "qwen35moe", "qwen3next")
FURTHER = ("glm4moe", "qwen35moe")
"""Architectures with a layer for multi-token prediction."""
OWN: dict[str, dict[str, str]] = {
    "deepseek2": {
        **_GROUPED,
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
    },
    "gemma2": _BEHIND,
    "gemma3": _BEHIND,
    "glm4moe": {**_GROUPED, "post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks.weight",
    },
    "olmo2": _BEHIND,
    **dict.fromkeys(HYBRIDS, _HYBRID),
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}
"""Names by architecture that differ from `NAMES`, or come on top."""

PERMUTED = ("granite", "llama", "smollm3")


def gguf_name(name: str, arch: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = name.split(".", 3)
    names = NAMES | OWN.get(arch, {})
    if rest in names:
        return f"blk.{layer}.{names[rest]}"
    return f"blk.{layer}.{names[rest.removesuffix(f'.{suffix}')]}.{suffix}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute q and k as llama.cpp's converter does for the llama architecture."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


Named = Iterator[tuple[str, torch.Tensor]]


def apart(state: Mapping[str, torch.Tensor], fused: bool = False) -> Named:
    """A state with gate and up of the experts apart, their names as those of other matrices."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj") and not fused:
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up", part) + ".weight", half
        else:
            whole = name.endswith(("experts.down_proj", "experts.gate_up_proj"))
            yield name + ".weight" if whole else name, tensor


def alternate(state: Mapping[str, torch.Tensor]) -> Named:
    """`apart` for gpt-oss, whose gates and ups are every other output, and whose outputs come last."""
    for name, tensor in state.items():
        rest = name.replace("_proj_bias", "_proj.bias")
        if name.endswith(("gate_up_proj", "down_proj")):
            rest, tensor = f"{name}.weight", tensor.transpose(1, 2)
        if "gate_up_proj" in rest:
            for first, part in enumerate(("gate", "up")):
                yield rest.replace("gate_up", part), tensor[:, first::2]
        else:
            yield rest, tensor


def absorbed(config: Any, state: Mapping[str, torch.Tensor]) -> Named:
    """Tensors as `apart` has them, with DeepSeek's kv_b_proj split into k_b (transposed) and v_b, as
    llama.cpp has it."""
    for name, tensor in apart(state):
        if "kv_b_proj" in name:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), values
        else:
            yield name, tensor


def hybrid(arch: str, config: Any, state: Mapping[str, torch.Tensor], legacy: bool) -> Named:
    """`apart` for linear attention: decays themselves, kernels without a dimension of 1, Qwen3-Next's
    products no longer mixed, and Qwen3.5's heads of values beside those that have other keys."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim

    def tile(tensor: torch.Tensor) -> torch.Tensor:
        if arch == "qwen3next":
            return tensor
        grouped = tensor.reshape(keys, values // keys, -1, *tensor.shape[1:])
        return grouped.transpose(0, 1).reshape(tensor.shape)

    for name, tensor in apart(state):
        kind = name.rpartition("linear_attn.")[2].removesuffix(".weight")
        match kind:
            case "A_log":
                tensor = -tile(tensor).exp()
            case "in_proj_a" | "in_proj_b" | "in_proj_z" | "dt_bias":
                tensor = tile(tensor)
            case "in_proj_qkv" | "conv1d":
                tensor = torch.cat([tensor[:first], tile(tensor[first:])]).squeeze(1)
            case "out_proj":
                tensor = tile(tensor.T).T
            case "in_proj_qkvz" if not legacy:
                heads = tensor.view(keys, -1, config.hidden_size)
                width = values // keys * config.linear_value_head_dim
                qkvz = heads.split([*[config.linear_key_head_dim] * 2, width, width], 1)
                q, k, v, z = (part.reshape(-1, config.hidden_size) for part in qkvz)
                yield name.replace("qkvz", "z"), z
                name, tensor = name.replace("qkvz", "qkv"), torch.cat([q, k, v])
        plain = name.endswith("linear_attn.norm.weight")
        yield name, tensor + 1.0 if name.endswith("norm.weight") and not plain else tensor


def with_further_layer(config: Any, named: Named) -> Named:
    """Tensors with one more layer like the last that attends, which predicts further tokens: nothing reads
    it."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attends = max(at for at, kind in enumerate(kinds) if kind == "full_attention")
    last, layer = f"blk.{attends}.", f"blk.{config.num_hidden_layers}."
    for name, tensor in named:
        yield name, tensor
        if name.startswith(last):
            yield name.replace(last, layer), tensor
    for norm in ("enorm", "hnorm"):
        yield f"{layer}nextn.{norm}.weight", torch.ones(config.hidden_size)
    yield f"{layer}nextn.eh_proj.weight", torch.zeros(config.hidden_size, 2 * config.hidden_size)


def converted(arch: str, config: Any, state: Mapping[str, torch.Tensor], how: How) -> Named:
    """The tensors of a file, as the converter of `arch` makes them."""
    legacy = how == "legacy"
    parts = apart(state, how == "fused")
    if arch == "deepseek2" and not legacy:
        parts = absorbed(config, state)
    elif arch == "gpt-oss":
        parts = alternate(state)
    elif arch in HYBRIDS:
        parts = hybrid(arch, config, state, legacy)
    for name, tensor in parts:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in PERMUTED and "q_proj" in name:
            tensor = permute(tensor, config.num_attention_heads)
        if arch in PERMUTED and "k_proj" in name:
            tensor = permute(tensor, config.num_key_value_heads)
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        yield gguf_name(name, arch), tensor


def _common(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the fields that the converter writes for every architecture whose config has them."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if width := getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention") or rope
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)


def _olmo(writer: gguf.GGUFWriter, config: Any) -> None:
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _grouped(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if getattr(config, "norm_topk_prob", False):
        writer.add_expert_weights_norm(True)


def _glm(writer: gguf.GGUFWriter, config: Any) -> None:
    _grouped(writer, config)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _latents(writer: gguf.GGUFWriter, config: Any, legacy: bool) -> None:
    keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    if legacy:
        writer.add_key_length(keys)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(config.v_head_dim)
    _grouped(writer, config)
    if not legacy:
        kinds = gguf.ExpertGatingFuncType
        softmax = config.model_type == "deepseek_v2"
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
    writer.add_vocab_size(config.vocab_size)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if scale := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    if hasattr(config, "num_experts"):
        _experts(writer, config)
    heads = config.linear_num_value_heads
    if not config.model_type.startswith("qwen3_next"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config.linear_value_head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _phi(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    positions = config.max_position_embeddings
    original = rope.get("original_max_position_embeddings", positions)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(positions / original) / math.log(original))
        )
        for each in ("long", "short"):
            writer.add_tensor(f"rope_factors_{each}.weight", np.array(rope[f"{each}_factor"], np.float32))


FACTS: Mapping[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "glm4moe": _glm,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "olmo2": _olmo,
    "phi3": _phi,
    **dict.fromkeys(HYBRIDS, _hybrid),
    "qwen2moe": _experts,
    "qwen3moe": _experts,
}
"""Functions that write an architecture's further fields, as its converter does."""

How = Literal["", "legacy", "fused"]
"""The form of the files: as converters write them, wrote them at first, or write them if asked to, with
experts' gates and ups in one."""

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(
    path: Path,
    arch: str,
    reference: transformers.PreTrainedModel,
    quantise: bool = False,
    kind: gguf.GGMLQuantizationType = Q8_0,
    only: str = "",
    how: How = "",
    split: int = 0,
) -> Path:
    """`reference`, a transformers model, as a GGUF file; `quantise`: its matrices as `kind`, those in whose
    names there is the regular expression `only`; `split`: in files of so many tensors, whose first is
    returned."""
    config = reference.config
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    # As llama.cpp counts them, which the library does not say of every kind.
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0 if quantise else gguf.LlamaFileType.ALL_F32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4" if config.model_type == "glm4_moe_lite" else "qwen2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _common(writer, config)
    if arch in FURTHER:
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
    if arch in FACTS:
        FACTS[arch](writer, config)
    if arch == "deepseek2":
        _latents(writer, config, how == "legacy")
    tensors = converted(arch, config, reference.state_dict(), how)
    for name, tensor in with_further_layer(config, tensors) if arch in FURTHER else tensors:
        data = tensor.contiguous().numpy()
        if quantise and tensor.dim() > 1 and re.search(only, name):
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0]


DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
"""Both scales are the same in every released model, and files have one."""

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek2", "deepseek-v2", {}),
    ("deepseek2", "deepseek-v2-groups", {}),
    ("deepseek2", "deepseek-v3", {"rope_parameters": DEEPSEEK_ROPE}),
    ("deepseek2", "glm4-moe-lite", {"mlp_layer_types": None}),
    ("gemma2", "gemma2", {"query_pre_attn_scalar": 16}),
    # Of which layers slide and how wide heads' scores are a file says nothing.
    ("gemma3", "gemma3", {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6}),
    ("glm4moe", "glm4-moe", {}),
    ("glm4moe", "glm4-moe-one-group", {}),
    # What clamps gates is the same in every model.
    ("gpt-oss", "gpt-oss", {"swiglu_limit": 7.0}),
    ("granite", "granite", {}),
    ("llama", "llama", {}),
    ("llama", "mixtral", {}),
    ("olmo2", "olmo2", {}),
    ("olmo2", "olmo2-yarn", {}),
    ("olmo2", "olmo3", {}),
    ("phi3", "phi3", {}),
    ("phi3", "phi3-longrope", {}),
    ("qwen2", "qwen2", {}),
    # What a file cannot say: windows, layers without experts, and whether experts' weights sum to 1.
    (
        "qwen2moe",
        "qwen2-moe",
        {"use_sliding_window": False, "mlp_only_layers": [], "norm_topk_prob": False},
    ),
    ("qwen3", "qwen3", {}),
    ("qwen35", "qwen3.5", {}),
    ("qwen35moe", "qwen3.5-moe", {}),
    ("qwen3moe", "qwen3-moe", {}),
    ("qwen3next", "qwen3-next", {"mlp_only_layers": []}),
    # Every fourth layer does not rotate, which a file does not say either.
    ("smollm3", "smollm3", {"no_rope_layers": None, "num_hidden_layers": 4}),
]
"""Architectures, of `tiny_model.VARIANTS` those that they are of, and changes to what files do not say."""
