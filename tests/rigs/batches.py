"""A server with batches and the real engine, over a fake device that the test controls."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from openai import AsyncOpenAI
from openai.types import Batch

from app.api.openai.files import BATCHES
from app.api.routes import make_app
from app.batch.capacity import BackgroundCapacity
from app.engine.job import Job, Piece
from app.engine.loop import Engine
from app.engine.replicas import Replicas
from app.engine.submit import LiveRun, Submitter
from app.http.server import Runner
from app.service import Service
from app.text.tokenizer import Tokenizer
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import ScheduleConfig, ServeConfig
from core.executor import Capabilities
from core.request import SamplingParams
from core.schedule.scheduler import Scheduler
from tests.rigs.executor import FakeExecutor
from tests.rigs.operator import make_loaded
from tests.rigs.requests import CHAT, COMPLETIONS
from tests.rigs.server import CARD
from tests.rigs.tokenizer import JoinTemplate
from tests.rigs.wait import PATIENCE, settle

VOCAB = 300
CONTEXT = 512


class Rig:
    """A context manager. `auto`: a task completes the steps of the device. The client has the first of
    `keys`."""

    def __init__(
        self,
        data: Path,
        auto: bool = True,
        rows: int = 8,
        pages: int = 513,
        replicas: int = 1,
        keys: tuple[str, ...] = (),
        keys_file: str = "",
        **schedule: Any,
    ) -> None:
        capabilities = Capabilities(
            num_pages=pages,
            page_size=4,
            max_rows=rows,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            max_step_tokens=schedule.get("step_tokens", 2048),
        )
        config = ScheduleConfig(**schedule)
        self.executors = [FakeExecutor(capabilities) for _ in range(replicas)]
        self.schedulers = [
            Scheduler(capabilities, CacheManager(pages, 4), config, monotonic) for _ in range(replicas)
        ]
        self.replicas = Replicas(
            [
                Engine(scheduler, executor, 1, monotonic)
                for scheduler, executor in zip(self.schedulers, self.executors, strict=True)
            ]
        )
        self.executor, self.scheduler, self.engine = (
            self.executors[0],
            self.schedulers[0],
            self.replicas.engines[0],
        )
        self.tokenizer = Tokenizer.load(None, VOCAB, [2])
        self.submitter = Submitter(self.replicas, self.tokenizer, monotonic)
        self.loaded = make_loaded(CARD, self.tokenizer, JoinTemplate(), self.submitter)
        self.capacity = BackgroundCapacity(self.replicas)
        self.service = Service({})
        self.app = make_app(
            self.service, ServeConfig(data_dir=str(data), api_key=keys, api_keys_file=keys_file)
        )
        self.keys = keys
        self.batches = self.app[BATCHES]
        self.data = data
        self.auto = auto
        self.url = ""
        self._stepping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Rig:
        self.replicas.start(asyncio.get_running_loop())
        self.runner = Runner(self.app, shutdown_timeout=1.0)
        await self.runner.setup()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(self.runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=(*self.keys, "none")[0], max_retries=0)
        self.http = aiohttp.ClientSession(self.url)
        self.service.ready(self.loaded)
        self.batches.start(self.service, self.capacity)
        if self.auto:
            self._stepping = asyncio.create_task(self._step())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.batches.stop()
        if self._stepping is not None:
            self._stepping.cancel()
        await self.client.close()
        await self.http.close()
        await self.runner.cleanup()
        for executor in self.executors:
            executor.complete(len(executor.pending))
        await settle()
        self.replicas.check_integrity()
        self.replicas.close()
        self.tokenizer.close()
        self.loaded.helper.close()
        self.loaded.bodies.close()

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._complete()

    def _complete(self) -> None:
        for executor in self.executors:
            if executor.pending:
                executor.complete()

    async def step(self) -> None:
        """Complete one step of each device and run the callbacks that follow."""
        self._complete()
        await settle()

    async def upload(self, lines: Sequence[dict[str, Any]] | bytes) -> str:
        """Upload a file. Returns its id."""
        data = lines if isinstance(lines, bytes) else jsonl(lines)
        return (await self.client.files.create(file=("in.jsonl", data), purpose="batch")).id

    async def submit(
        self, lines: Sequence[dict[str, Any]], endpoint: Any = COMPLETIONS, who: str = "test"
    ) -> Batch:
        """Upload a file and create a batch."""
        id = await self.upload(lines)
        return await self.client.batches.create(
            input_file_id=id, endpoint=endpoint, completion_window="24h", metadata={"who": who}
        )

    async def ended(self, id: str) -> Batch:
        """Wait until the batch has ended. Returns it."""
        async with asyncio.timeout(PATIENCE):
            while True:
                batch = await self.client.batches.retrieve(id)
                if batch.status in ("completed", "failed", "cancelled", "expired"):
                    return batch
                await asyncio.sleep(0.005)

    async def records(self, file_id: str | None) -> dict[str, Any]:
        """Output lines by custom_id, which must be unique."""
        if file_id is None:
            return {}
        text = (await self.client.files.content(file_id)).text
        found = [json.loads(line) for line in text.splitlines()]
        assert len({record["custom_id"] for record in found}) == len(found)
        return {record["custom_id"]: record for record in found}

    async def interactive(
        self, id: str, prompt: int = 8, n: int = 1, max_tokens: int = 4, replica: int | None = None
    ) -> LiveRun:
        """Start a client's request while batches run."""
        job = Job(
            id=id,
            prompt=np.arange(prompt, dtype=np.int32) % 290 + 3,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            ignore_eos=True,
            n=n,
            replica=replica,
        )
        run = await self.submitter.start(job, _ignore)
        assert isinstance(run, LiveRun)
        return run


def _ignore(index: int, piece: Piece) -> None:
    pass


def line(id: str, max_tokens: int = 4, prompt: str = "hello", **fields: Any) -> dict[str, Any]:
    """A batch line with a completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return {"custom_id": id, "method": "POST", "url": COMPLETIONS, "body": body}


def chat_line(id: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True, **fields}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
