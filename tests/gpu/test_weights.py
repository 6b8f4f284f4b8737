"""Checkpoints in: whole, sharded, tied, dummy; and one clear error for those that are not whole."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from core.errors import ModelError
from core.models import read_spec
from gpu.build import spec_of
from gpu.models.base import CausalModel
from gpu.shard import Shard
from gpu.thread import device_thread
from gpu.weights import load_model
from gpu.weights.stage import Stage
from tests.rigs import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("qwen3-moe-mixed", tmp_path_factory.mktemp("whole")).path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def load(path: Path) -> CausalModel:
    return load_model(spec_of(path), path, torch.float32, CPU)


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Change or remove tensors of a single-file checkpoint."""
    file = path / "model.safetensors"
    tensors = {
        name: tensor for name, tensor in load_file(file).items() if changes.get(name, tensor) is not None
    }
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file(tensors, file, metadata={"format": "pt"})


def apart(path: Path) -> None:
    """Take the fused matrices of a tiny Phi-3 apart."""
    file = path / "model.safetensors"
    tensors = dict(load_file(file))
    for name in [name for name in tensors if "qkv_proj" in name or "gate_up_proj" in name]:
        fused = tensors.pop(name)
        qkv = "qkv_proj" in name
        sizes, parts = (
            ((64, 32, 32), ("q_proj", "k_proj", "v_proj")) if qkv else ((96, 96), ("gate_proj", "up_proj"))
        )
        for part, rows in zip(parts, torch.split(fused, sizes), strict=True):
            tensors[name.replace("qkv_proj" if qkv else "gate_up_proj", part)] = rows.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_matrices_are_their_parts(rank: int, tmp_path: Path) -> None:
    """The parts are equal also where a rank takes some rows of each."""
    fused = tiny_model.build("phi3", tmp_path / "fused").path
    parts = Path(shutil.copytree(fused, tmp_path / "apart"))
    apart(parts)
    one, other = (
        load_model(spec_of(path).shard(2), path, torch.float32, CPU, shard=Shard(rank, 2)).places()
        for path in (fused, parts)
    )
    assert one.keys() == other.keys() and len(one) > 20
    for name, place in one.items():
        assert torch.equal(place, other[name])


def test_a_fused_matrix_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tiny_model.build("phi3", tmp_path).path
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(path, **{name: torch.zeros(127, 64)})
    with pytest.raises(ModelError, match=r"qkv_proj\.weight \[127, 64\] instead of \[128, 64\]"):
        load(path)
    rewrite(path, **{name: None})
    with pytest.raises(ModelError, match=r"3 tensors missing: model\.layers\.1\.self_attn\.q_proj"):
        load(path)


