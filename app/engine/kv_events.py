"""Publishes what the prefix cache stores and removes, as vLLM does, for routers that send a request to where
most of its prompt is cached.

Messages on a PUB socket have three frames: the topic, a number (8 bytes, big-endian, from 0 on, no gap unless
something was lost), and a batch, `[time, events, replica]` in msgpack. Its events are maps with vLLM's fields
(from vLLM 0.24 on; before, they were arrays). On a ROUTER socket `["", number]` is answered by
`["", number, batch]` for each batch from that number on that is still kept, and then `["", -1, ""]`.

Only this module imports pyzmq.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from core.cache.events import CacheEvent, CacheEvents, Removed, Stored
from core.errors import ConfigError
from core.kv_events import KvEventsConfig, endpoint_of

log = logging.getLogger(__name__)

MEDIUM = "GPU"
"""vLLM's word for the memory that the model reads, on a CPU too."""

END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last answer to a request for batches."""

CLOSING_TIME = 1.0
"""Seconds at the end for sending what still waits."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks (pages) that follow one another were cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are gone."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """All blocks are gone."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The cache's events in one turn of the event loop, at `ts`, in Unix seconds."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class Waiting(msgspec.Struct, frozen=True):
    """A batch on its way to the thread that sends it."""

    number: int
    ts: float
    events: list[CacheEvent]
    adapters: list[str | None]
    """The name of each event's adapter."""


class Publisher:
    """The sockets of one replica, and the thread that has them.

    Nothing here waits for a subscriber. A slow one misses batches beyond `hwm`, sees the gap in the sequence
    numbers and may request a replay. A batch beyond `max_queue_size` is dropped for all subscribers: its
    number is used up, so that they see the gap, but it cannot be replayed.

    Owner: event loop; the sockets belong to the thread, once it runs.
    """

    def __init__(self, config: KvEventsConfig, replica: int = 0) -> None:
        """Raises `ConfigError` for an address that cannot be bound."""
        self._config = config
        self._replica = replica
        self._queue: deque[Waiting] = deque()
        self._number = 0
        self._dropping = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._follows: CacheEvents | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._publish: zmq.Socket[bytes] = _opened(zmq.PUB, endpoint_of(config.endpoint, replica), config.hwm)
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = ""
        if config.replay_endpoint is not None:
            try:
                at = endpoint_of(config.replay_endpoint, replica)
                # Room for all that one request is answered with: a ROUTER drops what is beyond.
                self._replay = _opened(zmq.ROUTER, at, config.buffer_steps + 1, listen=True)
            except ConfigError:
                self._publish.close(linger=0)
                raise
            self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)

    # -- on the event loop

    @property
    def number(self) -> int:
        """Number of the next batch."""
        return self._number

    def start(self, loop: AbstractEventLoop, events: CacheEvents, name: Callable[[str], str | None]) -> None:
        """Publish the events of a cache from now on, one batch for each turn of the loop that has any. `name`
        gives an adapter's, by its id."""

        def publish() -> None:
            self.put(events.take(), name)

        def soon() -> None:
            loop.call_soon(publish)

        events.on_first = soon
        self._follows = events
        self._thread = threading.Thread(target=self._run, name=f"kv-events-{self._replica}", daemon=True)
        self._thread.start()
        log.info("cache events of replica %d: %s", self._replica, self.endpoint)

    def put(self, events: Sequence[CacheEvent], name: Callable[[str], str | None]) -> None:
        """Hand a batch to the thread."""
        number, self._number = self._number, self._number + 1
        if len(self._queue) >= self._config.max_queue_size:
            if not self._dropping:
                log.warning("cache events from number %d on are dropped: too many wait to be sent", number)
            self._dropping = True
            return
        self._dropping = False
        ids = [each.root.adapter if isinstance(each, Stored) else "" for each in events]
        names = [name(id) if id else None for id in ids]
        self._queue.append(Waiting(number, time.time(), list(events), names))
        self._ring()

    def close(self) -> None:
        """Send what waits, for a second at most, and close the sockets."""
        if self._follows is not None:
            self._follows.on_first = lambda: None
        self._closing = True
        if self._thread is None:
            self._shut()
        else:
            self._ring()
            self._thread.join(CLOSING_TIME)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # full: it rings already
            self._bell.send(b"\0")

    # -- in the thread

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        kept: deque[tuple[int, bytes]] = deque(maxlen=self._config.buffer_steps)
        topic = self._config.topic.encode()
        poller = zmq.Poller()
        poller.register(self._rung, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing or self._queue:
            ready = dict(poller.poll())
            with suppress(BlockingIOError):
                self._rung.recv(4096)
            # Before the requests: who asks after a batch was put gets it.
            while self._queue:
                batch = self._queue.popleft()
                payload = encode(KVEventBatch(batch.ts, _wire(batch), self._replica))
                self._publish.send_multipart((topic, batch.number.to_bytes(8, "big"), payload))
                kept.append((batch.number, payload))
            if self._replay in ready:
                self._answer(kept)
        self._shut()

    def _answer(self, kept: deque[tuple[int, bytes]]) -> None:
        """Answer one request for batches. Messages of any other form are dropped."""
        assert self._replay is not None
        client, *frames = self._replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            log.debug("cache events: a request must have an empty frame and a number of 8 bytes")
            return
        first = int.from_bytes(frames[1], "big")
        for number, payload in kept:
            if number >= first:
                self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, b"", END, b""))

    def _shut(self) -> None:
        for each in (self._publish, self._replay):
            if each is not None:
                each.close(linger=0)
        self._bell.close()
        self._rung.close()


def _wire(batch: Waiting) -> list[WireEvent]:
    events: list[WireEvent] = []
    for event, adapter in zip(batch.events, batch.adapters, strict=True):
        if isinstance(event, Stored):
            size = len(event.tokens) // len(event.hashes)
            tokens = event.tokens.tolist()
            events.append(BlockStored(event.hashes, event.parent, tokens, size, None, MEDIUM, adapter))
        elif isinstance(event, Removed):
            events.append(BlockRemoved(event.hashes, MEDIUM))
        else:
            events.append(AllBlocksCleared())
    return events


def _opened(kind: int, endpoint: str, most: int, listen: bool = False) -> zmq.Socket[bytes]:
    """A socket that keeps up to `most` messages for each peer. Raises `ConfigError`."""
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.set_hwm(most)
    opened.setsockopt(zmq.IPV6, "[" in endpoint)
    listen = listen or _is_here(endpoint)
    try:
        (opened.bind if listen else opened.connect)(endpoint)
    except zmq.ZMQError as error:
        opened.close(linger=0)
        does = "listen on" if listen else "connect to"
        raise ConfigError(f"--kv-events-config: cannot {does} {endpoint}: {error.strerror}.") from error
    return opened


def _is_here(endpoint: str) -> bool:
    """Whether an endpoint is one to listen on."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "*":
        return True
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False  # a name
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
