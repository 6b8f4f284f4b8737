"""Settings of speculative decoding to what drafts: what cannot draft for a target is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.config import SpeculativeConfig
from core.errors import ConfigError, ModelError
from gpu.build import spec_of
from gpu.draft.build import Draft, read_drafting
from tests.rigs import draft_heads, tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("target")).path


def read(algorithm: str, target: Path, path: Path | None = None) -> Draft | None:
    settings = SpeculativeConfig(algorithm=algorithm)  # type: ignore[arg-type]
    return read_drafting(settings, path, spec_of(target), False, spec_of)


def test_a_small_model_generates_text_of_the_targets_vocabulary(target: Path, tmp_path: Path) -> None:
    assert read("draft-model", target, target) is not None
    encoder = tiny_model.build_headless("BertModel", tmp_path / "encoder").path
    embeds = tiny_model.build_headless("Qwen3Model", tmp_path / "embeds").path
    other = tiny_model.build("llama", tmp_path / "other", vocab_size=300).path
    with pytest.raises(ModelError, match="BertModel generates no text"):
        read("draft-model", target, encoder)
    with pytest.raises(ModelError, match="Qwen3Model generates no text"):
        read("draft-model", target, embeds)
    with pytest.raises(ModelError, match=r"\(300\) is not the target's \(256\)"):
        read("draft-model", target, other)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 300), ("target_hidden_size", 32)])
def test_a_head_is_for_its_targets_sizes(target: Path, tmp_path: Path, name: str, value: int) -> None:
    path = draft_heads.write("eagle3", tmp_path)
    assert read("eagle3", target, path) is not None
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ModelError, match=rf"{name} must be the target's \(\d+\), got {value}"):
        read("eagle3", target, path)


@pytest.mark.parametrize("architecture", ["BertModel", "Qwen3Model"])
def test_nothing_drafts_for_a_model_without_text(tmp_path: Path, architecture: str) -> None:
    path = tiny_model.build_headless(architecture, tmp_path).path
    with pytest.raises(ConfigError, match=f"ngram: {architecture} generates no text"):
        read("ngram", path)
