"""Metadata of a .gguf file as a Hugging Face config, so that one reader knows every format.

What a field means is as llama.cpp's converter (convert_hf_to_gguf.py, conversion/) writes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from core.errors import ModelError
from core.models.fields import nearest

GGUF_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "deepseek2": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "glm4moe": ("Glm4MoeForCausalLM",),
    "gpt-oss": ("GptOssForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen35": ("Qwen3_5ForCausalLM",),
    "qwen35moe": ("Qwen3_5MoeForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "qwen3next": ("Qwen3NextForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
}
"""Architectures as in config.json, by the `general.architecture` of a file. The first one is taken, unless
the file's metadata show that it is another one."""
READ_FROM_GGUF = frozenset(chain.from_iterable(GGUF_ARCHITECTURES.values()))

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of RoPE scaling factors. They become part of the config, not of the model."""

_PLAIN = (None, 0, 1, 32)
"""Values of `general.file_type` of files in float32, float16 and bfloat16; the others are quantised."""


Q4_FORMATS = ("Q4_0", "Q4_1", "Q4_K")
"""GGUF formats of 4 bits in which 32 weights share a scale and an offset, as in `gpu.quant.q4`."""


class GgufFacts(NamedTuple):
    """Facts of a .gguf file, known before its weights are read.

    fields   metadata; long arrays may be left out
    shapes   of tensors, fastest axis first
    formats  of tensors: F16, Q4_K, MXFP4, ...
    factors  the tensors of `FACTORS`
    """

    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str] = MappingProxyType({})
    factors: Mapping[str, tuple[float, ...]] = MappingProxyType({})


def gguf_facts(fields: Mapping[str, Any], tensors: Iterable[Any]) -> GgufFacts:
    """The facts of metadata and tensors as the package gguf reads them."""
    listed = list(tensors)
    return GgufFacts(
        fields,
        {each.name: tuple(map(int, each.shape)) for each in listed},
        {each.name: each.tensor_type.name for each in listed},
        {each.name: tuple(map(float, each.data.reshape(-1))) for each in listed if each.name in FACTORS},
    )


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_parts(name: str) -> list[str]:
    """The files of a split .gguf whose first has that name; of any other that alone."""
    named = _PART.fullmatch(name)
    if named is None or int(named[2]) != 1 or (count := int(named[3])) == 0:
        return [name]
    return [f"{named[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def gguf_stem(name: str) -> str:
    """The name of a file without its end, and that of a split one without the number of its first part."""
    named = _PART.fullmatch(name)
    return name.removesuffix(".gguf") if named is None else named[1]


def check_parts(parts: list[str], fields: Mapping[str, Any]) -> None:
    """Raise `ModelError` where the first of these, whose metadata are `fields`, is one of more or fewer."""
    if (count := fields.get("split.count") or 1) != len(parts):
        raise ModelError(
            f"{parts[0]} is one of {count} files of a split .gguf: name the first, and let them be called "
            f"NAME-00001-of-{count:05}.gguf and so on, as llama.cpp does."
        )


class _File:
    """The facts of one file, asked for by the names that fields have behind the architecture's."""

    def __init__(self, facts: GgufFacts) -> None:
        self.kind = str(facts.fields.get("general.architecture", ""))
        if self.kind not in GGUF_ARCHITECTURES:
            raise ModelError(
                f"the .gguf architecture {self.kind!r} is not supported; the nearest that is: "
                f"{nearest(self.kind, GGUF_ARCHITECTURES)!r}. Supported are {', '.join(GGUF_ARCHITECTURES)}."
            )
        self.facts = facts

    def get(self, name: str, default: Any = None) -> Any:
        found = self.facts.fields.get(f"{self.kind}.{name}")
        return default if found is None else found

    def want(self, name: str) -> Any:
        """A field that must be there."""
        if (found := self.get(name)) is None:
            raise ModelError(f"the .gguf file lacks the field {self.kind}.{name}.")
        return found

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it must be there."""
        found = self.want(name) if default is None else self.get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found <= 0:
            raise ModelError(
                f"{self.kind}.{name} of the .gguf file must be a positive integer, got {found!r}."
            )
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        found = self.want(name) if default is None else self.get(name, default)
        try:
            return _decimal(float(found))
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self.kind}.{name} of the .gguf file must be a number.") from error

    def has(self, tensor: str) -> bool:
        return tensor in self.facts.shapes

    def named(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The fields that are there, by what a config.json calls them."""
        found = {ours: self.get(theirs) for theirs, ours in names.items() if self.get(theirs) is not None}
        return {name: _decimal(each) if isinstance(each, float) else each for name, each in found.items()}


