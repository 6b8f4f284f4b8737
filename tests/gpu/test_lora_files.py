"""Files of adapters: what is read of them, and why others are refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.adapters import FUSED, LINEAR, TARGETS, AdapterLimits
from gpu.weights.peft import _match
from tests.rigs import lora, tiny_model
from tests.rigs.lora import LIMITS, Adapter, Factors, delta, read
from tests.rigs.runner import Rig
from tests.rigs.tiny_model import VOCAB

PROMPT = [int(i * 37 % 251) + 3 for i in range(40)]
EXPERTS = "model.layers.1.mlp.experts"
COUNT = 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3-moe-mixed", tmp_path_factory.mktemp("moe"), moe_intermediate_size=48).path


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("phi3", tmp_path_factory.mktemp("phi3")).path


def test_what_an_adapter_leaves_is_zero(llama: Path, tmp_path: Path) -> None:
    adapter = lora.adapter_for(llama, ["q_proj", "v_proj"], rank=3)
    found = read(llama, lora.save(adapter, tmp_path / "a", alpha=6, rank=3))
    qkv = found["model.layers.1.self_attn.q_proj"]
    q, v = (adapter[f"model.layers.1.self_attn.{part}_proj"] for part in "qv")
    torch.testing.assert_close(delta(qkv, 0), 2.0 * q.b @ q.a)
    torch.testing.assert_close(delta(qkv, 2), 2.0 * v.b @ v.a)
    assert not delta(qkv, 1).any() and qkv.ranks.tolist() == [3]
    assert not any(tensor.any() for tensor in found["model.layers.1.self_attn.o_proj"][:3])


@pytest.mark.parametrize("base", ["layers.", "model.language_model.layers.", "language_model.model.layers."])
def test_modules_may_be_named_within_another_model(base: str, llama: Path, tmp_path: Path) -> None:
    adapter = lora.adapter_for(llama, ["q_proj"])
    named = {name.replace("model.layers.", base): factors for name, factors in adapter.items()}
    found = read(llama, lora.save(named, tmp_path / "a", alpha=4))
    name = "model.layers.1.self_attn.q_proj"
    torch.testing.assert_close(delta(found[name], 0), adapter[name].b @ adapter[name].a)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_alphas_by_pattern(llama: Path, tmp_path: Path, rslora: bool) -> None:
    """In fp32 the text of merged weights, each module by its own scale."""

    def rank(module: str) -> int:
        return 2 if module.endswith("layers.0.mlp.down_proj") else 6 if ".self_attn." in module else 4

    def alpha(module: str) -> float:
        return 1.0 if "gate_proj" in module else 3.0 if module.endswith("2.self_attn.k_proj") else 8.0

    def scale(module: str) -> float:
        return alpha(module) / (math.sqrt(rank(module)) if rslora else rank(module))

    adapter = lora.adapter_for(llama, LINEAR, ranks=rank)
    config: dict[str, Any] = {
        "use_rslora": rslora,
        "rank_pattern": {"layers.0.mlp.down_proj": 2, r".*\.self_attn\.[qkvo]_proj": 6},
        "alpha_pattern": {"gate_proj": 1, r"^model\.layers\.2\.self_attn\.k_proj": 3},
    }
    own = Rig(llama, adapters=LIMITS)
    own.place("a", lora.save(adapter, tmp_path / "a", **config), 0)
    other = Rig(lora.merged(llama, adapter, tmp_path / "merged", scale))
    assert own.generate(1, PROMPT, 8, place=0) == other.generate(1, PROMPT, 8)
    torch.testing.assert_close(own.watched.seen, other.watched.seen, rtol=1e-3, atol=1e-3)


def stacked(adapter: Adapter, part: str, factor: str) -> Tensor:
    """A factor of all experts of one layer, stacked."""
    return torch.stack([getattr(adapter[f"{EXPERTS}.{i}.{part}_proj"], factor) for i in range(COUNT)])


def experts(form: str, adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of `adapter`'s experts in one of the forms that checkpoints have."""
    parts = {
        part: (stacked(adapter, part, "a"), stacked(adapter, part, "b")) for part in ("gate", "up", "down")
    }
    (ga, gb), (ua, ub), (da, db) = parts.values()
    both = torch.cat([gb, ub], 1)
    flat = {"experts.base_layer": (ga, both), "experts": (da, db)}
    forms: dict[str, dict[str, tuple[Tensor, Tensor]]] = {
        "stacked": {
            "experts.gate_proj": (ga, gb),
            "experts.up_proj": (ua, ub),
            "experts.down_proj": (da, db),
        },
        "stacked, w": {"experts.w1": (ga, gb), "experts.w3": (ua, ub), "experts.w2": (da, db)},
        "each, w": {
            f"experts.{i}.{name}": (a[i], b[i])
            for name, a, b in (("w1", ga, gb), ("w3", ua, ub), ("w2", da, db))
            for i in range(COUNT)
        },
        "fused": {"experts.gate_up_proj": (ga, both), "experts.down_proj": (da, db)},
        "shared outer": {"experts.gate_up_proj": (ga[:1], both), "experts.down_proj": (da, db[:1])},
        "parameters": {
            name: (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) for name, (a, b) in flat.items()
        },
        "parameters, turned": {
            name: (b.transpose(1, 2).flatten(0, 1), a.permute(2, 1, 0).flatten(1))
            for name, (a, b) in flat.items()
        },
    }
    head = f"base_model.model.{EXPERTS.removesuffix('experts')}"
    return {
        f"{head}{name}.lora_{letter}.weight": tensor
        for name, pair in forms[form].items()
        for letter, tensor in zip("AB", pair, strict=True)
    }


