"""The server process: bind, load the model, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import uvloop

from app import logs
from app.api.openai.files import BATCHES
from app.api.routes import make_app
from app.batch.batches import Batches
from app.batch.capacity import BackgroundCapacity
from app.compose import Live, load
from app.engine.gc import Housekeeping
from app.engine.replicas import Replicas
from app.engine.submit import Submitter
from app.engine.watchdog import Watchdog
from app.http.connection import Connection
from app.http.keys import KEYS
from app.http.middleware import log_requests
from app.http.server import Runner
from app.http.tenant import Keys
from app.listen import Address, listen
from app.process import FAILED, HUNG, begin, leave, raise_file_limit
from app.service import Health, Phase, Service
from app.stages import Stages
from app.summary import summary
from core.adapters import adapters_at_start
from core.clock import monotonic
from core.config import Config, SpeculativeConfig
from core.errors import ConfigError, EngineFailed

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""Switch interval of the GIL. With Python's default, 5 ms, another thread could delay the loop by a step."""
DRAIN_POLL = 0.02
SHUTDOWN_GRACE = 0.5
"""Seconds between a failure and the exit, so that the last events reach the clients."""

PATHS = (
    ("model", "model"),
    ("model", "tokenizer"),
    ("model", "chat_template"),
    ("speculative", "speculative_draft_model_path"),
    ("serve", "data_dir"),
    ("serve", "dump_requests"),
    ("serve", "uds"),
    ("serve", "ssl_certfile"),
    ("serve", "ssl_keyfile"),
)
"""Settings that may be paths on this machine."""
T = TypeVar("T")


def run(config: Config) -> NoReturn:
    """Serve until a signal or a failure, then end the process: with 0, `FAILED` or `HUNG`. Raises
    `ConfigError`."""
    logs.set_up(config.serve.log_level, config.serve.log_format)
    log_requests(config.serve.access_log)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(Server(config).serve())
    leave(code)


class Server:
    """HTTP is served from the start, the model as soon as it is loaded.

    Owner: event loop.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._service = Service(public_settings(config))
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._submitter: Submitter | None = None
        self._stages = Stages()

    async def serve(self) -> int:
        """Bind, load, serve and drain; returns the exit code."""
        serve = self._config.serve
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        application = make_app(self._service, serve)
        if serve.api_keys_file:
            loop.add_signal_handler(signal.SIGHUP, reload_keys, application[KEYS])
        runner = self._runner = Runner(application, shutdown_timeout=SHUTDOWN_GRACE)
        await runner.setup()
        try:
            address = await listen(runner, serve)
            log.info("listening on %s, loading the model", address)
            loading = begin(partial(load, self._config, self._progress), "loom-load")
            live = await self._while_running(asyncio.wrap_future(loading))
            if live is not None:
                await self._run_engine(live, application[BATCHES], address)
        except EngineFailed as error:  # another node of the group is gone, or could not load
            log.error("the group of nodes failed: %s", error)
            self._exit_code = FAILED
        finally:
            await runner.cleanup()
        return self._exit_code

    # -- start -------------------------------------------------------------------------------------

    def _progress(self, stage: str, share: float) -> None:
        """Called in the loading thread, which is safe: one frozen record replaces another."""
        self._stages(stage, share)
        if self._service.health.phase is Phase.STARTING:
            self._service.health = Health(
                Phase.STARTING, stage, share, seconds_left=self._stages.seconds_left
            )

    async def _run_engine(self, live: Live, batches: Batches, address: Address) -> None:
        replicas, self._submitter = live.replicas, live.loaded.engine
        replicas.on_failure = partial(self._on_failure, replicas)
        loop = asyncio.get_running_loop()
        try:
            await live.start()
        except ConfigError:
            live.close()
            raise
        limit = self._config.serve.watchdog_timeout
        watchdogs = [Watchdog(engine, limit, monotonic) for engine in replicas.engines if limit]
        housekeeping = Housekeeping(replicas, loop, watchdogs)
        housekeeping.start()
        self._service.ready(live.loaded)
        batches.start(self._service, BackgroundCapacity(replicas))
        took = self._service.startup_seconds
        log.info("%s is ready after %.1f s", live.loaded.card.name, took)
        for line in summary(address, self._config.serve, live.loaded, live.memory):
            log.info("%s", line, extra=logs.BARE)
        try:
            await self._stop.wait()
            await batches.stop()  # the rest of their lines runs after the next start
            await self._drain(live.loaded.engine)
        finally:
            housekeeping.stop()
            live.close()

    # -- end ---------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        """The first signal drains, the second one stops at once."""
        if self._stop.is_set():
            log.warning("second signal: stopping now")
            if self._submitter is not None:
                self._submitter.abort_all("The server is shutting down.")
        self._stop.set()

    def _on_failure(self, replicas: Replicas, reason: str) -> None:
        log.error("the engine failed: %s", reason)
        self._exit_code = HUNG if replicas.hung else FAILED
        self._service.health = Health(Phase.FAILED, "failed", 1.0, f"the engine failed: {reason}")
        self._stop.set()

    async def _drain(self, submitter: Submitter) -> None:
        """Let running requests finish until the deadline, then abort them with an error event."""
        submitter.drain()
        if self._exit_code:
            await asyncio.sleep(SHUTDOWN_GRACE)
            return
        self._service.health = Health(Phase.DRAINING, "draining", 1.0, "the server is shutting down")
        log.info("draining for up to %g s", self._config.serve.drain_timeout)
        deadline = monotonic() + self._config.serve.drain_timeout
        while not (submitter.idle and self._all_sent) and not self._exit_code and monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL)
        if cut := submitter.abort_all("The server is shutting down."):
            log.warning("the drain deadline cut off %d requests", cut)
            await asyncio.sleep(SHUTDOWN_GRACE)

    @property
    def _all_sent(self) -> bool:
        """Whether all responses that have begun are written to their sockets; clients may read slowly."""
        server = self._runner.server
        return server is None or not any(cast(Connection, each).answering for each in server.connections)

    async def _while_running(self, work: asyncio.Future[T]) -> T | None:
        """The result of `work`, or None when a signal comes first."""
        stop = asyncio.ensure_future(self._stop.wait())
        waited: list[asyncio.Future[Any]] = [work, stop]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return work.result() if work.done() else None


def reload_keys(keys: Keys) -> None:
    """Read the file of keys again; a wrong one changes nothing."""
    try:
        log.info("API keys: %s", keys.reload())
    except ConfigError as error:
        log.error("the API keys stay as they were: %s", error)


def public_settings(config: Config) -> dict[str, object]:
    """The settings that clients may see: no API keys, no addresses of other hosts, and only the last part of
    paths on this machine."""
    settings: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    del settings["serve"]["api_key"]
    del settings["serve"]["api_keys_file"]
    del settings["serve"]["otlp_traces_endpoint"]
    del settings["cache"]["kv_events_config"]
    del settings["lora"]["lora_root"]
    del settings["parallel"]["dist_init_addr"]
    settings["lora"]["lora"] = [adapter.name for adapter in adapters_at_start(config.lora)]
    for group, name in PATHS:
        place = Path(settings[group][name]).expanduser()
        if place.is_absolute() or place.exists():  # otherwise a hub id, or empty
            settings[group][name] = place.name
    if config.speculative == SpeculativeConfig():
        del settings["speculative"]
    return dict(settings)
