"""`--kv-events-config`: what the prefix cache stores and removes is published, with vLLM's settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from core.config import CacheConfig
from core.errors import ConfigError

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields and defaults, except `endpoint`: vLLM's `tcp://*:5557` listens on all interfaces."""

    enable_kv_cache_events: bool | None = None
    """None: enabled if `publisher` is `zmq`, as in SGLang."""
    publisher: Literal["zmq", "null"] | None = None
    """None: `zmq`."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """The PUB socket of replica 0; replica n adds n to the port. An IP address of this machine, or `*`, is
    bound; any other address or host name is connected to."""
    replay_endpoint: str | None = None
    """The ROUTER socket that replays batches, always bound; None: no replay. Ports as for `endpoint`."""
    buffer_steps: Positive = 10_000
    """Number of recent batches that can be replayed."""
    hwm: Positive = 100_000
    """Batches queued for one subscriber; further ones are dropped for that subscriber."""
    max_queue_size: Positive = 100_000
    """Batches queued before they are sent; further ones are dropped for all."""
    topic: str = ""
    """Topic of every message. llm-d's routers expect `kv@POD@MODEL`."""

    @property
    def publishes(self) -> bool:
        """Whether anything is published at all."""
        on = self.publisher == "zmq" if self.enable_kv_cache_events is None else self.enable_kv_cache_events
        return on and self.publisher != "null"


def kv_events(config: CacheConfig, replicas: int) -> KvEventsConfig | None:
    """The settings; None where nothing is to be published. Raises `ConfigError`."""
    if not config.kv_events_config:
        return None
    try:
        settings = msgspec.json.decode(config.kv_events_config, type=KvEventsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "--kv-events-config must be a JSON object of "
            f"{', '.join(KvEventsConfig.__struct_fields__)}: {error}."
        ) from error
    if not settings.publishes:
        return None
    if not config.radix_cache:
        raise ConfigError("--kv-events-config needs prefix caching: leave out --no-radix-cache.")
    for endpoint in (settings.endpoint, settings.replay_endpoint):
        if endpoint is not None:
            endpoint_of(endpoint, replicas - 1)
    return settings


_ENDPOINT = re.compile(r"tcp://(?P<host>[^/]+):(?P<port>\*|[0-9]{1,5})|(ipc|inproc)://.+")


def endpoint_of(endpoint: str, replica: int) -> str:
    """The endpoint of a replica, from that of replica 0. Raises `ConfigError`."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        raise ConfigError(
            f"--kv-events-config: an endpoint is tcp://ADDRESS:PORT or ipc://PATH, got {endpoint!r}."
        )
    host, port = found["host"], found["port"]
    if host is None:
        return f"{endpoint}_dp{replica}" if replica else endpoint
    if port == "*":  # any that is free
        return endpoint
    if not 0 < int(port) + replica < 2**16:
        raise ConfigError(
            f"--kv-events-config: port {int(port) + replica} of {endpoint!r} for replica {replica} "
            "must be 1 to 65535."
        )
    return f"tcp://{host}:{int(port) + replica}"