@pytest.mark.parametrize(
    "form", ["stacked", "stacked, w", "each, w", "fused", "shared outer", "parameters", "parameters, turned"]
)
def test_every_form_of_experts_is_read(moe: Path, tmp_path: Path, form: str) -> None:
    adapter = lora.adapter_for(moe, LINEAR)
    adapter = {name: factors for name, factors in adapter.items() if name.startswith(EXPERTS)}
    for i in range(COUNT):
        first = f"{EXPERTS}.0"
        gate, up, down = (f"{EXPERTS}.{i}.{part}_proj" for part in ("gate", "up", "down"))
        if "fused" in form or "shared" in form or "parameters" in form:  # one A for gate and up
            adapter[up] = adapter[up]._replace(a=adapter[gate].a)
        if "shared" in form:
            adapter[gate] = adapter[gate]._replace(a=adapter[f"{first}.gate_proj"].a)
            adapter[up] = adapter[up]._replace(a=adapter[f"{first}.gate_proj"].a)
            adapter[down] = adapter[down]._replace(b=adapter[f"{first}.down_proj"].b)
    want = read(moe, lora.save(adapter, tmp_path / "each"))
    got = read(moe, lora.write(tmp_path / "form", experts(form, adapter), {"r": 4, "lora_alpha": 8}))
    assert got[f"{EXPERTS}.gate_proj"].ranks.tolist() == [4]
    for name, one in want.items():
        for mine, other in zip(got[name][:3], one[:3], strict=True):
            assert torch.equal(mine, other), name


def fused(path: Path, name: str, parts: Sequence[str], rows: int = 0) -> Adapter:
    """Random factors of a fused module of the model at `path`, B with `rows` more than it has."""
    (shape,) = [shape for shape in lora.shapes_of(path) if f"{name}.{parts[0]}" in shape.parts]
    outputs = sum(shape.parts[f"{name}.{part}"] for part in parts) + rows
    whole = f"{name}.{next(fused for fused, own in FUSED.items() if own == parts)}"
    return {whole: Factors(torch.randn(4, shape.inputs), torch.randn(outputs, 4))}


@pytest.mark.parametrize(
    ("base", "name", "parts"),
    [
        ("phi3", "model.layers.1.self_attn", FUSED["qkv_proj"]),
        ("phi3", "model.layers.1.mlp", FUSED["gate_up_proj"]),
        ("llama", "model.layers.1.self_attn", FUSED["qkv_proj"]),
    ],
)
def test_a_fused_module_is_its_parts_in_order(
    request: pytest.FixtureRequest, tmp_path: Path, base: str, name: str, parts: Sequence[str]
) -> None:
    path = request.getfixturevalue(base)
    adapter = fused(path, name, parts)
    ((whole, (a, b)),) = adapter.items()
    config: dict[str, Any] = {"alpha_pattern": {whole.rpartition(".")[2]: 4}}
    got = read(path, lora.save(adapter, tmp_path / "a", **config))[f"{name}.{parts[0]}"]
    assert got.ranks.tolist() == [4] and sum(got.parts) == len(b)
    for part, rows in enumerate(torch.split(b, list(got.parts))):
        torch.testing.assert_close(delta(got, part), rows @ a)


@pytest.mark.parametrize(("whole", "parts"), FUSED.items())
def test_a_fused_module_is_refused_beside_its_part(
    phi3: Path, tmp_path: Path, whole: str, parts: Sequence[str]
) -> None:
    own = Rig(phi3, adapters=LIMITS)
    name = f"model.layers.1.{'self_attn' if whole == 'qkv_proj' else 'mlp'}"
    for part in parts:
        both = fused(phi3, name, parts) | {
            module: factors
            for module, factors in lora.adapter_for(phi3, [part]).items()
            if module.startswith(name)
        }
        refused = str(own.command("adapter_read", "a", lora.save(both, tmp_path / part)))
        assert f"{name}.{whole}" in refused and f"{name}.{part}" in refused
        assert "which have a matrix in common" in refused


