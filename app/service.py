"""Everything a handler may touch, in one object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from app.engine.job import Generator
from app.helper.process import HelperProcess, HelpersBySize
from app.parsers.registry import ReasoningFamily, ToolFamily
from core.errors import Overloaded, RequestError, Unavailable
from core.helper import Helper
from core.models import PoolingSpec, Task
from core.request import SamplingParams
from core.stats import EngineStatistics

if TYPE_CHECKING:
    from app.engine.operator import Operator
    from app.text.template import ChatTemplate
    from app.text.tokenizer import Tokenizer


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may know of the model."""

    name: str
    aliases: tuple[str, ...] = ()
    """Further names that clients may use."""
    path: str
    architecture: str
    context_length: int
    vocab_size: int
    dtype: str
    created: int
    weight_dtype: str = ""
    """Of the layers' matrices; `dtype` is what is computed in."""
    kv_dtype: str = ""
    """Of keys and values in the pool."""
    device: str = "cpu"
    format: str = "safetensors"
    """Of the files with the weights, or `gguf`."""
    size: int = 0
    """Bytes of those files."""
    sampling: SamplingParams = SamplingParams()
    """What a request gets for parameters that it does not name."""
    hidden_size: int = 0
    routed: tuple[int, int] = (0, 0)
    """Layers, and experts that a token takes in one; zeros where there are no experts."""
    task: Task = "generate"
    pooling: PoolingSpec = PoolingSpec()

    @property
    def names(self) -> tuple[str, ...]:
        """All of them; answers carry the first."""
        return (self.name, *self.aliases)

    def check_task(self, *tasks: Task) -> None:
        """Raise `RequestError` unless the checkpoint is of one of these kinds."""
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


class Control(Generator, Protocol):
    """The engine as HTTP sees it. Owner: event loop."""

    def abort(self, id: str, tenant: str = "") -> bool:
        """End one job of a tenant by id; False when it is not here."""
        ...

    def abort_all(self, message: str | None = None, tenant: str | None = None) -> int:
        """End every job, or a tenant's; how many there were. With a `message` the clients are told of an
        error."""
        ...

    def flush(self) -> bool:
        """Empty the prefix cache; False (and nothing done) while requests run."""
        ...

    def timeline(self, id: str, tenant: str = "") -> dict[str, object] | None:
        """Where the time of a tenant's recent job went; None when it is not remembered."""
        ...

    def statistics(self) -> EngineStatistics: ...


class NumberBudget:
    """Numbers of hidden states that answers hold, and of embeddings that prompts are, from the check of a
    request to the end of its task: slow readers of many large answers would hold as many gigabytes.

    Owner: event loop.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int = 2**28) -> None:
        """`limit` is a GiB of float32."""
        self._limit = limit
        self._held = 0

    def hold(self, count: int) -> None:
        """Count them until the current task ends. Raises `Overloaded` where others hold too many."""
        if self._held and self._held + count > self._limit:
            raise Overloaded("Too many hidden states, experts or embeddings are held: try again later.")
        task = asyncio.current_task()
        assert task is not None, "answers are made in tasks"
        self._held += count
        task.add_done_callback(lambda task: self._release(count))

    def _release(self, count: int) -> None:
        self._held -= count


class AnswerDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What answers tell where a request does not say: the operator's choice."""

    usage: bool = False
    """At the end of streams, whatever the request says."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens as `token_id:N`."""


class Loaded(msgspec.Struct, frozen=True):
    """What exists once the model is in."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    engine: Control
    tools: ToolFamily | None = None
    """How the model writes tool calls; None: the operator wants none read."""
    reasoning: ReasoningFamily | None = None
    """How it marks thinking; None: it does not think."""
    operator: Operator | None = None
    """None where the engine is not this process's to control."""
    defaults: AnswerDefaults = AnswerDefaults()
    trusts_templates: bool = False
    """Requests may bring chat templates of their own."""
    numbers: NumberBudget = msgspec.field(default_factory=NumberBudget)
    helper: Helper = msgspec.field(default_factory=HelperProcess)
    """For templates of requests; grammars are compiled there too."""
    bodies: Helper = msgspec.field(default_factory=HelpersBySize)
    """For bodies too large to be decoded on the loop."""


class Service:
    """Health from the first second, and the loaded model when there is one.

    Owner: event loop.
    """

    __slots__ = ("_loaded", "health", "settings", "started_at")

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        """The operator's choices, for `/server_info`; no secrets among them."""
        self.health = Health()
        self.started_at = time.time()
        self._loaded: Loaded | None = None

    def ready(self, loaded: Loaded) -> None:
        """From now on requests are taken."""
        self._loaded = loaded
        self.health = Health(Phase.READY, "ready", 1.0)

    @property
    def loaded(self) -> Loaded:
        """The model and its engine. Raises `Unavailable` unless the server is ready or draining."""
        if self._loaded is None or self.health.phase is Phase.FAILED:
            reason = self.health.reason or f"the server is starting: {self.health.stage}"
            raise Unavailable(reason)
        return self._loaded


class Phase(Enum):
    """A server's life. Only READY takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Health(msgspec.Struct, frozen=True):
    """`stage` and `progress` (0 to 1) say how far the start is; `reason` why it is not ready."""

    phase: Phase = Phase.STARTING
    stage: str = "starting"
    progress: float = 0.0
    reason: str | None = None
