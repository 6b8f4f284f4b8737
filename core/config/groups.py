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
        Meta(description="names clients use, the first of which answers carry; none takes the model's own"),
    ] = ()
    tokenizer: Annotated[str, Meta(description="directory with tokenizer.json, if not the model's")] = ""
    chat_template: Annotated[
        str, Meta(description="file with a Jinja chat template that replaces the model's")
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(
            description="auto: temperature, top_k, top_p, min_p and repetition_penalty of the model's "
            "generation_config.json are what requests get that name none; none: the API's own defaults"
        ),
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="distribution whose log-probabilities are reported unless a request chooses; "
            "raw_logprobs: the model's, but masked_logprobs in /generate; masked_logprobs: the model's among "
            "the tokens that a grammar allows; processed_logprobs: what the token was chosen from"
        ),
    ] = "raw_logprobs"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="dummy: random weights, only config.json is needed")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto: float32 on a CPU, the checkpoint's on a GPU"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "fp8", "fp8-blocks"],
        Meta(
            description="of the layers' matrices on a GPU; auto: FP8 where the checkpoint has it, scaled as "
            "there; fp8: whatever it has, by channel if it has no scales; fp8-blocks: by 128 x 128; none: "
            "dequantised"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto: a GPU where there is one that is supported, else the CPU"),
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(
            description="attention backend on a GPU: NAME, or prefill=NAME,decode=NAME; empty: the fastest "
            "one measured; one that does not support the model is refused with the reason"
        ),
    ] = ""
    context_length: Annotated[
        int, Meta(description="tokens a request may have; 0: the model's own", ge=0)
    ] = 0
    logit_processor: Annotated[
        str,
        Meta(
            description="functions on logits that requests may name: NAME=package.module:callable, "
            "separated by commas"
        ),
    ] = ""
    offline: Annotated[bool, Meta(description="never reach the network for a model")] = False


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The KV pool and the radix tree."""

    page_size: Annotated[int, Meta(description="tokens in a page, a power of two", ge=1, le=256)] = 16
    kv_tokens: Annotated[int, Meta(description="tokens in the KV pool; 0: what memory allows", ge=0)] = 0
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="of keys and values in the pool; auto: the model's; fp8: e4m3 on a GPU, half as big"
        ),
    ] = "auto"
    mem_fraction: Annotated[
        float, Meta(description="share of free memory for the KV pool; 0: chosen by device", ge=0, le=0.98)
    ] = 0.0
    radix_cache: Annotated[bool, Meta(description="reuse the KV of equal prefixes")] = True
    eviction: Annotated[Eviction, Meta(description="eviction policy: which cached pages go first")] = "lru"
    pin_share: Annotated[
        float,
        Meta(
            description="share of the pool that prefixes which clients want kept may take; "
            "one client may have half of it",
            ge=0,
            le=1,
        ),
    ] = 0.5


class ScheduleConfig(Struct, frozen=True, kw_only=True):
    """What goes into a step."""

    step_tokens: Annotated[
        int,
        Meta(
            description="tokens in a step: decode rows first, prompt chunks fill up; 0: chosen by device",
            ge=0,
        ),
    ] = 0
    mixed_tokens: Annotated[
        int,
        Meta(
            description="tokens of a step that has decode rows and prompt chunks, unless more are needed to "
            "keep up with the prompts that come; 0: as many as of any step",
            ge=0,
        ),
    ] = 0
    max_running: Annotated[int, Meta(description="requests that run at once; 0: chosen by device", ge=0)] = 0
    order: Annotated[SchedulePolicy, Meta(description="which waiting request is admitted first")] = "fcfs"
    prefill_first: Annotated[bool, Meta(description="prompts get steps of their own, before any decode")] = (
        False
    )
    overlap_depth: Annotated[
        int, Meta(description="steps planned ahead of the device; 0 waits for every result", ge=0, le=2)
    ] = 1
    cuda_graphs: Annotated[
        bool, Meta(description="capture the steps of a GPU before serving; off: launch kernel by kernel")
    ] = True
    conservativeness: Annotated[
        float, Meta(description="scales the room kept for running requests to grow", gt=0, le=10)
    ] = 1.0
    max_queued: Annotated[int, Meta(description="waiting requests before 429", ge=1)] = 4096
    max_queued_tokens: Annotated[int, Meta(description="waiting prompt tokens before 429", ge=1)] = 16_000_000
    waiting_timeout: Annotated[float, Meta(description="seconds a request may wait; 0: for ever", ge=0)] = 0.0
    running_timeout: Annotated[float, Meta(description="seconds a request may run; 0: for ever", ge=0)] = 0.0
    preemption_gap: Annotated[
        int,
        Meta(
            description="with order=priority: by how much a request outranks those that it preempts",
            ge=1,
        ),
    ] = 10


class ServeConfig(Struct, frozen=True, kw_only=True):
    """The HTTP face."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="keys, of which clients must send one as a bearer token; what is stored or cached "
            "for one is not there for another; none: open to all"
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
        Meta(description="how the model writes tool calls; auto: what its chat template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral"],
        Meta(description="how the model marks its thinking; auto: what its chat template shows"),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        Meta(
            description="requests may bring a chat_template of their own: sandboxed, a second and half a "
            "gigabyte each; one that is made to harm can still hold everybody up for a quarter of a second"
        ),
    ] = False
    max_body: Annotated[int, Meta(description="bytes in a request body before 413", ge=1024)] = 8 * 2**20
    data_dir: Annotated[
        str, Meta(description="directory of files, batches and responses; empty: data in the cache directory")
    ] = ""
    response_store: Annotated[
        int, Meta(description="bytes kept of /v1/responses, the least used go first; 0: none", ge=0)
    ] = 2**30
    drain_timeout: Annotated[
        float, Meta(description="seconds that running requests get to finish after SIGTERM", ge=0)
    ] = 30.0
    force_include_usage: Annotated[
        bool, Meta(description="streams end with their usage whether a request asks for it or not")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="log-probabilities name tokens as token_id:N where a request does not say")
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="prefix under which a reverse proxy shows this server; routes answer with and "
            "without it"
        ),
    ] = ""
    watchdog_timeout: Annotated[
        float,
        Meta(
            description="seconds that a step may be on the device before the server gives it up, dumps every "
            "thread's stack and ends with exit code 3; 0: for ever",
            ge=0,
        ),
    ] = 300.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="what is logged")] = (
        "info"
    )


LEAST_STEP = 16
"""Of `ScheduleConfig.step_tokens`, where it is not 0."""

PARSERS = (
    "tool_parser",
    "reasoning_parser",
    "trust_request_chat_template",
    "return_tokens_as_token_ids",
)
"""Of `ServeConfig`, what matters without a server too."""


class Config(Struct, frozen=True, kw_only=True):
    """The whole program's settings. Only the composition root sees it; others get their group."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    serve: ServeConfig = ServeConfig()
