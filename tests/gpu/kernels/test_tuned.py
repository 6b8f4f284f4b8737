"""Tile sizes that a step gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.models import Fp8
from gpu.kernels.moe.tuned import (
    FOLDER,
    FP8_NAME,
    MoeConfigs,
    MoeShape,
    nearest,
    parse,
    rule,
    weight_name,
)

SHAPE = MoeShape(128, 768, 2048, 8, "bfloat16", "NVIDIA H200")


def test_nearest_by_ratio() -> None:
    table = {n: rule(SHAPE, n) for n in (1, 16, 256)}
    assert [nearest(table, n) for n in (1, 3, 5, 60, 70, 9000)] == [
        table[n] for n in (1, 1, 16, 16, 256, 256)
    ]


def test_a_file_is_read_back(tmp_path: Path) -> None:
    config = rule(SHAPE, 512)
    entry: dict[str, object] = {"small": config.small, "block_m": config.block_m}
    entry |= {"up": config.up._asdict(), "down": config.down._asdict()}
    (tmp_path / SHAPE.file).write_text(json.dumps({"512": entry}))
    configs = MoeConfigs(SHAPE, tmp_path)
    assert configs.at(300) == config
    assert configs.source.endswith(SHAPE.file)


def test_a_shape_without_a_file_goes_by_rule(tmp_path: Path) -> None:
    assert MoeConfigs(SHAPE, tmp_path).at(64) == rule(SHAPE, 64)


def test_a_file_of_many_rows_leaves_a_handful_to_the_rule(tmp_path: Path) -> None:
    """Tiles for one row would read the same experts, and launch three kernels more."""
    config = rule(SHAPE, 64)
    sizes = {"small": False, "block_m": 64, "up": config.up._asdict(), "down": config.down._asdict()}
    (tmp_path / SHAPE.file).write_text(json.dumps({"8": sizes}))
    configs = MoeConfigs(SHAPE, tmp_path)
    assert all(configs.at(tokens).small for tokens in (1, 4))
    assert [configs.at(tokens).block_m for tokens in (5, 8)] == [64, 64]


@pytest.mark.parametrize("fp8", ["rows", "blocks"])
def test_fp8_has_its_own_tiles(fp8: Fp8) -> None:
    """A step over K has one scale a block, and columns lie within one."""
    coarse = SHAPE._replace(dtype=weight_name(fp8, SHAPE.dtype))
    for tokens in (1, 32, 256, 512, 1024, 8192):
        config = rule(coarse, tokens, deep=True)
        assert config.small == rule(SHAPE, tokens).small
        assert config.block_m in (16, 32, 64, 128)
        assert all(tile.block_k == 128 and 128 % tile.block_n == 0 for tile in (config.up, config.down))
    assert rule(coarse, 8192).block_m == (64 if fp8 == "blocks" else 128), "sums of a step need registers"


def test_only_what_can_be_fetched_and_held_comes_in_tall_tiles(tmp_path: Path) -> None:
    """Rows that are no multiple of 16 bytes have no descriptor; four stages take 224 KiB of shared memory."""
    assert MoeConfigs(SHAPE, tmp_path, deep=True).at(4096).block_m == 192
    assert MoeConfigs(SHAPE, tmp_path).at(4096).block_m == 128
    for other in ({"width": 100}, {"hidden": 2044}, {"dtype": "float32"}, {"dtype": FP8_NAME}):
        assert MoeConfigs(SHAPE._replace(**other), tmp_path, deep=True).at(4096).block_m == 128


@pytest.mark.parametrize("path", sorted(FOLDER.glob("moe_*.json")), ids=lambda path: path.name)
def test_shipped_files_are_whole(path: Path) -> None:
    for tokens, entry in json.loads(path.read_text()).items():
        assert int(tokens) > 0
        config = parse(entry)
        assert config.block_m in (16, 32, 64, 128, 192)
