"""GGUF files written here and read back: the same model as the checkpoint they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch

from core.errors import ModelError
from gpu.build import spec_of
from gpu.quant import mxfp4
from gpu.shard import Shard
from gpu.weight_formats import shard_spec
from gpu.weights import load_model
from gpu.weights.gguf import config_from_gguf, hf_name, unpermute
from tests.rigs import mxfp4_files, tiny_model
from tests.rigs.gguf_file import CASES, permute, write
from tests.rigs.runner import Rig

CPU = torch.device("cpu")


def assert_equal(places: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """Check that weights are equal to the last bit, but for logarithms of what files have."""
    assert places.keys() == want.keys()
    for name, tensor in want.items():
        rounds = 1e-6 if name.endswith("A_log") else 0.0
        torch.testing.assert_close(places[name], tensor, rtol=rounds, atol=rounds, msg=name)


@pytest.mark.parametrize(
    ("arch", "variant", "fields"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_gguf_is_the_model_it_was_made_from(
    arch: str, variant: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    tiny = tiny_model.build(variant, tmp_path / "hf", **fields)
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference)
    spec = spec_of(file)
    # Layers for multi-token prediction are left out of most files.
    assert msgspec.structs.replace(spec_of(tiny.path), more_layers=spec.more_layers) == spec
    places = load_model(spec, file, torch.float32, CPU).places()
    want = load_model(spec_of(tiny.path), tiny.path, torch.float32, CPU).places()
    assert_equal(places, want)
    prompt = list(range(3, 20))
    assert Rig(file).generate(1, prompt, 8) == tiny_model.greedy(tiny.reference, prompt, 8)


@pytest.mark.parametrize(
    ("arch", "variant", "only"),
    [("llama", "llama", ""), ("qwen35", "qwen3.5", r"ssm_(alpha|beta|out)|attn_\w+.weight|ffn_|token_embd")],
)
def test_quantised_weights_are_dequantised(arch: str, variant: str, only: str, tmp_path: Path) -> None:
    """Rows that lie in another order in a file are put in order before that."""
    tiny = tiny_model.build(variant, tmp_path / "hf")
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference, quantise=True, only=only)
    places, want = (
        load_model(spec_of(path), path, torch.float32, CPU).places() for path in (file, tiny.path)
    )
    assert any(not torch.equal(places[name], want[name]) for name in want)
    for name, tensor in want.items():
        torch.testing.assert_close(places[name], tensor, atol=tensor.abs().max().item() / 127, rtol=0)


@pytest.mark.parametrize(("arch", "variant"), [("deepseek2", "deepseek-v2"), ("qwen3next", "qwen3-next")])
def test_files_of_older_converters(arch: str, variant: str, tmp_path: Path) -> None:
    """Older converters wrote one tensor, as the checkpoint has it, for what now comes in parts."""
    tiny = tiny_model.build(variant, tmp_path / "hf", mlp_only_layers=[])
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference, how="legacy")
    places, want = (
        load_model(spec_of(path), path, torch.float32, CPU).places() for path in (file, tiny.path)
    )
    assert_equal(places, want)


@pytest.mark.parametrize(
    ("arch", "variant"), [("deepseek2", "deepseek-v2"), ("qwen35", "qwen3.5"), ("qwen3next", "qwen3-next")]
)
def test_ranks_read_their_part_of_what_files_have_otherwise(arch: str, variant: str, tmp_path: Path) -> None:
    tiny = tiny_model.build(variant, tmp_path / "hf", mlp_only_layers=[])
    file = write(tmp_path / "tiny.gguf", arch, tiny.reference)
    for rank in range(2):
        places, want = (
            load_model(shard_spec(spec_of(path), 2), path, torch.float32, CPU, shard=Shard(rank, 2)).places()
            for path in (file, tiny.path)
        )
        assert_equal(places, want)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny = tiny_model.build("deepseek-v2", tmp_path / "hf")
    file = write(tmp_path / "tiny.gguf", "deepseek2", tiny.reference)
    spec = spec_of(file)
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_v_b", b"blk.7.attn_v_b"))
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k_b\.weight and lacks blk\.1\.attn_v_b\.weight"):
        load_model(spec, file, torch.float32, CPU)


def test_a_name_is_no_format(tmp_path: Path) -> None:
    tiny = tiny_model.build("qwen3-moe", tmp_path / "hf", **tiny_model.FEW_EXPERTS | {"mlp_only_layers": []})
    file = write(tmp_path / "tiny.gguf", "qwen3moe", tiny.reference)
    spec, name = spec_of(file), b"blk.1.ffn_down_exps.weight"
    file.write_bytes(file.read_bytes().replace(name, b"blk.1.ffn_{}{x.y}_exps.wght"[: len(name)]))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_0\{x\.y\}"):
        load_model(spec, file, torch.float32, CPU)


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """The converter writes gate and up as one tensor if it is asked to."""
    tiny = tiny_model.build("qwen3-moe", tmp_path / "hf", **tiny_model.FEW_EXPERTS | {"mlp_only_layers": []})
    file = write(tmp_path / "tiny.gguf", "qwen3moe", tiny.reference, how="fused")
    places, want = (
        load_model(spec_of(path), path, torch.float32, CPU).places() for path in (file, tiny.path)
    )
    assert_equal(places, want)


def test_a_split_file_is_read_by_its_first(tmp_path: Path) -> None:
    tiny = tiny_model.build("llama", tmp_path / "hf")
    first = write(tmp_path / "tiny.gguf", "llama", tiny.reference, split=10)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert parts[0] == first and len(parts) == 3
    spec = spec_of(first)
    assert spec == spec_of(tiny.path)
    places, want = (load_model(spec, path, torch.float32, CPU).places() for path in (first, tiny.path))
    assert_equal(places, want)
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf is one of 3 files .*: name the first"):
        spec_of(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf is missing"):
        spec_of(first)


def test_experts_in_mxfp4_stay_as_they_are_where_they_can(tmp_path: Path) -> None:
    """Experts of one layer of two are in MXFP4. Places for four bits get the same numbers as those of the
    safetensors."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "swiglu_limit": 7.0}
    tiny = tiny_model.build("gpt-oss", tmp_path / "hf", **sizes)
    mxfp4_files.quantise(tiny.path, tiny.reference, plain=(1,))
    only = r"blk\.0\.ffn_\w+_exps.weight"
    file = write(
        tmp_path / "tiny.gguf", "gpt-oss", tiny.reference, True, gguf.GGMLQuantizationType.MXFP4, only
    )
    prompt = list(range(3, 40))
    assert Rig(file).generate(1, prompt, 8) == tiny_model.greedy(tiny.reference, prompt, 8)
    found, want = (_restored(path) for path in (file, tiny.path))
    assert_equal(found, want)


