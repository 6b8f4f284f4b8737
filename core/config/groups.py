"""The four groups. A field's description is its `--help` text; its name is its flag."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from core.types import LogprobsMode

SchedulePolicy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
Eviction = Literal["lru", "lfu", "fifo", "priority"]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What to load."""

    model: Annotated[
        str,
        Meta(
            description="a Hugging Face directory, a .gguf file or a hub id; "
            "empty serves SmolLM2-135M-Instruct, fetched once"
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="names that clients may use; answers carry the first; none: the model's own"),
    ] = ()
    tokenizer: Annotated[str, Meta(description="directory with tokenizer.json, if not the model's")] = ""
    chat_template: Annotated[
        str, Meta(description="file with a Jinja chat template that replaces the model's")
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="auto: the model's generation_config.json gives the defaults of temperature, top_k, "
            "top_p, min_p and repetition_penalty; none: the API's own defaults"
        ),
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="which log-probabilities are returned unless a request chooses; raw_logprobs: of the "
            "model's distribution, but masked_logprobs in /generate; masked_logprobs: of that among the "
            "tokens that a grammar allows; processed_logprobs: of the distribution that is sampled from"
        ),
    ] = "raw_logprobs"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy: random weights; only config.json is needed")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto: float32 on a CPU, the checkpoint's on a GPU"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "fp8", "fp8-blocks"],
        Meta(
            description="quantization of linear layers on a GPU; auto: FP8 if the checkpoint is, with its "
            "scales; fp8: per channel unless it has scales; fp8-blocks: per 128 x 128; none: dequantise"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto: a supported GPU if there is one, else the CPU"),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(
            description="attention backend on a GPU: NAME, or prefill=NAME,decode=NAME; empty: the fastest "
            "one measured; one that does not support the model is rejected with the reason"
        ),
    ] = ""
    context_length: Annotated[
        int, Meta(description="maximum tokens of prompt and output; 0: the model's own", ge=0)
    ] = 0
    logit_processor: Annotated[
        str,
        Meta(
            description="logit processors that requests may name: NAME=package.module:callable, "
            "separated by commas"
        ),
    ] = ""
    offline: Annotated[bool, Meta(description="never download a model")] = False


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The KV pool and the radix tree."""

    page_size: Annotated[int, Meta(description="tokens in a page, a power of two", ge=1, le=256)] = 16
    kv_tokens: Annotated[int, Meta(description="tokens in the KV pool; 0: what fits in memory", ge=0)] = 0
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(description="data type of the KV pool; auto: the model's; fp8: e4m3 on a GPU, half the size"),
    ] = "auto"
    mem_fraction: Annotated[
        float, Meta(description="share of free memory for the KV pool; 0: chosen by device", ge=0, le=0.98)
    ] = 0.0
    radix_cache: Annotated[bool, Meta(description="prefix caching: reuse the KV of equal prefixes")] = True
    eviction: Annotated[Eviction, Meta(description="policy that chooses the cached pages to evict")] = "lru"
    pin_share: Annotated[
        float,
        Meta(
            description="maximum share of the pool for prefixes that clients pin; one client gets at most "
            "half of it",
            ge=0,
            le=1,
        ),
    ] = 0.5


class ScheduleConfig(Struct, frozen=True, kw_only=True):
    """What goes into a step."""

    step_tokens: Annotated[
        int,
        Meta(
            description="maximum tokens of a step, decodes first, then prompt chunks; 0: chosen by device",
            ge=0,
        ),
    ] = 0
    mixed_tokens: Annotated[
        int,
        Meta(
            description="maximum tokens of a step that mixes decode rows and prompt chunks, unless more are "
            "needed to keep up with arriving prompts; 0: as for any step",
            ge=0,
        ),
    ] = 0
    max_running: Annotated[int, Meta(description="maximum running requests; 0: chosen by device", ge=0)] = 0
    order: Annotated[SchedulePolicy, Meta(description="which waiting request runs next")] = "fcfs"
    prefill_first: Annotated[bool, Meta(description="run prompts in steps of their own, before decodes")] = (
        False
    )
    overlap_depth: Annotated[
        int, Meta(description="steps planned ahead of the device; 0: wait for every result", ge=0, le=2)
    ] = 1
    cuda_graphs: Annotated[
        bool, Meta(description="capture CUDA graphs of the steps at startup; off: eager mode")
    ] = True
    conservativeness: Annotated[
        float, Meta(description="scales the KV space reserved for running requests to grow", gt=0, le=10)
    ] = 1.0
    max_queued: Annotated[int, Meta(description="waiting requests before 429", ge=1)] = 4096
    max_queued_tokens: Annotated[int, Meta(description="waiting prompt tokens before 429", ge=1)] = 16_000_000
    waiting_timeout: Annotated[float, Meta(description="seconds a request may wait; 0: no limit", ge=0)] = 0.0
    running_timeout: Annotated[float, Meta(description="seconds a request may run; 0: no limit", ge=0)] = 0.0
    preemption_gap: Annotated[
        int,
        Meta(
            description="with order=priority: minimum difference in priority for preemption",
            ge=1,
        ),
    ] = 10


class ServeConfig(Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="API keys; clients must send one as a bearer token; stored data and cached prefixes "
            "are separate for each key; none: no authentication"
        ),
    ] = ()
    control_routes: Annotated[
        bool, Meta(description="serve the routes that pause, put to sleep, profile and reload the server")
    ] = False
    tool_parser: Annotated[
        Literal[
            "auto",
            "none",
            "hermes",
            "llama3",
            "mistral",
            "deepseek_v3",
            "pythonic",
            "qwen3_coder",
            "glm",
            "kimi_k2",
        ],
        Meta(description="format of tool calls; auto: detected from the chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral"],
        Meta(description="format of reasoning; auto: detected from the chat template"),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="accept a chat_template in requests: sandboxed, limited to a second and half a "
            "gigabyte each; a malicious one can still delay everybody by a quarter of a second"
        ),
    ] = False
    max_body: Annotated[int, Meta(description="maximum bytes of a request body", ge=1024)] = 8 * 2**20
    data_dir: Annotated[
        str, Meta(description="directory of files, batches and responses; empty: data in the cache directory")
    ] = ""
    response_store: Annotated[
        int, Meta(description="bytes of stored /v1/responses, evicted by LRU; 0: store none", ge=0)
    ] = 2**30
    drain_timeout: Annotated[
        float, Meta(description="seconds that running requests get to finish after SIGTERM", ge=0)
    ] = 30.0
    force_include_usage: Annotated[
        bool, Meta(description="streams always end with usage, requested or not")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="log-probabilities name tokens as token_id:N unless a request chooses")
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="path prefix of this server behind a reverse proxy; routes are served with and "
            "without it"
        ),
    ] = ""
    watchdog_timeout: Annotated[
        float,
        Meta(
            description="seconds a step may take on the device before the server dumps every thread's stack "
            "and exits with code 3; 0: no limit",
            ge=0,
        ),
    ] = 300.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = (
        "info"
    )


LEAST_STEP = 16
"""Minimum of `ScheduleConfig.step_tokens`, where it is not 0."""

PARSERS = (
    "tool_parser",
    "reasoning_parser",
    "trust_request_chat_template",
    "return_tokens_as_token_ids",
)
"""Fields of `ServeConfig` that apply without a server too."""


class Config(Struct, frozen=True, kw_only=True):
    """The whole program's settings. Only the composition root sees it; others get their group."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    serve: ServeConfig = ServeConfig()
