"""Architectures without a family, which run through transformers: which are refused, and the rest of what a
server does with one. `test_parity.py` has their logits and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.adapters import AdapterLimits
from core.config import CacheConfig, ModelConfig, ParallelConfig, ScheduleConfig, SpeculativeConfig
from core.errors import ConfigError, LoomError, ModelError
from core.models import read_draft, registry
from core.plan import StepPlan
from core.request import SamplingParams
from core.stats import SchedulerStatistics
from gpu.build import Beside, Drafting, build_executor, check_config, model_spec, spec_of
from gpu.models.transformers_model import TransformersModel
from gpu.weights import load_model
from tests.rigs import tiny_model
from tests.rigs.driver import Driver
from tests.rigs.runner import CPU
from tests.rigs.tiny_model import Tiny

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def config(family: str, architecture: str, **changes: Any) -> dict[str, Any]:
    made = getattr(transformers, f"{family}Config")(**{**SMALL, "pad_token_id": 0, **changes})
    return {**json.loads(made.to_json_string(use_diff=False)), "architectures": [architecture]}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "ALiBi": (lambda: config("Bloom", "BloomForCausalLM"), "0 of its 2 layers attend exactly once"),
    "MLA": (lambda: config("Youtu", "YoutuForCausalLM"), r"keys have 192 .* values 128 \(MLA\)"),
    "recurrent": (lambda: config("Mamba", "MambaForCausalLM"), "state besides keys and values"),
    "hybrid": (lambda: config("Lfm2", "Lfm2ForCausalLM"), "does not run without data"),
    "chunked": (lambda: config("Llama4Text", "Llama4ForCausalLM"), "neither causal nor a sliding window"),
    "both ways": (lambda: config("Bert", "BertLMHeadModel"), "without a mask that is causal alone"),
    "twice a layer": (
        lambda: config("DiffLlama", "DiffLlamaForCausalLM"),
        "0 of its 2 layers attend exactly",
    ),
    "rope of the batch": (
        lambda: config("Arcee", "ArceeForCausalLM", rope_parameters=YARN),
        "rope of type dynamic rotates a token by the longest text",
    ),
    "encoder and decoder": (
        lambda: config("Bart", "BartForCausalLM", is_encoder_decoder=True),
        "is_encoder_decoder must be false",
    ),
    "quantised": (
        lambda: config("Arcee", "ArceeForCausalLM") | {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: ArceeForCausalLM runs through transformers, which needs the unquantised",
    ),
    "code of its own": (
        lambda: (
            config("Llama", "LamaForCausalLM", auto_map={"AutoModelForCausalLM": "x.Y"})
            | {"model_type": "lama"}
        ),
        "LamaForCausalLM is not supported: .* 'lama' none at all; the nearest that is: LlamaForCausalLM",
    ),
    "no text": (
        lambda: config("Bart", "BartForConditionalGeneration"),
        "BartForConditionalGeneration is not supported; the nearest that is: ",
    ),
    "no architecture": (
        lambda: config("Arcee", "ArceeForCausalLM") | {"model_type": ["arcee"]},
        r"for model_type \['arcee'\] none at all",
    ),
    "no positions": (
        lambda: config("Arcee", "ArceeForCausalLM", max_position_embeddings=-1),
        "max_position_embeddings must be a number of tokens, at least 1, not -1",
    ),
    "sizes that do not fit": (
        lambda: config("Arcee", "ArceeForCausalLM") | {"num_attention_heads": "two"},
        "cannot be made of this config.json",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_by_its_config(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason):
        check_config(make(), False)


def test_sinks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.FAMILIES, "GptOssForCausalLM")  # as if it were none of ours
    with pytest.raises(ModelError, match="attention sinks"):
        check_config(config("GptOss", "GptOssForCausalLM", num_local_experts=4), False)


def test_embeddings_are_of_families_alone() -> None:
    with pytest.raises(ModelError, match="ArceeModel is not supported; the nearest that is: "):
        check_config(config("Arcee", "ArceeForCausalLM"), True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny_model.build("cohere2", tmp_path_factory.mktemp("cohere2"))


def test_facts_are_those_of_its_class(tiny: Tiny) -> None:
    spec = spec_of(tiny.path)
    assert (spec.implementation, spec.heads, spec.kv_heads, spec.head_dim) == ("transformers", 4, 2, 16)
    assert [spec.window(layer) for layer in range(spec.layers)] == [20, 0, 20]
    assert spec.num_parameters() == sum(weight.numel() for weight in tiny.reference.parameters())
    granite = model_spec(config("GraniteMoe", "GraniteMoeForCausalLM", attention_multiplier=0.25))
    assert granite.softmax_scale == 0.25


PROMPTS = [[int(i * 37 % 251) + 3 for i in range(n)] for n in (40, 23, 7, 90)]
PROMPTS.append([*PROMPTS[0][:33], 9, 8, 7])


@pytest.fixture(scope="module")
def texts(tiny: Tiny) -> list[list[int]]:
    return [tiny_model.greedy(tiny.reference, prompt, 64) for prompt in PROMPTS]


class Ran(NamedTuple):
    """Greedy texts of a whole engine, and in how many steps drafts were verified."""

    texts: list[list[int]]
    statistics: SchedulerStatistics
    verified: int


def run(tiny: Tiny, kv_tokens: int, beside: Beside) -> Ran:
    """Run in steps of 32 tokens."""
    schedule = ScheduleConfig(step_tokens=32, max_running=8, conservativeness=0.01, prefill_weight=0.0)
    cache = CacheConfig(page_size=16, kv_tokens=kv_tokens)
    model = ModelConfig(model=str(tiny.path), device="cpu")
    made = build_executor(spec_of(tiny.path), tiny.path, model, cache, schedule, lambda *share: None, beside)
    made.prepare(lambda share: None)
    driver, plans = Driver(made, schedule), list[StepPlan]()
    with pytest.MonkeyPatch.context() as patched:
        submit = made.submit
        patched.setattr(made, "submit", lambda plan: (plans.append(plan), submit(plan)))
        try:
            found = driver.run(PROMPTS, [SamplingParams(temperature=0.0, max_tokens=64)] * len(PROMPTS))
        finally:
            driver.close()
    verified = sum(plan.drafts > 0 for plan in plans)
    return Ran([answer.tokens for answer in found], driver.scheduler.statistics(), verified)


def test_text_in_chunks_batches_after_prefixes_and_retraction(tiny: Tiny, texts: list[list[int]]) -> None:
    ran = run(tiny, 208, Beside())
    assert ran.statistics.retractions > 0 and ran.statistics.cache.hit_tokens > 0
    assert ran.texts == texts


@pytest.mark.parametrize("algorithm", ["ngram", "draft-model"])
def test_drafts_are_verified(
    tiny: Tiny, texts: list[list[int]], algorithm: Literal["ngram", "draft-model"], tmp_path: Path
) -> None:
    path = tiny_model.build("llama", tmp_path).path if algorithm == "draft-model" else None
    ran = run(tiny, 1024, Beside(Drafting(SpeculativeConfig(algorithm=algorithm), path)))
    assert ran.verified > 0
    assert ran.texts == texts


@pytest.mark.parametrize(
    ("settings", "beside", "reason"),
    [
        ({}, Beside(parallel=ParallelConfig(tp=2)), "--tp 2: .* runs through transformers: use --tp 1"),
        (
            {},
            Beside(adapters=AdapterLimits(places=1, max_rank=8, host=1)),
            "--enable-lora: .* takes no adapters",
        ),
        ({"quantization": "fp8"}, Beside(), "--quantization fp8 is refused: .* runs through transformers"),
    ],
)
def test_what_only_families_do_is_refused(
    tiny: Tiny, settings: dict[str, Any], beside: Beside, reason: str
) -> None:
    model = ModelConfig(model=str(tiny.path), device="cpu", **settings)
    with pytest.raises(ConfigError, match=reason):
        build_executor(
            spec_of(tiny.path), tiny.path, model, CacheConfig(), ScheduleConfig(), lambda *share: None, beside
        )


def test_it_drafts_for_no_model(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="runs through transformers, which drafts for no model"):
        run(tiny, 1024, Beside(Drafting(SpeculativeConfig(algorithm="draft-model"), tiny.path)))


def test_heads_draft_for_families_alone(tiny: Tiny) -> None:
    head = {**SMALL, "architectures": ["LlamaForCausalLMEagle3"]}
    with pytest.raises(ModelError, match="Cohere2ForCausalLM runs through transformers, which does not keep"):
        read_draft(head, spec_of(tiny.path))


def test_tensors_are_those_of_the_class(tmp_path: Path) -> None:
    path = tiny_model.build("olmoe", tmp_path).path
    tensors = load_file(path / "model.safetensors")
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[gone]
    tensors["model.layers.0.mlp.experts.4.up_proj.weight"] = torch.zeros(2)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"1 tensors missing: {gone}; 1 .* not part .*experts\.4\.up_proj"):
        load_model(spec_of(path), path, torch.float32, CPU)


def test_random_weights(tiny: Tiny) -> None:
    model = load_model(spec_of(tiny.path), None, torch.bfloat16, CPU)
    assert model.logits(torch.randn(3, 64, dtype=torch.bfloat16)).isfinite().all()


def changed(tiny: Tiny, **facts: Any) -> TransformersModel:
    spec = msgspec.structs.replace(spec_of(tiny.path), **facts)
    model = TransformersModel(spec, torch.float32, CPU)
    for name, place in model.places().items():
        place.copy_(tiny.reference.get_parameter(name))
    return model


def test_a_class_is_tried_before_it_serves(tiny: Tiny) -> None:
    """A class passes with the same weights; not where tokens mix, positions are ignored or attention
    differs."""
    with torch.inference_mode():
        changed(tiny).verify()
        mixes = changed(tiny)
        mixes._base.layers[1].mlp.register_forward_hook(lambda module, given, made: made + made.mean(1, True))
        with pytest.raises(LoomError, match="outside of attention"):
            mixes.verify()
        counts = changed(tiny)
        counts._base.rotary_emb.register_forward_pre_hook(
            lambda module, given, named: ((given[0], torch.arange(12)[None]), {}),
            with_kwargs=True,
        )
        with pytest.raises(LoomError, match="outside of attention"):
            counts.verify()
        with pytest.raises(LoomError, match="finds other logits with its own attention"):
            changed(tiny, attention_scale=0.5).verify()
        fails = changed(tiny)
        fails._base.layers[1].self_attn.num_key_value_groups = 3
        with pytest.raises(LoomError, match="does not run with its own attention"):
            fails.verify()
