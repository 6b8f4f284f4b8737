"""How the nodes of a group find each other, and refuse to run where they differ.

torch's store at `--dist-init-addr`, on node 0 or in torchrun, says where node 0 listens; each other node
connects there once and keeps the connection (`gpu.nodes.channel`). torch's process groups find each other by
the same store. Every socket that listens is bound to the one address by which the nodes reach each other. Who
reaches it can be a node: the network among them is trusted, as NCCL and gloo do.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import PrefixStore, Store, TCPStore

from core.clock import monotonic
from core.config import ParallelConfig
from core.errors import ConfigError, EngineFailed, LoomError
from core.nodes import address, attempt, hosted_by_torchrun
from gpu.nodes.channel import Channel, NodeLost
from gpu.nodes.wire import Failed, Hello, Least, Welcome

log = logging.getLogger(__name__)

JOIN_SECONDS = 600.0
"""How long a node waits for the others: one may still fetch the model."""
HELLO_SECONDS = 5.0
"""How long node 0 waits for the first message of who connects: others wait meanwhile."""
HELLO_BYTES = 2**20
WHERE = "channel"
"""Key of the store: port and token of node 0."""


class Nodes:
    """The group that this process has joined, as `parallel` says. Owner: the loading thread.

    `channels` are node 0's to the others, by number, or another node's to node 0 alone.
    """

    def __init__(self, parallel: ParallelConfig, channels: Sequence[Channel], store: Store) -> None:
        """`store` is held as long as the group: node 0 may serve it."""
        self.parallel, self.channels, self._store = parallel, channels, store

    @property
    def leads(self) -> bool:
        """Whether this is node 0, which plans."""
        return not self.parallel.node_rank

    @property
    def ranks(self) -> range:
        """The ranks of this process, among all."""
        local = self.parallel.local_ranks
        return range(self.parallel.node_rank * local, (self.parallel.node_rank + 1) * local)

    @property
    def local(self) -> str:
        """The address of this host where the other nodes reach it."""
        return self.channels[0].local

    def store(self) -> Store:
        """A connection of its own: one that waits for a key keeps others waiting."""
        return _prefixed(TCPStore(*address(self.parallel.dist_init_addr), wait_for_workers=False))

    def least(self, value: int) -> int:
        """The least of all nodes' values; each calls it as often. Raises `ConfigError` for a node that could
        not go on and `NodeLost` for one that is gone."""
        if not self.leads:
            self.channels[0].send(Least(value))
            return _value(self.channels[0])
        least = min(value, *(_value(channel) for channel in self.channels))
        for channel in self.channels:
            channel.send(Least(least))
        return least

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While this node loads: tell the others why where it cannot."""
        try:
            yield
        except LoomError as error:
            for channel in self.channels:
                with suppress(NodeLost):
                    channel.send(Failed(str(error)))
                channel.close()
            raise


def join(parallel: ParallelConfig, facts: Mapping[str, str]) -> Nodes:
    """Wait until all nodes are here, up to `JOIN_SECONDS`. `facts` must be equal on all, by the name that
    errors say. Raises `ConfigError` for nodes that differ, do not come, or cannot be reached."""
    host, port = address(parallel.dist_init_addr)
    enter = _join if parallel.node_rank else _lead
    try:
        return enter(parallel, facts, host, port)
    except (OSError, RuntimeError) as error:  # torch's are RuntimeErrors
        raise ConfigError(f"--dist-init-addr {parallel.dist_init_addr}: {error}") from error


def _lead(parallel: ParallelConfig, facts: Mapping[str, str], host: str, port: int) -> Nodes:
    """Node 0: serve the store, tell where it listens, and take one connection of each other node."""
    hosted = hosted_by_torchrun(parallel)
    # torch would listen on all interfaces.
    fd = None if hosted else listen(host, port).detach()
    base = TCPStore(host, port, None, not hosted, timedelta(seconds=JOIN_SECONDS), False, master_listen_fd=fd)
    token = secrets.token_hex(16)
    found: dict[int, Channel] = {}
    try:
        with listen(host, 0) as listener:
            _prefixed(base).set(WHERE, f"{listener.getsockname()[1]} {token}")
            log.info("node 0 of %d waits for the others at %s", parallel.nnodes, parallel.dist_init_addr)
            end = monotonic() + JOIN_SECONDS
            while len(found) < parallel.nnodes - 1:
                _welcome(_accepted(listener, end, parallel, found), token, facts, found)
    except ConfigError as refused:
        for channel in found.values():
            _refuse(channel, str(refused))
        raise
    for channel in found.values():
        channel.send(Welcome())
    return Nodes(parallel, [found[node] for node in sorted(found)], base)