def _decimal(number: float) -> float:
    """What float32 stands for: 9.999999747e-06 is meant as 1e-05."""
    return float(f"{number:.6g}")


def gguf_config(facts: GgufFacts) -> dict[str, Any]:
    """config.json of a .gguf file. Raises `ModelError`, for an architecture that is not supported with the
    most similar one that is."""
    file = _File(facts)
    heads, hidden = file.size("attention.head_count"), file.size("embedding_length")
    head_dim = file.size("attention.key_length", max(hidden // heads, 1))
    embedding = facts.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError("the .gguf file lacks the matrix token_embd.weight.")
    if (blocks := file.size("block_count")) > len(facts.shapes):
        raise ModelError(
            f"{file.kind}.block_count of the .gguf file is {blocks}, of which each has a tensor or more; the "
            f"file has {len(facts.shapes)} in all."
        )
    config: dict[str, Any] = {
        "architectures": [GGUF_ARCHITECTURES[file.kind][0]],
        "vocab_size": embedding[-1],
        "hidden_size": hidden,
        # Qwen3.5's models with experts have no other MLP.
        "intermediate_size": file.get("feed_forward_length") or file.want("expert_feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.want("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file),
        "partial_rotary_factor": file.size("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": not file.has("output.weight"),
        "attention_bias": file.has("blk.0.attn_q.bias"),
    }
    if facts.fields.get("general.file_type") not in _PLAIN:
        config["quantization_config"] = {"quant_method": "gguf", "q4_share": _q4_share(facts)}
    if file.kind in _OWN:
        config |= _OWN[file.kind](file, config)
    for name in ("bos", "eos"):
        if (token := facts.fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    return config


def _q4_share(facts: GgufFacts) -> float:
    """Return the share of weights, 0 to 1, in formats of `Q4_FORMATS`. An embedding that is not also the head
    is left out."""
    matrices = {name: shape for name, shape in facts.shapes.items() if len(shape) > 1}
    if "output.weight" in matrices:
        del matrices["token_embd.weight"]
    held = (math.prod(shape) for name, shape in matrices.items() if facts.formats.get(name) in Q4_FORMATS)
    return sum(held) / sum(map(math.prod, matrices.values()))


Own = Callable[[_File, Mapping[str, Any]], dict[str, Any]]
"""Config fields that one architecture adds or replaces, by architecture."""

_MULTIPLIERS: Mapping[str, str] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GEMMA: Mapping[str, str] = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}


def _granite(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    return file.named(_MULTIPLIERS)


def _gemma(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    # No file says what scores are divided by. The largest differ, known by their layers as in llama.cpp.
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[file.kind]
    width = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {"query_pre_attn_scalar": width, **file.named(_GEMMA), **_layer_types(file)}


def _layer_types(file: _File) -> dict[str, Any]:
    """Which layers slide, where the file says it: of each, or the period of those that do not."""
    slides = file.get("attention.sliding_window_pattern")
    if isinstance(slides, int):
        slides = [(i + 1) % max(slides, 1) > 0 for i in range(file.size("block_count"))]
    if not isinstance(slides, list):
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _gpt_oss(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that clamp the gates of gpt-oss are in no file: they are the same in every released
    model."""
    found = {
        "num_local_experts": file.want("expert_count"),
        "num_experts_per_tok": file.want("expert_used_count"),
        "intermediate_size": file.want("expert_feed_forward_length"),
        "sliding_window": file.want("attention.sliding_window"),
        **_layer_types(file),
    }
    if config["rope_scaling"]:
        found["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    layers = range(config["num_hidden_layers"])
    plain = [layer for layer in layers if any(each != "MXFP4" for each in _expert_formats(file, layer))]
    if len(plain) < len(layers):
        names = [rf"model\.layers\.{layer}\." for layer in plain]
        found["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": names}
    return found


def _expert_formats(file: _File, layer: int) -> list[str | None]:
    names = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
    return [file.facts.formats.get(name) for name in names]


_SCORES: Mapping[int, str] = {1: "softmax", 2: "sigmoid"}
"""How experts are scored, by the value of `expert_gating_func`; 0 does not say it."""

_GROUPS: Mapping[int, tuple[int, int]] = {160: (8, 3), 256: (8, 4)}
"""Groups of experts and how many of them a token has, by the number of experts: of DeepSeek V2, and of V3 and
R1, whose files did not say it at first."""


def _with_mtp(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers behind the last, for multi-token prediction, are blocks of the file too."""
    blocks = range(config["num_hidden_layers"])
    further = sum(file.has(f"blk.{layer}.nextn.eh_proj.weight") for layer in blocks)
    if file.get("nextn_predict_layers"):
        further = max(further, file.size("nextn_predict_layers"))
    return {"num_hidden_layers": len(blocks) - further, "num_nextn_predict_layers": further}


def _grouped_experts(file: _File) -> dict[str, Any]:
    return {
        "n_routed_experts": file.size("expert_count"),
        "num_experts_per_tok": file.want("expert_used_count"),
        "n_shared_experts": file.get("expert_shared_count", 0),
        "moe_intermediate_size": file.want("expert_feed_forward_length"),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.get("expert_weights_norm")),
        "n_group": file.size("expert_group_count", 1),
        "topk_group": file.size("expert_group_used_count", 1),
    }


def _glm(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    own = {"use_qk_norm": file.has("blk.0.attn_q_norm.weight")}
    return {**_grouped_experts(file), **_with_mtp(file, config), **own}


def _deepseek(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V2, or V3 (R1 and Kimi K2 too) where experts are chosen by sigmoids, or GLM-4.7-Flash, which
    has GLM's vocabulary."""
    if file.get("attention.temperature_scale"):
        raise ModelError("deepseek2.attention.temperature_scale of the .gguf file is not supported.")
    found = {**_grouped_experts(file), **_with_mtp(file, config), **_latents(file)}
    if file.get("expert_group_count") is None:
        found["n_group"], found["topk_group"] = _GROUPS.get(found["n_routed_experts"], (1, 1))
    found["scoring_func"] = scores = _scores(file)
    if scores == "softmax":
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    else:
        glm = file.facts.fields.get("tokenizer.ggml.pre") == "glm4"
        found["architectures"] = ["Glm4MoeLiteForCausalLM" if glm else "DeepseekV3ForCausalLM"]
    if config["rope_scaling"] and file.get("rope.scaling.yarn_log_multiplier"):
        # 0.1 times what configs have, where both are the same in every released model.
        scale = _decimal(10 * file.number("rope.scaling.yarn_log_multiplier"))
        found["rope_scaling"] = config["rope_scaling"] | {"mscale": scale, "mscale_all_dim": scale}
    return found


def _scores(file: _File) -> str:
    """How experts are scored. Files from before DeepSeek V3, and those of GLM-4.7-Flash, do not say it."""
    if not file.get("expert_gating_func"):
        biased = any(name.endswith(".exp_probs_b.bias") for name in file.facts.shapes)
        return "sigmoid" if biased else "softmax"
    if (scores := file.size("expert_gating_func")) not in _SCORES:
        raise ModelError(f"deepseek2.expert_gating_func of the .gguf file must be 1 or 2, got {scores}.")
    return _SCORES[scores]


def _latents(file: _File) -> dict[str, Any]:
    """Sizes of heads, under other names since matrices of keys and values are apart."""
    rope_dim = file.size("rope.dimension_count")
    keys, values = (
        file.size(f"attention.{each}_length_mla", file.size(f"attention.{each}_length"))
        for each in ("key", "value")
    )
    return {
        "head_dim": rope_dim,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": file.want("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_nope_head_dim": keys - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": values,
    }


def _llama(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, or with experts Mixtral."""
    if not file.get("expert_count"):
        return {}
    experts = {
        "num_local_experts": file.want("expert_count"),
        "num_experts_per_tok": file.want("expert_used_count"),
    }
    return {"architectures": ["MixtralForCausalLM"], **experts}


def _olmo(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """With a window it is OLMo 3."""
    if not file.get("attention.sliding_window"):
        return {}
    window = {"sliding_window": file.want("attention.sliding_window"), **_layer_types(file)}
    return {"architectures": ["Olmo3ForCausalLM"], **window}


def _phi(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """A window of 0 is none."""
    window = file.get("attention.sliding_window")
    return {"sliding_window": window} if window else {}


def _qwen_moe(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen2-MoE, the first, leaves experts' weights as they are. Qwen3-MoE has no shared expert."""
    found = {
        "num_experts": file.want("expert_count"),
        "num_experts_per_tok": file.want("expert_used_count"),
        "moe_intermediate_size": file.want("expert_feed_forward_length"),
        "norm_topk_prob": file.kind != "qwen2moe",
    }
    if file.kind != "qwen3moe":
        found["shared_expert_intermediate_size"] = file.want("expert_shared_feed_forward_length")
    if file.kind == "qwen2moe":
        found["qkv_bias"] = config["attention_bias"]
    return found


_LINEAR: Mapping[str, str] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def _hybrid(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: which layers have linear attention is seen from their tensors."""
    found = {ours: file.size(theirs) for theirs, ours in _LINEAR.items()}
    found["linear_value_head_dim"] = file.size("ssm.inner_size") // found["linear_num_value_heads"]
    found |= _with_mtp(file, config)
    linear = [file.has(f"blk.{layer}.ssm_conv1d.weight") for layer in range(found["num_hidden_layers"])]
    kinds = ["linear_attention" if each else "full_attention" for each in linear]
    experts = {} if file.kind == "qwen35" else _qwen_moe(file, config)
    return {**found, **experts, "layer_types": kinds}


_OWN: Mapping[str, Own] = {
    "deepseek2": _deepseek,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "glm4moe": _glm,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo,
    "phi3": _phi,
    "qwen2moe": _qwen_moe,
    "qwen35": _hybrid,
    "qwen35moe": _hybrid,
    "qwen3moe": _qwen_moe,
    "qwen3next": _hybrid,
}


_YARN: Mapping[str, str] = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""The first of two that are one was written before."""


def _rope_scaling(file: _File) -> dict[str, Any] | None:
    name, factor = file.get("rope.scaling.type"), file.get("rope.scaling.factor")
    original = file.get("rope.scaling.original_context_length")
    scaling: dict[str, Any]
    if name in ("linear", "yarn") and factor:
        scaling = {"rope_type": name, "factor": file.number("rope.scaling.factor")}
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling | file.named(_YARN)
    long, short = (file.facts.factors.get(f"rope_factors_{each}.weight") for each in ("long", "short"))
    if long and short:
        # rope.scaling.attn_factor follows from the positions, as it does where it is read.
        scaling = {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short)}
        return scaling | {"original_max_position_embeddings": original}
    largest = max(file.facts.factors.get("rope_freqs.weight", ()), default=1.0)
    if largest > 1.0:
        # Llama 3.1 and later: the file holds the factor per frequency, whose largest is the
        # configured one; the other three values are the same in every released model.
        return {
            "rope_type": "llama3",
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original or 8192,
        }
    return None
