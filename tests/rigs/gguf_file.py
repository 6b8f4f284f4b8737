"""GGUF files of tiny models, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
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
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}

GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""What is otherwise there than in `NAMES`."""

PERMUTED = ("granite", "llama", "smollm3")


def gguf_name(name: str, arch: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    names = NAMES | GEMMA if arch.startswith("gemma") else NAMES
    return f"blk.{layer}.{names[rest]}.{suffix}"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def apart(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A state with gate and up of the experts apart, their names as those of other matrices."""
    for name, tensor in state.items():
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up", part) + ".weight", half
        else:
            yield name + ".weight" if name.endswith("experts.down_proj") else name, tensor


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(
    path: Path,
    arch: str,
    reference: transformers.PreTrainedModel,
    quantise: bool = False,
    kind: gguf.GGMLQuantizationType = Q8_0,
) -> Path:
    """`reference`, a transformers model, as a GGUF file; `quantise`: its matrices as `kind`."""
    config = reference.config
    writer = gguf.GGUFWriter(str(path), arch)
    # As llama.cpp counts them, which the library does not say of every kind.
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0 if quantise else gguf.LlamaFileType.ALL_F32))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_token_scores([0.5] * 300)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if arch.startswith("gemma"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    for name, tensor in apart(reference.state_dict()):
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
        data = tensor.contiguous().numpy()
        if quantise and tensor.dim() > 1:
            writer.add_tensor(gguf_name(name, arch), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, arch), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
