"""GGUF files written here and read back: the same model as the checkpoint they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from core.errors import ModelError
from gpu.build import spec_of
from gpu.weights import load_model
from gpu.weights.gguf import config_from_gguf, hf_name, unpermute
from tests.rigs import tiny_model
from tests.rigs.runner import Rig

CPU = torch.device("cpu")

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
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


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


def write(path: Path, arch: str, reference: PreTrainedModel, quantise: bool = False) -> Path:
    """`reference`, a transformers model, as a GGUF file."""
    config = reference.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_token_scores([0.5] * 300)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, tensor in apart(reference.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and "q_proj" in name:
            tensor = permute(tensor, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            tensor = permute(tensor, config.num_key_value_heads)
        data = tensor.contiguous().numpy()
        if quantise and tensor.dim() > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "variant"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("qwen3moe", "qwen3-moe")],
)
def test_a_gguf_is_the_model_it_was_made_from(arch: str, variant: str, tmp_path: Path) -> None:
    tiny = tiny_model.build(variant, tmp_path / "hf")
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference)
    spec = spec_of(file)
    places = load_model(spec, file, torch.float32, CPU).places()
    want = load_model(spec_of(tiny.path), tiny.path, torch.float32, CPU).places()
    assert places.keys() == want.keys()
    assert all(torch.equal(places[name], want[name]) for name in want)
    prompt = list(range(3, 20))
    assert Rig(file).generate(1, prompt, 8) == tiny_model.greedy(tiny.reference, prompt, 8)


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    tiny = tiny_model.build("llama", tmp_path / "hf")
    file = write(tmp_path / "tiny.gguf", "llama", tiny.reference, quantise=True)
    places = load_model(spec_of(file), file, torch.float32, CPU).places()
    for name, tensor in tiny.reference.state_dict().items():
        torch.testing.assert_close(places[name], tensor, atol=tensor.abs().max().item() / 127, rtol=0)


def test_config_from_gguf_reads_like_config_json(tmp_path: Path) -> None:
    tiny = tiny_model.build("qwen3", tmp_path / "hf")
    config = config_from_gguf(write(tmp_path / "tiny.gguf", "qwen3", tiny.reference))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rms_norm_eps"] == 1e-6
    spec, want = spec_of(tmp_path / "tiny.gguf"), spec_of(tiny.path)
    assert spec == want


def test_unpermute_undoes_permute() -> None:
    weight = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(unpermute(permute(weight, 3), 3), weight)


def test_names() -> None:
    assert hf_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ssm_a") == "blk.0.ssm_a"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mamba' is not supported; supported are llama, qwen2, qwen3"):
        spec_of(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 3000, -200])
def test_a_truncated_file_is_one_error(keep: int, tmp_path: Path) -> None:
    tiny = tiny_model.build("llama", tmp_path / "hf")
    file = write(tmp_path / "tiny.gguf", "llama", tiny.reference)
    spec = spec_of(file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf is truncated or not a GGUF file"):
        load_model(spec, file, torch.float32, CPU)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        spec_of(tmp_path / "none.gguf")