def test_a_fused_module_of_another_size_is_refused(phi3: Path, tmp_path: Path) -> None:
    own = Rig(phi3, adapters=LIMITS)
    adapter = fused(phi3, "model.layers.0.self_attn", FUSED["qkv_proj"], rows=1)
    refused = str(own.command("adapter_read", "a", lora.save(adapter, tmp_path / "a")))
    assert "model.layers.0.self_attn.qkv_proj has factors [4, 64] and [129, 4]" in refused
    assert "the model's matrix is [128, 64]" in refused


def test_a_fused_module_is_refused_where_a_part_was_not_asked_for(phi3: Path, tmp_path: Path) -> None:
    own = Rig(phi3, adapters=AdapterLimits(places=1, max_rank=8, host=1, targets=("q_proj", "v_proj")))
    adapter = fused(phi3, "model.layers.0.self_attn", FUSED["qkv_proj"])
    refused = str(own.command("adapter_read", "a", lora.save(adapter, tmp_path / "a")))
    assert "it changes model.layers.0.self_attn.qkv_proj, which is none of q_proj, v_proj" in refused


Q = "base_model.model.model.layers.0.self_attn.q_proj"
GOOD = {f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(64, 4)}


def without(*ends: str, **more: Tensor) -> dict[str, Tensor]:
    kept = {name: tensor for name, tensor in GOOD.items() if not name.endswith(ends)} if ends else dict(GOOD)
    return kept | {f"{Q}.{name.replace('__', '.')}": tensor for name, tensor in more.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (GOOD, {"peft_type": "IA3"}, "peft_type is IA3"),
        (GOOD, {"use_dora": True}, "DoRA is not supported"),
        (without(lora_magnitude_vector=torch.ones(64)), {}, "DoRA is not supported"),
        (GOOD, {"bias": "all"}, "bias is all"),
        (without(lora_B__bias=torch.ones(64)), {}, "adapters with bias"),
        (GOOD, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (GOOD | {"base_model.model.model.embed_tokens.weight": torch.ones(3, 64)}, {}, "added tokens"),
        (GOOD, {"trainable_token_indices": [3]}, "trainable_token_indices"),
        (GOOD, {"layer_replication": [[0, 2]]}, "layer_replication"),
        (GOOD, {"fan_in_fan_out": True}, "fan_in_fan_out"),
        (GOOD, {"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changed the base model"),
        (GOOD, {"r": 0}, "r is 0"),
        (GOOD, {"r": 8}, "has rank 4, its adapter_config.json says 8"),
        (GOOD, {"r": "many"}, "not as PEFT writes it"),
        (GOOD, {"rank_pattern": {"(a+)+b": 4}}, "repeats too much"),
        (GOOD, {"rank_pattern": {".?" * 60 + "b": 4}}, "repeats too much"),
        (GOOD, {"rank_pattern": {"(..|.)" * 40 + "b": 4}}, "repeats too much"),
        (GOOD, {"rank_pattern": {"(": 4}}, "no regular expression"),
        ({}, {}, "no weights"),
        (without("B.weight"), {}, "one factor of two"),
        (without("A.weight", lora_A__weight=torch.ones(4, 63)), {}, r"\[4, 63\] and \[64, 4\].*\[64, 64\]"),
        (without("A.weight", lora_A__weight=torch.ones(64)), {}, "factors"),
        (without("A.weight", lora_A__weight=torch.full((4, 64), math.nan)), {}, "not finite"),
        (without("A.weight", lora_A__weight=torch.ones(4, 64).to(torch.float8_e4m3fn)), {}, "torch.float8"),
        (
            {f"{Q}.lora_A.weight": torch.ones(9, 64), f"{Q}.lora_B.weight": torch.ones(64, 9)},
            {"r": 9},
            "rank 9, --max-lora-rank is 8",
        ),
        (
            {name.replace("q_proj", "w_proj"): tensor for name, tensor in GOOD.items()},
            {},
            "w_proj, which is none of q_proj",
        ),
        (without(strange=torch.ones(1)), {}, "no weight of LoRA"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    llama: Path, tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], reason: str
) -> None:
    """And its memory on the host is free again, and others go on."""
    bad = lora.write(tmp_path / "bad", tensors, {"r": 4, "lora_alpha": 8, **config})
    good = lora.save(lora.adapter_for(llama), tmp_path / "good")
    own = Rig(llama, adapters=LIMITS)
    own.place("good", good, 0)
    text = own.generate(1, PROMPT, 4, place=0)
    for _ in range(LIMITS.host):
        refused = own.command("adapter_read", "bad", bad)
        assert refused is not None and str(bad) not in refused, "clients would learn the path"
        assert re.search(reason, refused), refused
    assert own.command("adapter_place", "bad", place=1) == "the adapter bad is not in host memory"
    assert own.generate(2, PROMPT, 4, place=0) == text


def test_experts_that_a_checkpoint_stacks_are_refused(tmp_path: Path) -> None:
    own = Rig(tiny_model.build("gpt-oss", tmp_path / "model").path, adapters=LIMITS)
    for name, rows in ((EXPERTS, 64), (f"{EXPERTS}.gate_up_proj", 64), (f"{EXPERTS}.3.up_proj", 32)):
        module = f"base_model.model.{name}"
        tensors = {
            f"{module}.lora_A.weight": torch.ones(4, 64),
            f"{module}.lora_B.weight": torch.ones(rows, 4),
        }
        saved = lora.write(tmp_path / name, tensors, {"r": 4, "lora_alpha": 8})
        refused = own.command("adapter_read", "a", saved)
        assert f"it changes {name}, which is none of q_proj" in str(refused)


def test_a_target_that_was_not_asked_for_is_refused(llama: Path, tmp_path: Path) -> None:
    limits = AdapterLimits(places=1, max_rank=8, host=1)
    own = Rig(llama, adapters=limits)
    saved = lora.save(lora.adapter_for(llama, TARGETS), tmp_path / "a")
    assert "lm_head" in str(own.command("adapter_read", "a", saved))


@pytest.mark.parametrize("damage", ["no config", "no weights", "cut", "text", "bin"])
def test_damaged_files_are_refused(llama: Path, tmp_path: Path, damage: str) -> None:
    saved = lora.save(lora.adapter_for(llama), tmp_path / "a")
    weights = saved / "adapter_model.safetensors"
    match damage:
        case "no config":
            (saved / "adapter_config.json").unlink()
        case "no weights" | "bin":
            weights.rename(saved / ("adapter_model.bin" if damage == "bin" else "other"))
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "text":
            (saved / "adapter_config.json").write_text(json.dumps([1, 2]))
    own = Rig(llama, adapters=LIMITS)
    refused = str(own.command("adapter_read", "a", saved))
    assert refused.startswith("The adapter is refused: ") and str(tmp_path) not in refused


def test_tokens_beyond_the_models_are_refused(llama: Path, tmp_path: Path) -> None:
    """A tokenizer that was saved with the adapter lists the tokens that the model has, too."""
    saved = lora.save(lora.adapter_for(llama), tmp_path / "a")
    own = Rig(llama, adapters=LIMITS)
    (saved / "added_tokens.json").write_text(json.dumps({"<turn>": VOCAB - 1}))
    assert own.command("adapter_read", "a", saved) is None
    (saved / "added_tokens.json").write_text(json.dumps({"<turn>": VOCAB - 1, "<new>": VOCAB}))
    refused = str(own.command("adapter_read", "b", saved))
    assert "'<new>': added tokens are not supported" in refused


def test_the_host_has_room_for_as_many_as_it_says(llama: Path, tmp_path: Path) -> None:
    saved = lora.save(lora.adapter_for(llama), tmp_path / "a")
    own = Rig(llama, adapters=LIMITS)
    for i in range(LIMITS.host):
        assert own.command("adapter_read", str(i), saved) is None
    assert "room for 4 adapters" in str(own.command("adapter_read", "5", saved))
    assert own.command("adapter_drop", "2") is None
    assert own.command("adapter_read", "5", saved) is None
    assert own.command("adapter_place", "5", place=LIMITS.places) == "there is no place 3, there are 3"
    assert "--enable-lora" in str(Rig(llama).command("adapter_read", "a", saved))


@pytest.mark.parametrize(
    "pattern",
    [
        rf"layers\.({'|'.join(map(str, range(28)))})\.self_attn\.(q_proj|k_proj|v_proj|o_proj)",
        rf".*\.({'|'.join(map(str, range(10, 20)))})\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        "|".join(rf"layers\.{at}\.self_attn\.(q|k|v|o)_proj" for at in (1, 2, 3, 10)),
    ],
)
def test_patterns_may_list_layers_and_modules(pattern: str) -> None:
    assert _match({pattern: 8}, "model.layers.10.self_attn.q_proj", 4) == 8