def _restored(path: Path) -> dict[str, torch.Tensor]:
    """The weights, held in MXFP4 where the checkpoint has them so, as floats."""
    spec = spec_of(path)
    places = load_model(
        msgspec.structs.replace(spec, mxfp4=spec.stored_mxfp4), path, torch.float32, CPU
    ).places()
    packed = [name for name, place in places.items() if f"{name}_scale" in places]
    assert packed == [name for name in places if "layers.0.mlp.experts." in name and name.endswith("weight")]
    return {
        name: mxfp4.restore(place, places[f"{name}_scale"]) if name in packed else place
        for name, place in places.items()
        if not name.endswith("_scale")
    }


def test_config_from_gguf_reads_like_config_json(tmp_path: Path) -> None:
    tiny = tiny_model.build("qwen3", tmp_path / "hf")
    config = config_from_gguf(write(tmp_path / "tiny.gguf", "qwen3", tiny.reference))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rms_norm_eps"] == 1e-6


def test_unpermute_undoes_permute() -> None:
    weight = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(unpermute(permute(weight, 3), 3), weight)


def test_names() -> None:
    assert hf_name("blk.12.ffn_gate.weight", "llama") == "model.layers.12.mlp.gate_proj.weight"
    assert hf_name("output.weight", "llama") == "lm_head.weight"
    assert hf_name("blk.0.ssm_a", "llama") == "blk.0.ssm_a"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gemma3n")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError,
        match=r"'gemma3n' is not supported; the nearest that is: 'gemma3'\. Supported are .*granite, llama, ",
    ):
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