@pytest.mark.parametrize(
    ("base", "tower"),
    [
        ("language_model.model.", "vision_tower.norm.weight"),
        ("model.language_model.", "model.vision_tower.norm.weight"),
    ],
)
def test_of_a_model_with_a_vision_tower_the_language_model_is_loaded(
    base: str, tower: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Norm weights, stored less one, are held as what they multiply by, in float32 also in a 16-bit model."""
    made = tiny_model.build("gemma3", tmp_path / "text")
    path = Path(shutil.copytree(made.path, tmp_path / "both"))
    config = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", base, 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {tower: torch.ones(3)}, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO"):
        got = load_model(spec_of(path), path, torch.bfloat16, CPU).places()
    assert f"1 tensors are not used ({tower}, ...)" in caplog.text
    state = made.reference.state_dict()
    assert got.keys() == state.keys() - {"lm_head.weight"}
    for name, place in got.items():
        norm = name.endswith("norm.weight")
        assert torch.equal(place, 1.0 + state[name] if norm else state[name].bfloat16()), name


@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen2", "qwen3-moe-mixed", "mixtral", "phi3"])
def test_every_parameter_is_filled_from_any_number_of_files(name: str, tmp_path: Path) -> None:
    whole = tiny_model.build(name, tmp_path / "whole")
    sharded = tiny_model.build(name, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    one, many = load(whole.path).places(), load(sharded.path).places()
    state = whole.reference.state_dict()
    for key, place in one.items():
        torch.testing.assert_close(place, many[key], rtol=0, atol=0)
        if key in state:  # experts lie fused in transformers' own memory
            torch.testing.assert_close(place, state[key], rtol=0, atol=0)


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model.build("glm4-moe-one-group", tmp_path).path
    tensors = load_file(path / "model.safetensors")
    more = {f"model.layers.2.{name}.weight": torch.ones(3) for name in ("enorm", "shared_head.norm")}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO"):
        load(path)
    assert "without its layers for multi-token prediction" in caplog.text
    beyond = {"model.layers.3.enorm.weight": torch.ones(3)}  # of the one that the config has
    save_file(tensors | beyond, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.3\.enorm"):
        load(path)


def test_places_cover_every_parameter_once(made: Path) -> None:
    spec = spec_of(made)
    model = load_model(spec, None, torch.float32, CPU)
    places = model.places().values()
    with device_thread(CPU):
        for place in places:
            place.zero_()
        for place in places:
            place.add_(1.0)
    assert all(bool((place == 1.0).all()) for place in places)
    matrices = sum(place.numel() for place in places if place.dim() > 1)
    assert matrices == spec.num_parameters()


def test_weights_are_converted_to_the_dtype_asked_for(made: Path) -> None:
    model = load_model(spec_of(made), made, torch.bfloat16, CPU)
    name = "model.norm.weight"
    assert model.places()[name].dtype == torch.bfloat16
    assert torch.equal(model.places()[name], load(made).places()[name].bfloat16())


def test_dummy_weights_need_no_file_and_repeat(made: Path) -> None:
    spec = spec_of(made)
    one, two = (load_model(spec, None, torch.float32, CPU).places() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert bool((one["model.layers.0.input_layernorm.weight"] == 1).all())
    assert one["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_progress_reaches_the_end(made: Path) -> None:
    shares: list[float] = []
    load_model(spec_of(made), made, torch.float32, CPU, shares.append)
    assert max(shares) == 1.0


def test_one_error_lists_all_that_does_not_fit(copy: Path) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    rewrite(copy, **{"model.norm.weight": None, norm: torch.zeros(3), "model.extra.weight": torch.zeros(1)})
    with pytest.raises(ModelError) as caught:
        load(copy)
    told = str(caught.value)
    assert "1 tensors missing: model.norm.weight" in told
    assert "not part of this architecture: model.extra.weight" in told
    assert f"of the wrong shape: {norm} [3] instead of [64]" in told


def test_long_lists_of_names_are_cut(copy: Path) -> None:
    rewrite(copy, **{name: None for name in load_file(copy / "model.safetensors") if "experts" in name})
    with pytest.raises(ModelError, match=r"24 tensors missing: .* and 18 more"):
        load(copy)


def test_computed_and_tied_tensors_may_be_there(tmp_path: Path) -> None:
    path = tiny_model.build("llama-tied-bias", tmp_path).path
    rewrite(
        path,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(2)},
    )
    load(path)


def test_a_stored_head_that_is_not_the_embedding_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model.build("llama", tmp_path, tie_word_embeddings=True).path
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(path, **{"lm_head.weight": table.to(torch.float64)})
    load(path)
    assert "lm_head" not in caplog.text
    other = table.clone()
    other[-1, -1] += 1
    rewrite(path, **{"lm_head.weight": other})
    load(path)
    assert "lm_head.weight is not the embedding" in caplog.text
    assert """--hf-overrides '{"tie_word_embeddings": false}'""" in caplog.text


def test_a_tied_table_may_have_the_name_of_the_head_alone(tmp_path: Path) -> None:
    """safetensors' `save_model` writes one of two names, the first by the alphabet."""
    tiny = tiny_model.build("llama", tmp_path, tie_word_embeddings=True)
    save_model(tiny.reference, str(tiny.path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tiny.path / "model.safetensors")
    table = load(tiny.path).places()["model.embed_tokens.weight"]
    assert torch.equal(table, tiny.reference.get_input_embeddings().weight)


def test_a_head_that_is_missing_may_be_the_embedding(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    rewrite(path, **{"lm_head.weight": None})
    with pytest.raises(ModelError, match=r"""lm_head\.weight\. .*'\{"tie_word_embeddings": true\}'"""):
        load(path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, max_shard_size="40KB").path
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"fetch the index, which names its \*\.safetensors"):
        load(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, max_shard_size="40KB").path
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        load(path)


def test_a_tensor_the_index_promises_and_the_shard_lacks(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path, max_shard_size="40KB").path
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != content["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"cannot read model\.norm\.weight"):
        load(path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="not an index"):
        load(path)


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_file_is_named(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or not"):
        load(copy)


def test_a_directory_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(copy)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        spec_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        spec_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        spec_of(tmp_path)


def test_a_config_that_does_not_match_its_weights(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    spec = read_spec({**config, "moe_intermediate_size": 16})
    with pytest.raises(ModelError, match="24 tensors of the wrong shape"):
        load_model(spec, copy, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_cuts_tensors_to_its_buffers(dtype: torch.dtype) -> None:
    copy = Stage(CPU, size=96).copy
    matrix = torch.empty(4, 33, dtype=dtype)
    parts = torch.randn(33, 4).t(), torch.randn(3, 33)  # the first is not contiguous
    for place, part in zip((matrix, matrix[1:]), parts, strict=True):
        copy(place, part)
    copy(matrix[0, :0], torch.empty(0))
    assert torch.equal(matrix, torch.cat([parts[0][:1], parts[1]]).to(dtype))


def test_threads_that_copy_at_once_lose_nothing() -> None:
    copy = Stage(CPU, size=64).copy
    source = torch.arange(6 * 1000.0).view(6, 1000)
    place = torch.zeros_like(source)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(copy, place, source))
    assert torch.equal(place, source)
