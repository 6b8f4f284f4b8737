"""The four groups. A field's description is its `--help` text; its name is its flag."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Order = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
Eviction = Literal["lru", "lfu", "fifo", "priority"]


def _about(text: str, **limits: float) -> Meta:
    return Meta(description=text, **limits)  # type: ignore[arg-type]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What to load."""

    model: Annotated[
        str,
        _about(
            "a Hugging Face directory, a .gguf file or a hub id; "
            "empty serves SmolLM2-135M-Instruct, fetched once"
        ),
    ] = ""
    served_model_name: Annotated[str, _about("name clients use; empty takes the model's own")] = ""
    tokenizer: Annotated[str, _about("directory with tokenizer.json, if not the model's")] = ""
    chat_template: Annotated[str, _about("file with a Jinja chat template that replaces the model's")] = ""
    load_format: Annotated[
        Literal["auto", "dummy"], _about("dummy: random weights, only config.json is needed")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _about("auto: float32 on a CPU, the checkpoint's on a GPU"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _about("auto: cuda where there is one")] = "auto"
    context_length: Annotated[int, _about("tokens a request may have; 0: the model's own", ge=0)] = 0
    offline: Annotated[bool, _about("never reach the network for a model")] = False


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The KV pool and the radix tree."""

    page_size: Annotated[int, _about("tokens in a page, a power of two", ge=1, le=256)] = 16
    kv_tokens: Annotated[int, _about("tokens in the KV pool; 0: what memory allows", ge=0)] = 0
    mem_fraction: Annotated[
        float, _about("share of free memory for the KV pool; 0: chosen by device", ge=0, le=0.98)
    ] = 0.0
    radix_cache: Annotated[bool, _about("reuse the KV of equal prefixes")] = True
    eviction: Annotated[Eviction, _about("which cached pages go first")] = "lru"


class ScheduleConfig(Struct, frozen=True, kw_only=True):
    """What goes into a step."""

    step_tokens: Annotated[
        int, _about("tokens in a step: decode rows first, prompt chunks fill up", ge=16)
    ] = 2048
    max_running: Annotated[int, _about("requests that run at once; 0: chosen by device", ge=0)] = 0
    order: Annotated[Order, _about("which waiting request is admitted first")] = "fcfs"
    prefill_first: Annotated[bool, _about("prompts get steps of their own, before any decode")] = False
    overlap_depth: Annotated[
        int, _about("steps planned ahead of the device; 0 waits for every result", ge=0, le=2)
    ] = 1
    conservativeness: Annotated[
        float, _about("scales the room kept for running requests to grow", gt=0, le=10)
    ] = 1.0
    max_queued: Annotated[int, _about("waiting requests before 429", ge=1)] = 4096
    max_queued_tokens: Annotated[int, _about("waiting prompt tokens before 429", ge=1)] = 16_000_000
    waiting_timeout: Annotated[float, _about("seconds a request may wait; 0: for ever", ge=0)] = 0.0
    running_timeout: Annotated[float, _about("seconds a request may run; 0: for ever", ge=0)] = 0.0
    preemption_gap: Annotated[
        int,
        _about("with order=priority: how far above a running request a waiting one takes its place", ge=1),
    ] = 10


class ServeConfig(Struct, frozen=True, kw_only=True):
    """The HTTP face."""

    host: Annotated[str, _about("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _about("port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    api_key: Annotated[str, _about("clients must send it as a bearer token; empty: open")] = ""
    max_body: Annotated[int, _about("bytes in a request body before 413", ge=1024)] = 32 * 2**20
    drain_timeout: Annotated[
        float, _about("seconds that running requests get to finish after SIGTERM", ge=0)
    ] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about("what is logged")] = "info"


class Config(Struct, frozen=True, kw_only=True):
    """The whole program's settings. Only the composition root sees it; others get their group."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    serve: ServeConfig = ServeConfig()
