"""The operator's settings in groups. A field's name is its flag, the text beside its type its `--help`, and
the word in capitals after that the unit or kind of its value."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from core.types import LogprobsMode

SchedulePolicy = Literal["fair", "fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
Eviction = Literal["lru", "lfu", "fifo", "priority"]
Algorithm = Literal["auto", "none", "ngram", "eagle", "eagle3", "dflash", "mtp", "draft-model"]
LogFormat = Literal["text", "json"]
LoadBalance = Literal["cached-prefix", "shortest-queue", "round-robin", "fewest-tokens"]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What to load."""

    model: Annotated[
        str,
        "a Hugging Face directory, a .gguf file or a hub id; "
        "empty serves SmolLM2-135M-Instruct, fetched once",
        "MODEL",
    ] = ""
    revision: Annotated[str, "branch, tag or commit of a hub id; empty: its main branch", "REVISION"] = ""
    hf_overrides: Annotated[
        str, "fields that replace those of config.json, as a JSON object; nested objects whole", "JSON"
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...],
        "names that clients may use; answers carry the first; none: the model's own",
        "NAME",
    ] = ()
    tokenizer: Annotated[str, "directory with tokenizer.json, if not the model's", "DIR"] = ""
    chat_template: Annotated[str, "file with a Jinja chat template that replaces the model's", "FILE"] = ""
    generation_config: Annotated[
        Literal["auto", "none"],
        "auto: the model's generation_config.json gives the defaults of temperature, top_k, "
        "top_p, min_p and repetition_penalty; none: the API's own defaults",
    ] = "auto"
    logprobs_mode: Annotated[
        LogprobsMode,
        "which log-probabilities are returned unless a request chooses; raw_logprobs: of the "
        "model's distribution, but masked_logprobs in /generate; masked_logprobs: of that among the "
        "tokens that a grammar allows; processed_logprobs: of the distribution that is sampled from",
    ] = "raw_logprobs"
    load_format: Annotated[Literal["auto", "dummy"], "dummy: random weights; only config.json is needed"] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto: the checkpoint's on a GPU, but bfloat16 for text generation from float32; float32 on a CPU, "
        "but bfloat16 for text generation from bfloat16 if the CPU multiplies it (AMX, AVX-512)",
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "fp8", "fp8-blocks", "int8"],
        "quantization of linear layers; auto: on a GPU that of the checkpoint (FP8; int8 of W8A8; 4 bits of "
        "AWQ, GPTQ or W4A16), on a CPU 8 or 4 bits of any quantised one; fp8, fp8-blocks: on a GPU, per "
        "channel unless it has scales, per 128 x 128; int8: per channel, and activations per token; none: "
        "dequantise",
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        "auto: a supported GPU if there is one, else the CPU",
    ] = "auto"
    threads: Annotated[
        int,
        "CPU threads of products; 0: as many as there are CPUs for this process, by its affinity and its "
        "cgroup's quota",
        "THREADS",
        Meta(ge=0, le=1024),
    ] = 0
    attention_backend: Annotated[
        str,
        "attention backend: NAME, or prefill=NAME,decode=NAME; empty: the fastest one measured "
        "that is compiled already; one that is named is compiled first, and rejected with the reason if it "
        "does not support the model",
        "NAME",
    ] = ""
    context_length: Annotated[
        int, "maximum tokens of prompt and output; 0: the model's own", "TOKENS", Meta(ge=0)
    ] = 0
    logit_processor: Annotated[
        str,
        "logit processors that requests may name: NAME=package.module:callable, separated by commas",
        "NAME=CODE",
    ] = ""
    offline: Annotated[bool, "never download a model"] = False


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The KV pool and the radix tree."""

    page_size: Annotated[int, "tokens in a page, a power of two", "TOKENS", Meta(ge=1, le=256)] = 16
    kv_tokens: Annotated[int, "tokens in the KV pool; 0: what fits in memory", "TOKENS", Meta(ge=0)] = 0
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        "data type of the KV pool; auto: the model's; fp8: e4m3 on a GPU, half the size",
    ] = "auto"
    mem_fraction: Annotated[
        float, "share of free memory for the KV pool; 0: chosen by device", "SHARE", Meta(ge=0, le=0.98)
    ] = 0.0
    radix_cache: Annotated[bool, "prefix caching: reuse the KV of equal prefixes"] = True
    eviction: Annotated[Eviction, "policy that chooses the cached pages to evict"] = "lru"
    kv_events_config: Annotated[
        str,
        "publish what the prefix cache stores and removes, for routers; settings as vLLM's, "
        '{"enable_kv_cache_events": true}; needs the extra kv-events; empty: publish nothing',
        "JSON",
    ] = ""
    pin_share: Annotated[
        float,
        "maximum share of the pool for prefixes that clients pin; one client gets at most half of it",
        "SHARE",
        Meta(ge=0, le=1),
    ] = 0.5


class ScheduleConfig(Struct, frozen=True, kw_only=True):
    """What goes into a step."""

    step_tokens: Annotated[
        int,
        "maximum tokens of a step, decodes first, then prompt chunks; 0: chosen by device",
        "TOKENS",
        Meta(ge=0),
    ] = 0
    itl_target: Annotated[
        float,
        "milliseconds between two tokens of a stream while prompts are computed: chunks are sized so that a "
        "step with decode rows takes no longer; 0: no limit",
        "MS",
        Meta(ge=0),
    ] = 0.0
    prefill_weight: Annotated[
        float,
        "prompts take at most this share of the device's time beside decode rows: "
        "w * prompts / (w * prompts + rows), where w is this weight; 0: they take what they can",
        "WEIGHT",
        Meta(ge=0),
    ] = 40.0
    max_running: Annotated[int, "maximum running requests; 0: chosen by device", "REQUESTS", Meta(ge=0)] = 0
    order: Annotated[
        SchedulePolicy,
        "which waiting request runs next; fair: one of the API key that was served the fewest tokens, so "
        "that a key with many or long prompts delays itself; with one key, or none, it is fcfs",
    ] = "fair"
    prefill_first: Annotated[bool, "run prompts in steps of their own, before decodes"] = False
    overlap_depth: Annotated[
        int,
        "steps planned ahead of the device; 0: wait for every result; 1: two while a GPU's steps take less "
        "than 1.5 ms",
        "STEPS",
        Meta(ge=0, le=2),
    ] = 1
    cuda_graphs: Annotated[bool, "capture CUDA graphs of the steps at startup; off: eager mode"] = True
    conservativeness: Annotated[
        float, "scales the KV space reserved for running requests to grow", "FACTOR", Meta(gt=0, le=10)
    ] = 1.0
    max_queued: Annotated[int, "waiting requests before 429", "REQUESTS", Meta(ge=1)] = 4096
    max_queued_tokens: Annotated[int, "waiting prompt tokens before 429", "TOKENS", Meta(ge=1)] = 16_000_000
    waiting_timeout: Annotated[float, "seconds a request may wait; 0: no limit", "SECONDS", Meta(ge=0)] = 0.0
    running_timeout: Annotated[float, "seconds a request may run; 0: no limit", "SECONDS", Meta(ge=0)] = 0.0
    preemption_gap: Annotated[
        int,
        "with order=priority: minimum difference in priority for preemption",
        "PRIORITY",
        Meta(ge=1),
    ] = 10


MAX_DRAFTS: Final = 15
"""Drafts of a row in one step: with its last token its query has 16 tokens."""
MAX_NODES: Final = 31
"""The same where they are a tree: each has a word of 32 bits for its ancestors."""


class SpeculativeConfig(Struct, frozen=True, kw_only=True, rename="speculative_{}".format):
    """Speculative decoding. `core/speculation.py` says which of these fit together."""

    algorithm: Annotated[
        Algorithm,
        "how tokens are drafted; ngram: looked up in the request's own text and in former answers; "
        "mtp: by the model's own layer for multi-token prediction (SGLang's NEXTN); draft-model: by a small "
        "model with the same vocabulary; the others: by a head of that kind; auto: that of the head, by its "
        "config.json, or none without one",
    ] = "auto"
    draft_model_path: Annotated[
        str, "the head or small model that drafts: a Hugging Face directory or a hub id", "MODEL"
    ] = ""
    num_draft_tokens: Annotated[
        int,
        "maximum tokens of a request that a step verifies: its last one and its drafts (vLLM's "
        f"num_speculative_tokens plus 1), 2 to {MAX_DRAFTS + 1}, of a tree to {MAX_NODES + 1}; "
        "0: chosen by algorithm",
        "TOKENS",
        Meta(ge=0, le=MAX_NODES + 1),
    ] = 0
    num_steps: Annotated[
        int,
        "times the draft model runs to draft one token after the other; "
        "0: --speculative-num-draft-tokens less 1",
        "STEPS",
        Meta(ge=0, le=MAX_DRAFTS),
    ] = 0
    eagle_topk: Annotated[
        int,
        "drafts that branch off each draft, and drafts of each depth that do: above 1 a tree, of which "
        "--speculative-num-draft-tokens less 1 drafts are verified; 1: a chain",
        "DRAFTS",
        Meta(ge=1, le=MAX_NODES),
    ] = 1
    prompt_lookup_min: Annotated[
        int, "ngram: fewest tokens at the end of a text that are looked up", "TOKENS", Meta(ge=1, le=32)
    ] = 2
    prompt_lookup_max: Annotated[
        int, "ngram: most tokens at the end of a text that are looked up", "TOKENS", Meta(ge=1, le=32)
    ] = 8
    ngram_capacity: Annotated[
        int,
        "ngram: tokens of answers that are kept and looked up too, each for requests with the same API key, "
        "cache_salt and extra_key; 0: only the request's own text is",
        "TOKENS",
        Meta(ge=0, le=2**30),
    ] = 2**22

    @property
    def max_drafts(self) -> int:
        """Drafts of a row in one step that there is room for; 0: chosen by algorithm. A tree needs room for
        those that branch, too."""
        if self.eagle_topk > 1:
            return max(self.num_draft_tokens - 1, (self.num_steps - 1) * self.eagle_topk)
        return self.num_steps or max(self.num_draft_tokens - 1, 0)


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """Several devices."""

    tp: Annotated[
        int, "tensor parallelism: GPUs (or threads of a CPU) that divide each replica", "GPUS", Meta(ge=1)
    ] = 1
    nnodes: Annotated[
        int,
        "processes, on as many hosts or on one, that divide the ranks of --tp among them",
        "NODES",
        Meta(ge=1),
    ] = 1
    node_rank: Annotated[
        int,
        "number of this process among --nnodes: 0 serves, the others run ranks for it",
        "NODE",
        Meta(ge=0),
    ] = 0
    dist_init_addr: Annotated[
        str,
        "HOST:PORT of node 0, where the others find it; under torchrun all three come from it",
        "HOST:PORT",
    ] = ""
    dp: Annotated[
        int,
        "replicas of the model behind one port, each on GPUs of its own, with its own KV pool and prefixes",
        "REPLICAS",
        Meta(ge=1, le=64),
    ] = 1
    load_balance_method: Annotated[
        LoadBalance,
        "which replica takes a request that does not name one; cached-prefix: that with the longest cached "
        "prefix, unless another has less to do by more than this saves, or a free slot where it has none; "
        "shortest-queue: the fewest requests; "
        "fewest-tokens: the fewest tokens to do",
    ] = "cached-prefix"
    base_gpu_id: Annotated[int, "number of the first GPU", "GPU", Meta(ge=0)] = 0
    gpu_id_step: Annotated[
        int,
        "distance between the numbers of two GPUs; 0: all replicas on one GPU, which need --mem-fraction",
        "GPUS",
        Meta(ge=0),
    ] = 1

    @property
    def local_ranks(self) -> int:
        """Ranks of each replica that this process has."""
        return self.tp // self.nnodes

    def gpu(self, replica: int, rank: int = 0) -> int:
        """Number of the GPU of one of the ranks of a replica, of those in this process."""
        return self.base_gpu_id + (replica * self.local_ranks + rank) * self.gpu_id_step


class LoraConfig(Struct, frozen=True, kw_only=True):
    """LoRA adapters. `core.adapters` reads what these name."""

    enable_lora: Annotated[bool, "serve LoRA adapters, also those that are loaded while serving"] = False
    lora: Annotated[
        tuple[str, ...],
        'adapters to load at startup: NAME=PATH, PATH, or {"name": NAME, "path": PATH, "pinned": true}, '
        "where a pinned one always stays in memory; implies --enable-lora",
        "ADAPTER",
    ] = ()
    lora_root: Annotated[
        tuple[str, ...],
        "directories whose adapters may be loaded while serving; none: only those of --lora",
        "DIR",
    ] = ()
    max_loras_per_batch: Annotated[
        int, "maximum adapters of running requests, which are on the device", "ADAPTERS", Meta(ge=1, le=1024)
    ] = 8
    max_loaded_loras: Annotated[
        int,
        "maximum adapters in host memory; further ones are read from the disk again when they are needed; "
        "0: as many as --max-loras-per-batch, or all of --lora",
        "ADAPTERS",
        Meta(ge=0),
    ] = 0
    max_lora_rank: Annotated[
        int,
        "maximum rank of an adapter; 0: that of the adapters of --lora, or 16",
        "RANK",
        Meta(ge=0, le=1024),
    ] = 0
    lora_target_modules: Annotated[
        tuple[str, ...],
        "matrices that adapters may change, by their names in the model, or all; none: those of the adapters "
        "of --lora, or all of the layers",
        "MODULE",
    ] = ()


class ServeConfig(Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, "address to listen on", "ADDRESS"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0 takes a free one", "PORT", Meta(ge=0, le=65535)] = 8000
    uds: Annotated[str, "path of a Unix domain socket to listen on instead of --host and --port", "PATH"] = ""
    ssl_certfile: Annotated[
        str,
        "PEM file of a certificate and what it is signed by: serve HTTPS with it; empty: HTTP",
        "FILE",
    ] = ""
    ssl_keyfile: Annotated[
        str, "PEM file with the key of --ssl-certfile; empty: it is in that file too", "FILE"
    ] = ""
    api_key: Annotated[
        tuple[str, ...],
        "API keys; clients must send one as a bearer token; stored data and cached prefixes "
        "are separate for each key; none: no authentication",
        "KEY",
    ] = ()
    api_keys_file: Annotated[
        str,
        "TOML file with a table for each API key, and with its limits, models, priority and whether it may "
        "control the server; read again on SIGHUP",
        "FILE",
    ] = ""
    control_routes: Annotated[
        bool, "serve the routes that pause, put to sleep, profile and reload the server"
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
            "functiongemma",
            "gemma4",
            "granite",
            "granite-20b-fc",
            "phi4_mini_json",
            "olmo3",
            "deepseek_v31",
            "deepseek_v32",
            "minimax_m2",
            "harmony",
            "seed_oss",
            "deepseek_v4",
        ],
        "format of tool calls; auto: detected from the chat template",
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral", "granite", "gemma4", "harmony", "seed_oss"],
        "format of reasoning; auto: detected from the chat template",
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        "accept a chat_template in requests: sandboxed, limited to a second and half a "
        "gigabyte each; a malicious one can still delay everybody by a quarter of a second",
    ] = False
    max_body: Annotated[int, "maximum bytes of a request body", "BYTES", Meta(ge=1024)] = 8 * 2**20
    data_dir: Annotated[
        str, "directory of files, batches and responses; empty: data in the cache directory", "DIR"
    ] = ""
    response_store: Annotated[
        int, "bytes of stored /v1/responses, evicted by LRU; 0: store none", "BYTES", Meta(ge=0)
    ] = 2**30
    drain_timeout: Annotated[
        float, "seconds that running requests get to finish after SIGTERM", "SECONDS", Meta(ge=0)
    ] = 30.0
    ttft_slo: Annotated[
        float,
        "milliseconds that a request may wait for its first token, unless its x-llm-d-slo-ttft-ms says "
        "otherwise: one that would wait longer is refused with 429 at once; 0: no limit",
        "MS",
        Meta(ge=0),
    ] = 0.0
    force_include_usage: Annotated[bool, "streams always end with usage, requested or not"] = False
    return_tokens_as_token_ids: Annotated[
        bool, "log-probabilities name tokens as token_id:N unless a request chooses"
    ] = False
    root_path: Annotated[
        str,
        "path prefix of this server behind a reverse proxy; routes are served with and without it",
        "PREFIX",
    ] = ""
    watchdog_timeout: Annotated[
        float,
        "seconds a step may take on the device before the server dumps every thread's stack "
        "and exits with code 3; 0: no limit",
        "SECONDS",
        Meta(ge=0),
    ] = 300.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "what is logged"] = "info"
    log_format: Annotated[LogFormat, "log lines as text, or a JSON object each"] = "text"
    access_log: Annotated[
        bool,
        "log a line of level info for each request: client, path, status, tokens and times, never its text",
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        "OpenTelemetry collector (OTLP over HTTP, such as http://localhost:4318) that gets a span for each "
        "request; needs the extra 'otel'; empty: no spans",
        "URL",
    ] = ""
    dump_requests: Annotated[
        str,
        "directory of files that get each request, with its text but without keys, and its outcome, for "
        "python -m bench.replay: 8 files of 256 MiB, then the oldest is deleted; empty: none",
        "DIR",
    ] = ""

    @property
    def traces_url(self) -> str:
        """Where spans are posted: `otlp_traces_endpoint`, with OTLP's own path if it has none."""
        scheme, _, rest = self.otlp_traces_endpoint.partition("://")
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}/{path or 'v1/traces'}"

    @property
    def keyed(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_key or self.api_keys_file)


LEAST_STEP = 16
"""Minimum of `ScheduleConfig.step_tokens`, where it is not 0."""

COMMON = (
    "model",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "device",
    "context_length",
    "mem_fraction",
    "tp",
)
"""Fields that `--help` names first, after `--config`: most starts need no others."""

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
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    serve: ServeConfig = ServeConfig()
