"""The server's components with another executor, assembled as in `app/server.py`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from app.api.routes import make_app
from app.checkpoint.checkpoint import resolve
from app.engine.adapters import Adapters
from app.engine.gc import Housekeeping
from app.engine.loop import Engine
from app.engine.operator import Operator
from app.engine.replicas import Replicas
from app.engine.submit import Submitter
from app.http.server import Runner
from app.listen import listen
from app.process import raise_file_limit
from app.server import SWITCH_SECONDS
from app.service import Loaded, ModelCard, Service
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from core.cache.manager import CacheManager
from core.clock import monotonic
from core.config import ModelConfig, ScheduleConfig, ServeConfig
from core.executor import Capabilities, Executor
from core.schedule.scheduler import Scheduler

CONTEXT = 4096


def capabilities(rows: int, vocab_size: int) -> Capabilities:
    """Capabilities for `rows` requests of `CONTEXT` tokens."""
    return Capabilities(
        num_pages=rows * CONTEXT // 16 + 1,
        page_size=16,
        max_rows=rows,
        context_length=CONTEXT,
        vocab_size=vocab_size,
        max_step_tokens=1 << 20,
    )


def load_tokenizer() -> Tokenizer:
    """The tokenizer of the default model."""
    checkpoint = resolve(ModelConfig(), print)
    return Tokenizer.load(
        checkpoint.tokenizer, checkpoint.config["vocab_size"], checkpoint.eos_ids, checkpoint.bos_id
    )


class Stack:
    """Engine and HTTP server in this process. Owner: event loop."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer) -> None:
        caps = executor.capabilities
        cache = CacheManager(caps.num_pages, caps.page_size)
        # Prefill is not limited: its cost is not measured here.
        config = ScheduleConfig(step_tokens=caps.max_step_tokens)
        self.engine = Engine(Scheduler(caps, cache, config, monotonic), executor, 1, monotonic)
        self.replicas = Replicas([self.engine])
        self.submitter = Submitter(self.replicas, tokenizer, monotonic)
        card = ModelCard(
            name="fake",
            path="fake",
            architecture="none",
            context_length=caps.context_length,
            vocab_size=caps.vocab_size,
            dtype="none",
            created=int(time.time()),
        )
        self._service = Service({})
        adapters, operator = Adapters(self.replicas), Operator(self.replicas, Path())
        self._loaded = Loaded(card, tokenizer, ChatTemplate(None), self.submitter, adapters, operator)

    async def start(self) -> tuple[Runner, int]:
        """Listen on a free port. Returns the runner, to be cleaned up, and the port."""
        raise_file_limit()
        sys.setswitchinterval(SWITCH_SECONDS)
        loop = asyncio.get_running_loop()
        self.engine.start(loop)
        serve = ServeConfig(port=0, log_level="warning")
        runner = Runner(make_app(self._service, serve))
        await runner.setup()
        address = await listen(runner, serve)
        self._service.ready(self._loaded)
        Housekeeping(self.replicas, loop).start()
        return runner, urlsplit(address.url).port or 0
