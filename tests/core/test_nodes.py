"""Processes that divide the ranks of a model: what torchrun says, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from core.config import ParallelConfig
from core.errors import ConfigError
from core.nodes import address, check_nodes, hosted_by_torchrun, of_torchrun

GOOD = ParallelConfig(tp=4, nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:29500")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"node_rank": 2}, "--node-rank 2 needs --nnodes 3 or more, got 2"),
        ({"dp": 2}, "--dp 2 with --nnodes 2: .*configs/deploy"),
        ({"tp": 3}, "--tp 3 cannot be divided among --nnodes 2: .*Use --tp 4"),
        ({"tp": 1}, "--tp 1 cannot be divided among --nnodes 2: .*Use --tp 2"),
        ({"dist_init_addr": ""}, "--dist-init-addr must be HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1"}, "HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1:70000"}, "HOST:PORT"),
        ({"dist_init_addr": ":29500"}, "all interfaces"),
        ({"dist_init_addr": "0.0.0.0:29500"}, "all interfaces"),
        ({"dist_init_addr": "[::]:29500"}, "all interfaces"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_nodes(msgspec.structs.replace(GOOD, **change))


def test_one_process_needs_nothing() -> None:
    check_nodes(ParallelConfig(dp=3))
    check_nodes(GOOD)
    assert address("[::1]:29500") == ("::1", 29500)


def test_each_process_has_the_first_gpus() -> None:
    assert [GOOD.gpu(0, rank) for rank in range(GOOD.local_ranks)] == [0, 1]


def test_torchrun_says_what_flags_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    found = of_torchrun(ParallelConfig(tp=4))
    assert (found.nnodes, found.node_rank, found.dist_init_addr) == (4, 3, "[::1]:29500")
    assert found.gpu(0) == 1
    assert hosted_by_torchrun(found)
    assert of_torchrun(GOOD) == GOOD
    assert not hosted_by_torchrun(GOOD)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK must be a number, got 'first'"):
        of_torchrun(ParallelConfig(tp=4))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert of_torchrun(ParallelConfig()) == ParallelConfig()
