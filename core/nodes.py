"""Several processes that divide the ranks of one model: which of them this is, and what cannot be."""

from __future__ import annotations

import msgspec

from core.config import ParallelConfig
from core.env import read
from core.errors import ConfigError

ANYWHERE = ("", "*", "0.0.0.0", "::", "0:0:0:0:0:0:0:0")
"""Hosts that stand for all interfaces."""


def of_torchrun(parallel: ParallelConfig) -> ParallelConfig:
    """`parallel` with what torchrun says of its processes where no flag does. Raises `ConfigError` for
    numbers that are none."""
    host, port = read("MASTER_ADDR"), read("MASTER_PORT")
    named = parallel.nnodes > 1 or parallel.node_rank or parallel.dist_init_addr
    if named or host is None or port is None:
        return parallel
    nodes, node, local = (_number(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if nodes <= 1:
        return parallel
    return msgspec.structs.replace(
        parallel,
        nnodes=nodes,
        node_rank=node,
        dist_init_addr=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        base_gpu_id=parallel.base_gpu_id + local * max(parallel.tp // nodes, 1) * parallel.gpu_id_step,
    )


def hosted_by_torchrun(parallel: ParallelConfig) -> bool:
    """Whether torchrun already serves the rendezvous store at `--dist-init-addr`."""
    return read("TORCHELASTIC_USE_AGENT_STORE") == "True" and address(parallel.dist_init_addr) == (
        read("MASTER_ADDR"),
        _number("MASTER_PORT"),
    )


def attempt() -> int:
    """How often torchrun has started these nodes before: its store remembers what they wrote."""
    return _number("TORCHELASTIC_RESTART_COUNT")


def check_nodes(parallel: ParallelConfig) -> None:
    """Raise `ConfigError` for processes that cannot divide the ranks, or that nobody could find."""
    nodes, node = parallel.nnodes, parallel.node_rank
    if node >= nodes:
        raise ConfigError(f"--node-rank {node} needs --nnodes {node + 1} or more, got {nodes}.")
    if nodes == 1:
        return
    if parallel.dp > 1:
        raise ConfigError(
            f"--dp {parallel.dp} with --nnodes {nodes}: replicas over hosts are servers of their own, "
            "behind Ray Serve (configs/deploy) or another balancer. Leave out --dp."
        )
    if parallel.tp % nodes:
        above = -(-parallel.tp // nodes) * nodes
        raise ConfigError(
            f"--tp {parallel.tp} cannot be divided among --nnodes {nodes}: each has as many ranks. "
            f"Use --tp {above}, or fewer nodes."
        )
    address(parallel.dist_init_addr)


def address(text: str) -> tuple[str, int]:
    """Host and port of `--dist-init-addr`. Raises `ConfigError` unless it is HOST:PORT with one address."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or not 0 < int(port) < 2**16 or host in ANYWHERE:
        raise ConfigError(
            f"--dist-init-addr must be HOST:PORT with an address of node 0 that the others reach, and not "
            f"all interfaces, got {text!r}."
        )
    return host, int(port)


def _number(name: str) -> int:
    text = read(name) or "0"
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} must be a number, got {text!r}.")
    return int(text)
