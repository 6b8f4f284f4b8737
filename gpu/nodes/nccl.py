"""Ranks that are GPUs of several processes: they exchange by NCCL, in the graphs that compute.

What the host decides for all goes by gloo, as on CPUs (`gpu.nodes.gloo`). A process has one GPU: ranks that
capture in turn, as those of one process do, would wait for each other in the warm-up of a graph.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from core.env import use_interface
from gpu.nodes.gloo import MOST, GlooRank, NodeGroup, gloo_ranks
from gpu.nodes.join import Nodes
from gpu.thread import device_thread

SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""


class NcclGroup(NodeGroup):
    """The rank of this process. NCCL's kernels wait for others; `abort` ends them."""

    def __init__(self, nodes: Nodes, nccl: Any) -> None:
        """`nccl` is its `ProcessGroupNCCL`."""
        super().__init__(nodes)
        self._nccl = nccl

    def abort(self, reason: str) -> None:
        """See `NodeGroup.abort`. NCCL's abort may block until its kernels end, so it runs in a thread of its
        own: the caller holds a lock that other threads need."""
        super().abort(reason)
        threading.Thread(target=self._nccl.abort, name="loom-nccl-abort", daemon=True).start()


class NcclRank(GlooRank):
    """Its rank. Parts are gathered and then summed, in the order of ranks, as elsewhere: n - 1 times a part's
    bytes come to each GPU, where a ring would move 2 (n - 1) / n of them. For two ranks that is the same.

    Owner: launch thread.
    """

    def __init__(self, group: NcclGroup, own: GlooRank, nccl: Any) -> None:
        """`own` is the same rank, for what the host decides."""
        super().__init__(group, own.shard.rank, own.member)
        self._nccl, self._options = nccl, AllgatherOptions()
        self._options.asyncOp = False  # on the current stream, which may be one that is captured

    def _exchange(self, value: Any) -> Sequence[Any]:
        """Exchange tensors of one shape on the GPU."""
        found = value.new_empty((self.shard.ranks, *value.shape))
        self._nccl._allgather_base(found, value.contiguous(), self._options)
        parts: Sequence[Tensor] = found.unbind(0)
        return parts


def nccl_ranks(nodes: Nodes, device: torch.device) -> tuple[NcclGroup, Sequence[NcclRank]]:
    """The rank of this process, on `device`. Blocks until those of all are connected. Raises `EngineFailed`
    where one does not come."""
    if (interface := interface_of(nodes.local)) is not None:
        use_interface(interface)
    _, (own,) = gloo_ranks(nodes)
    backend: Any = torch.distributed
    options = backend.ProcessGroupNCCL.Options()
    options._timeout = MOST
    store = torch.distributed.PrefixStore("nccl", nodes.store())
    with device_thread(device):
        nccl = backend.ProcessGroupNCCL(store, own.shard.rank, own.shard.ranks, options)
        group = NcclGroup(nodes, nccl)
        rank = NcclRank(group, own, nccl)
        # NCCL connects at the first collective, which must not be captured.
        rank.gather(torch.zeros(1, 1, device=device))
        torch.cuda.synchronize(device)
    return group, [rank]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, or None if no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
