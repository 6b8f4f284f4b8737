"""The command line and `LLM` with several nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from app.compose import follow, load
from app.offline import LLM
from app.settings import parse
from bench.chaos.tiny import dummy_model, flags, free_port
from core.errors import ConfigError
from tests.rigs.nodes import at_once
from tests.rigs.usage import usage_error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--dp", "2"], "--dp 2 with --nnodes 2"),
        (["--tp", "3"], "--tp 3 cannot be divided"),
        (["--tp", "2"], "--dist-init-addr must be HOST:PORT"),
    ],
)
def test_what_cannot_be_is_one_line(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"loom: error: {words}" in usage_error(capsys, parse, ["--nnodes", "2", *more])


def test_torchruns_place_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    parallel = parse(["--tp", "2"]).parallel
    assert (parallel.nnodes, parallel.node_rank, parallel.dist_init_addr) == (2, 1, "10.0.0.1:29500")


def test_only_node_0_answers() -> None:
    with pytest.raises(ConfigError, match="--node-rank 1 only runs ranks for node 0"):
        LLM("anything", tp=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:29500")


def test_settings_that_differ_are_named_on_both(tmp_path: Path) -> None:
    common = [*flags(dummy_model(tmp_path)), "--tp", "2", "--nnodes", "2"]
    common += ["--dist-init-addr", f"127.0.0.1:{free_port()}"]
    zero = parse([*common, "--max-running", "7"])
    one = parse([*common, "--max-running", "9", "--node-rank", "1", "--threads", "1"])
    works = [partial(load, zero, lambda stage, share: None), partial(follow, one, lambda stage, share: None)]
    for each in at_once(works):
        with pytest.raises(ConfigError, match=r"equal: --max-running is 7 on node 0 and 9 on node 1\."):
            each.result()
