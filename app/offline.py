"""The engine without a server: `LLM`, from plain Python or from any event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import uvloop
from tqdm import tqdm

from app.aliases import RENAMED, VALUES, speculation
from app.api.answers import ANSWERS, answer
from app.api.openai.chat import chat_job
from app.api.openai.completions import completion_jobs
from app.api.pooling.classify import ClassifyBody
from app.api.pooling.embeddings import EmbeddingBody
from app.api.request.beam import check_streamed
from app.api.request.hidden import check_states, last_state
from app.api.request.sampling import MAX_CHOICES, request_id, selected
from app.api.request.schema import ChatBody, CompletionBody
from app.compose import load
from app.engine.failure import failure
from app.engine.job import Generator, Job, Piece
from app.engine.reasoning_budget import watched
from app.http.decoding import converted
from app.http.delivery import running
from app.outputs import Choice, Delta, Output, delta_of, output_of
from app.process import begin
from app.settings import ENGINE_GROUPS, check_engine
from app.stages import Stages
from core.config import PARSERS, Config
from core.errors import ConfigError, LoomError, Unavailable, field_error
from core.types import Floats

log = logging.getLogger(__name__)
T = TypeVar("T")

__all__ = ["LLM", "Choice", "Delta", "LoRARequest", "Output"]

Prompt = str | Sequence[int]
"""A text, or token ids."""
Prompts = Prompt | Sequence[Prompt]
Messages = Sequence[Mapping[str, Any]]
"""A conversation, as `/v1/chat/completions` takes it."""
Conversations = Messages | Sequence[Messages]
Sampling = Mapping[str, Any] | None
"""Sampling parameters by name; keywords come on top."""
Body = ChatBody | CompletionBody


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter that `LLM` loads when it is first used, after vLLM, whose own class does too."""

    lora_name: str
    lora_int_id: int
    lora_path: str


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one or none for each."""


_OPEN: set[LLM] = set()
"""The instances in this process that are not closed yet."""


def _close_all() -> None:
    for llm in list(_OPEN):
        llm.close()


# Not by atexit: executors have refused work by then, and threads that end in the middle of native code abort
# the process (exit code 134). In a child after a fork the threads are gone, and `close` finds them ended.
_threading: Any = threading
_threading._register_atexit(_close_all)


class LLM:
    """A model in this process.

        with LLM("path/to/model", kv_tokens=65536) as llm:
            print(llm.generate("Once upon a time", max_tokens=32)[0].text)

    `settings` are the server's flags of the groups model, cache, schedule, speculative and lora, and those of
    `PARSERS`, by their names with underscores, or SGLang's and vLLM's names for them; `speculative_config` is
    vLLM's. Sampling parameters have the names and defaults of the HTTP API, as keywords or as one mapping; a
    name that it does not have is a `TypeError`. What is wrong with a request raises
    `core.errors.RequestError`, also when only one prompt of many is wrong: the others are ended then.

    The engine has its own thread and event loop; every method may be called from any thread, those
    with an `a` in front from any loop.
    """

    def __init__(self, model: str = "", *, progress: bool = False, **settings: Any) -> None:
        """Loads the model: seconds to minutes. `progress` shows bars while `generate` and `chat` run.
        Raises `ConfigError`."""
        self._open(make_config(model, settings), progress)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """An instance from settings that are complete."""
        made = cls.__new__(cls)
        made._open(config, progress=False)
        return made

    def _open(self, config: Config, progress: bool) -> None:
        self._progress = progress
        # Load in a thread that ends, because its OpenMP workers end with it. Workers of the caller's
        # thread would stay beside those of the launch thread, and libgomp lets no worker spin if there are
        # more threads than CPUs: with two CPUs a token took 40 ms instead of 30.
        loading = begin(lambda: load(config, Stages()), "loom-load")
        try:
            self._live = loading.result()
        except KeyboardInterrupt:  # the load goes on, and nobody else would free the device
            begin(lambda: loading.result().close(), "loom-discard")
            raise
        self.window = 2 * sum(each.capabilities.max_rows for each in self._live.replicas.engines)
        """Requests at once that keep the engines full."""
        self._stop = asyncio.Event()
        self._adapting = asyncio.Lock()
        self._closed = False
        started: Future[asyncio.AbstractEventLoop] = Future()
        # A daemon, closed at the exit: a program that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._serve, args=(started,), name="loom-offline", daemon=True)
        self._thread.start()
        self._loop = started.result()
        _OPEN.add(self)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._live.loaded.card.name

    @property
    def failure(self) -> str | None:
        """Why the engine stopped; None while it works."""
        return self._live.replicas.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs (with `Unavailable`), then every thread; the device's memory is free for another.
        Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()  # also where another thread closes it, or Ctrl-C has ended an earlier wait
        _OPEN.discard(self)

    # -- adapters --------------------------------------------------------------------------------------

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load a LoRA adapter, which requests select as `lora_path` or `model`, after SGLang."""
        self._wait(self._live.loaded.adapters.load(lora_name, lora_path, pinned, trusted=True))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload it when the requests that have it have ended."""
        self._wait(self._live.loaded.adapters.unload(lora_name))

    # -- whole answers -----------------------------------------------------------------------------

    def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, lora_request: Adapters = None, **fields: Any
    ) -> list[Output]:
        """Continue one prompt or each of many; the outputs are in their order."""
        return self._wait(self._many(_completions(prompts, sampling, fields), lora_request))

    async def agenerate(
        self, prompts: Prompts, sampling: Sampling = None, *, lora_request: Adapters = None, **fields: Any
    ) -> list[Output]:
        """`generate` on the caller's loop. Cancelling it ends the requests."""
        return await self._hand(self._many(_completions(prompts, sampling, fields), lora_request))

    def chat(
        self,
        messages: Conversations,
        sampling: Sampling = None,
        *,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> list[Output]:
        """Answer one conversation or each of many."""
        return self._wait(self._many(_chats(messages, sampling, fields), lora_request))

    async def achat(
        self,
        messages: Conversations,
        sampling: Sampling = None,
        *,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> list[Output]:
        """`chat` on the caller's loop. Cancelling it ends the requests."""
        return await self._hand(self._many(_chats(messages, sampling, fields), lora_request))

    def embed(self, inputs: Prompts, **fields: Any) -> list[Floats]:
        """A vector for one input or each of many, float32 [width], as `/v1/embeddings` makes it."""
        answers = self._wait(self._one_by_one(_inputs(EmbeddingBody, inputs, fields)))
        return [vector["embedding"] for answer in answers for vector in answer["data"]]

    def classify(self, inputs: Prompts, **fields: Any) -> list[dict[str, Any]]:
        """`label`, `probs` and `num_classes` of each input, as in `/v1/classify`."""
        answers = self._wait(self._one_by_one(_inputs(ClassifyBody, inputs, fields)))
        return [each for answer in answers for each in answer["data"]]

    def submit(self, url: str, body: bytes) -> Future[Mapping[str, object]]:
        """The answer to what would be posted to `url`, a key of `app.api.answers.ANSWERS`. Cancelling
        the future ends the request."""
        return self._call(self._answer(url, body))

    # -- streams -----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling: Sampling = None,
        *,
        messages: Messages | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> Iterator[Delta]:
        """Pieces of one prompt's or conversation's choices as they are made. Closing the iterator ends
        the request."""
        return self._stream(_single(prompt, messages, sampling, fields), lora_request)

    async def astream(
        self,
        prompt: Prompt | None = None,
        sampling: Sampling = None,
        *,
        messages: Messages | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> AsyncIterator[Delta]:
        """`stream` on the caller's loop."""
        body = _single(prompt, messages, sampling, fields)
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta | None] = asyncio.Queue()

        def put(delta: Delta | None) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, delta)
            except RuntimeError:  # the loop is closed: nobody reads any more
                work.cancel()

        work = self._call(self._follow(body, lora_request, put))
        try:
            while (delta := await pieces.get()) is not None:
                yield delta
            await asyncio.wrap_future(work)
        finally:
            work.cancel()

    def _stream(self, body: Body, adapter: LoRARequest | None) -> Iterator[Delta]:
        pieces: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        work = self._call(self._follow(body, adapter, pieces.put))
        try:
            while (delta := pieces.get()) is not None:
                yield delta
            work.result()
        finally:
            work.cancel()

    # -- between threads ---------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            work.close()
            raise Unavailable("This LLM is closed.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._call(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where the caller was interrupted

    def _hand(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return asyncio.wrap_future(self._call(work))

    # -- on the engine's loop ----------------------------------------------------------------------

    def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(started))

    async def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        loop = asyncio.get_running_loop()
        starting = asyncio.ensure_future(self._live.start())
        await asyncio.wait((starting,))
        if (error := starting.exception()) is not None:  # whatever it is, the caller waits for it
            self._live.close()
            started.set_exception(error)
            return
        started.set_result(loop)
        await self._stop.wait()
        self._live.loaded.engine.drain()
        self._live.loaded.engine.abort_all("The LLM is being closed.")
        callers = asyncio.all_tasks() - {asyncio.current_task()}
        if callers:
            await asyncio.wait(callers)
        self._live.close()

    async def _answer(self, url: str, body: bytes) -> Mapping[str, object]:
        return await ANSWERS[url](body, self._live.loaded)

    async def _one_by_one(self, bodies: Sequence[msgspec.Struct]) -> list[dict[str, Any]]:
        return [await answer(body, self._live.loaded) for body in bodies]

    async def _adapt(self, bodies: Sequence[Body], adapters: Adapters) -> None:
        """Select an adapter for each body; those that are not loaded are loaded."""
        each = adapters if isinstance(adapters, Sequence) else [adapters] * len(bodies)
        if len(each) != len(bodies):
            raise TypeError(f"there are {len(each)} adapters for {len(bodies)} prompts")
        for body, adapter in zip(bodies, each, strict=True):
            if adapter is not None:
                async with self._adapting:  # two callers may bring the same one
                    await self._bring(adapter)
                body.lora_path = adapter.lora_name

    async def _bring(self, adapter: LoRARequest) -> None:
        registry = self._live.loaded.adapters
        known = registry.find(adapter.lora_name)
        if known is None:
            await registry.load(adapter.lora_name, adapter.lora_path, trusted=True)
        elif known.path != str(Path(adapter.lora_path).expanduser().resolve()):
            raise field_error("lora_request", f"names '{known.name}', which was loaded from {known.path}")

    async def _many(self, bodies: Sequence[Body], adapters: Adapters) -> list[Output]:
        """Side by side, as many as keep the engine full; more would only wait in its queue."""
        await self._adapt(bodies, adapters)
        window = asyncio.Semaphore(self.window)
        bar = tqdm(total=len(bodies), unit="req") if self._progress else None

        async def one(body: Body) -> Output:
            async with window:
                output = output_of(await answer(body, self._live.loaded))
            if bar is not None:
                bar.update()
            return output

        tasks = [asyncio.ensure_future(one(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if bar is not None:
                bar.close()

    async def _follow(
        self, body: Body, adapter: LoRARequest | None, put: Callable[[Delta | None], None]
    ) -> None:
        try:
            await self._adapt([body], adapter)
            engine, job = await self._job(body)
            check_streamed(job, True)
            counts = [0] * job.n
            error: LoomError | None = None

            def take(index: int, piece: Piece) -> None:
                nonlocal error
                if error is not None:
                    return
                counts[index] += len(piece.tokens)
                last = piece.finish is not None and job.sampling.hidden != "none"
                put(delta_of(index, piece, last_state(run, index, counts[index]) if last else None))
                if piece.finish is not None and (error := failure(piece.finish)) is not None:
                    run.abort()

            async with running(engine, [job], take) as (run,):
                check_states([run], [job], self._live.loaded)
                await run.wait()
            if error is not None:
                raise error
        finally:
            put(None)

    async def _job(self, body: Body) -> tuple[Generator, Job]:
        loaded = self._live.loaded
        loaded = selected(loaded, body.model, body.lora_path)
        if isinstance(body, ChatBody):
            job, watch = await chat_job(body, loaded)
            return watched(loaded.engine, loaded.tokenizer, watch), job
        return loaded.engine, completion_jobs(body, request_id(body, "cmpl"), loaded)[0]


def make_config(model: str, settings: Mapping[str, Any]) -> Config:
    """A config from settings by name. Raises `ConfigError` for a name or value that is wrong."""
    left: dict[str, Any] = {"model": model}
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        ours = RENAMED.get(flag, flag)
        values = VALUES.get(ours, {})
        left[ours[2:].replace("-", "_")] = values.get(value, value) if isinstance(value, str) else value
    if (theirs := left.pop("speculative_config", None)) is not None:
        left |= speculation(theirs)
    made: dict[str, Any] = {}
    for group in ENGINE_GROUPS:
        fields = group.kind.__struct_encode_fields__
        made[group.title] = {field: left.pop(field) for field in fields if field in left}
    made["serve"] = {field: left.pop(field) for field in PARSERS if field in left}
    if left:
        raise ConfigError(f"There is no setting {', '.join(sorted(left))}.")
    try:
        config = msgspec.convert(made, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.") from None
    check_engine(config)
    return config


def _completions(prompts: Prompts, sampling: Sampling, fields: Mapping[str, Any]) -> list[CompletionBody]:
    return [_body(CompletionBody, sampling, fields, prompt=prompt) for prompt in _prompts(prompts)]


def _chats(messages: Conversations, sampling: Sampling, fields: Mapping[str, Any]) -> list[ChatBody]:
    single = len(messages) > 0 and isinstance(messages[0], Mapping)
    listed: Sequence[Any] = [messages] if single else messages
    return [_body(ChatBody, sampling, fields, messages=list(conversation)) for conversation in listed]


def _inputs(kind: type[T], inputs: Prompts, fields: Mapping[str, Any]) -> list[T]:
    """Bodies with as many inputs each as one takes."""
    prompts = _prompts(inputs)
    return [
        converted({**_known(kind, fields), "input": prompts[at : at + MAX_CHOICES]}, kind)
        for at in range(0, len(prompts), MAX_CHOICES)
    ]


def _prompts(prompts: Prompts) -> list[str | list[int]]:
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    listed: Sequence[Any] = [prompts] if single else prompts
    return [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in listed]


def _single(
    prompt: Prompt | None, messages: Messages | None, sampling: Sampling, fields: Mapping[str, Any]
) -> Body:
    if prompt is not None and messages is None:
        bodies: Sequence[Body] = _completions(prompt, sampling, fields)
    elif messages is not None and prompt is None:
        bodies = _chats(messages, sampling, fields)
    else:
        raise TypeError("give either a prompt or messages")
    if len(bodies) != 1:
        raise TypeError(f"a stream answers one prompt or conversation, got {len(bodies)}")
    return bodies[0]


def _body(kind: type[T], sampling: Sampling, fields: Mapping[str, Any], **own: Any) -> T:
    known = _known(kind, {**(sampling or {}), **fields})
    if isinstance(bias := known.get("logit_bias"), Mapping):  # JSON has no keys that are numbers, Python has
        known = {**known, "logit_bias": {str(token): value for token, value in bias.items()}}
    return converted({**known, **own, "return_token_ids": True, "stream": False}, kind)


def _known(kind: type[Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    if strange := sorted(set(fields) - set(kind.__struct_fields__)):
        raise TypeError(f"there is no parameter {', '.join(strange)}")
    return fields