def _accepted(
    listener: socket.socket, end: float, parallel: ParallelConfig, found: Mapping[int, Channel]
) -> Channel:
    """The next connection. Raises `ConfigError` where none comes until `end`, in seconds of the clock."""
    listener.settimeout(max(end - monotonic(), 0.001))
    try:
        connection, (host, *_) = listener.accept()
    except TimeoutError as late:
        missing = ", ".join(str(node) for node in range(1, parallel.nnodes) if node not in found)
        raise ConfigError(
            f"--nnodes {parallel.nnodes}: {len(found) + 1} are here after {JOIN_SECONDS:g} s. Missing: "
            f"--node-rank {missing}."
        ) from late
    return Channel(connection, str(host))


def _welcome(channel: Channel, token: str, facts: Mapping[str, str], found: dict[int, Channel]) -> None:
    """Take a connection that a node made, or drop what is none. Raises `ConfigError` for one that differs."""
    try:
        hello = channel.receive(HELLO_SECONDS, HELLO_BYTES)
    except NodeLost as error:
        log.warning("dropped a connection: %s", error)
        channel.close()
        return
    if not isinstance(hello, Hello) or not secrets.compare_digest(hello.token, token):
        log.warning("dropped a connection of %s, which is no node of this group", channel.name)
        channel.close()
        return
    channel.name = f"node {hello.node} at {channel.name}"
    reason = _differences(facts, hello.facts, hello.node)
    if not reason and (hello.node in found or not hello.node):
        reason = f"--node-rank {hello.node} is given to two nodes."
    if reason:
        _refuse(channel, reason)
        raise ConfigError(reason)
    found[hello.node] = channel
    log.info("%s is here", channel.name)


def _refuse(channel: Channel, reason: str) -> None:
    try:
        channel.send(Welcome(reason))
    except NodeLost as error:
        log.warning("%s", error)
    channel.close()


def _join(parallel: ParallelConfig, facts: Mapping[str, str], host: str, port: int) -> Nodes:
    """Another node: look up where node 0 listens, and connect."""
    log.info("node %d of %d looks for node 0 at %s:%d", parallel.node_rank, parallel.nnodes, host, port)
    store = _prefixed(TCPStore(host, port, timeout=timedelta(seconds=JOIN_SECONDS), wait_for_workers=False))
    where, token = store.get(WHERE).decode().split()
    channel = Channel(socket.create_connection((host, int(where)), HELLO_SECONDS), "node 0")
    try:
        channel.send(Hello(token, parallel.node_rank, dict(facts)))
        answer = channel.receive(JOIN_SECONDS)
        if not isinstance(answer, Welcome) or answer.refusal:
            raise ConfigError(answer.refusal if isinstance(answer, Welcome) else "node 0 does not answer.")
    except (ConfigError, EngineFailed):
        channel.close()
        raise
    return Nodes(parallel, [channel], store)


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str], node: int) -> str:
    """What differs between node 0 and another, in words; empty: nothing."""
    found = [
        f"{name} is {ours.get(name, 'unknown')} on node 0 and {theirs.get(name, 'unknown')} on node {node}"
        for name in (*ours, *(theirs.keys() - ours.keys()))
        if ours.get(name) != theirs.get(name)
    ]
    return f"nodes must be equal: {'; '.join(found)}." if found else ""


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens on one address. Raises `ConfigError` if `host` means all interfaces, such as
    0.0.0.0, and `OSError` if the address cannot be bound."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ip_address(str(place[0]).partition("%")[0]).is_unspecified:
        raise ConfigError(f"--dist-init-addr: {host} is all interfaces. Name one of node 0's addresses.")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _prefixed(store: Store) -> Store:
    return PrefixStore(f"loom/{attempt()}", store)


def _value(channel: Channel) -> int:
    match channel.receive():
        case Least(value):
            return value
        case Failed(reason):
            raise ConfigError(f"{channel.name}: {reason}")
        case other:
            raise NodeLost(f"{channel.name} sent {type(other).__name__} instead of a number")
