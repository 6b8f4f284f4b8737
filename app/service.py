"""The objects that handlers use: the service's health, and the loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from app.helper.process import HelperProcess, HelpersBySize
from app.parsers.registry import ReasoningFamily, ToolFamily
from core.adapters import AdapterInfo
from core.config import ServeConfig
from core.errors import Overloaded, RequestError, Unavailable
from core.helper import Helper
from core.models import Implementation, PoolingSpec, Task
from core.request import SamplingParams

if TYPE_CHECKING:
    from app.engine.adapters import Adapters
    from app.engine.operator import Operator
    from app.engine.submit import Submitter
    from app.text.template import ChatTemplate
    from app.text.tokenizer import Tokenizer


SERVED = "default"
"""Stands for the one model: SGLang's and llama.cpp's clients send it when they do not know the name."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model as clients may see it."""

    name: str
    aliases: tuple[str, ...] = ()
    """Further names for it."""
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    dtype: str
    created: int
    weight_dtype: str = ""
    """Type of the layers' weights; `dtype` is that of activations."""
    kv_dtype: str = ""
    """Type of the KV pool."""
    attention_backend: str = ""
    """Backends in use, in the form that `--attention-backend` takes."""
    device: str = "cpu"
    implementation: Implementation = "native"
    """The implementation whose layers run."""
    format: str = "safetensors"
    """Format of the weight files; or `gguf`."""
    size: int = 0
    """Bytes of the weight files."""
    sampling: SamplingParams = SamplingParams()
    """Defaults of sampling parameters."""
    hidden_size: int = 0
    routed: tuple[int, int] = (0, 0)
    """Layers, and experts per token in each; zeros for a dense model."""
    task: Task = "generate"
    pooling: PoolingSpec = PoolingSpec()

    @property
    def names(self) -> tuple[str, ...]:
        """All names; answers carry the first."""
        return (self.name, *self.aliases)

    def check_task(self, *tasks: Task) -> None:
        """Raise `RequestError` unless the checkpoint is for one of these tasks."""
        if self.task not in tasks:
            raise RequestError(
                f"This model {_DOES[self.task]}. What was asked needs a model that "
                f"{' or '.join(_DOES[task] for task in tasks)}.",
                "model",
                "unsupported_model",
            )


_DOES: Mapping[Task, str] = {
    "generate": "generates text",
    "embed": "makes embeddings",
    "classify": "has a head for classes or scores",
}


class NumberBudget:
    """Limits the numbers in hidden states of answers and embeddings of prompts, from the check of a request
    to the end of its task: slow readers of many large answers would otherwise hold gigabytes.

    Owner: event loop.
    """

    def __init__(self, limit: int = 2**28) -> None:
        """`limit` is a GiB of float32."""
        self._limit = limit
        self._held = 0

    def hold(self, count: int) -> None:
        """Count numbers until the current task ends. Raises `Overloaded` when others hold too many."""
        if self._held and self._held + count > self._limit:
            raise Overloaded("Too many hidden states, experts or embeddings are held: try again later.")
        task = asyncio.current_task()
        assert task is not None, "answers are made in tasks"
        self._held += count
        task.add_done_callback(lambda task: self._release(count))

    def _release(self, count: int) -> None:
        self._held -= count


class Loaded(msgspec.Struct, frozen=True):
    """The loaded model and everything that serves it."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Submitter
    adapters: Adapters
    operator: Operator
    tools: ToolFamily | None = None
    """Format of tool calls; None: they are not parsed."""
    reasoning: ReasoningFamily | None = None
    """Format of reasoning; None: the model has none."""
    adapter: AdapterInfo | None = None
    """The adapter that a request has selected; `card` has its name then."""
    settings: ServeConfig = ServeConfig()
    """The operator's defaults for answers, and whether requests may have their own chat templates."""
    numbers: NumberBudget = msgspec.field(default_factory=NumberBudget)
    helper: Helper = msgspec.field(default_factory=HelperProcess)
    """Helper process for chat templates of requests and for grammars."""
    bodies: Helper = msgspec.field(default_factory=HelpersBySize)
    """Helper processes for bodies too large to be decoded on the loop."""


class Service:
    """Health from the start, and the loaded model once there is one.

    Owner: event loop.
    """

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        """The server's settings for `/server_info`, without secrets."""
        self.health = Health()
        self.started_at = time.time()
        self.startup_seconds = 0.0
        """Seconds from the start until the model was ready; 0 before."""
        self._loaded: Loaded | None = None

    def ready(self, loaded: Loaded) -> None:
        """Accept requests from now on."""
        self._loaded = loaded
        self.startup_seconds = time.time() - self.started_at
        self.health = Health(Phase.READY, "ready", 1.0)

    @property
    def loaded(self) -> Loaded:
        """The model and its engine. Raises `Unavailable` unless the server is ready or draining."""
        self.check()
        assert self._loaded is not None
        return self._loaded

    def check(self) -> None:
        """Raise `Unavailable` unless the server is ready or draining."""
        if self._loaded is None or self.health.phase is Phase.FAILED:
            raise Unavailable(self.health.reason or f"the server is starting: {self.health.stage}")


class Phase(Enum):
    """States of a server. Only READY accepts requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health(msgspec.Struct, frozen=True):
    """`stage` and `progress` (0 to 1) of startup; `reason` why the server is not ready; `seconds_left` of the
    stage, None while nothing says how many."""

    phase: Phase = Phase.STARTING
    stage: str = "starting"
    progress: float = 0.0
    reason: str | None = None
    seconds_left: float | None = None
