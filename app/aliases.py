"""Command lines written for SGLang and vLLM, in our flags: start scripts run unchanged.

A flag is renamed when it means the same, ignored with a notice when leaving it out changes no answer, and
otherwise left alone, so that the parser refuses it: nobody should believe in a setting that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from core.errors import ConfigError

RENAMED: Mapping[str, str] = {
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--mem-fraction-static": "--mem-fraction",
    "--max-total-tokens": "--kv-tokens",
    "--max-running-requests": "--max-running",
    "--max-queued-requests": "--max-queued",
    "--chunked-prefill-size": "--step-tokens",
    "--schedule-policy": "--order",
    "--schedule-conservativeness": "--conservativeness",
    "--priority-scheduling-preemption-threshold": "--preemption-gap",
    "--radix-eviction-policy": "--eviction",
    "--kv-cache-dtype": "--kv-dtype",
    "--tool-call-parser": "--tool-parser",
    "--fastapi-root-path": "--root-path",
    # vLLM
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--step-tokens",
    "--gpu-memory-utilization": "--mem-fraction",
    "--block-size": "--page-size",
    "--scheduling-policy": "--order",
    "--uvicorn-log-level": "--log-level",
}
"""Flags with a value."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "--disable-radix-cache": ("--no-radix-cache",),
    "--enable-force-include-usage": ("--force-include-usage",),
    "--disable-overlap-schedule": ("--overlap-depth", "0"),
    "--enable-priority-scheduling": ("--order", "priority"),
    "--disable-cuda-graph": ("--no-cuda-graphs",),
    "--enforce-eager": ("--no-cuda-graphs",),
    "--async-scheduling": ("--overlap-depth", "1"),
    "--no-async-scheduling": ("--overlap-depth", "0"),
    "--enable-prefix-caching": ("--radix-cache",),
    "--no-enable-prefix-caching": ("--no-radix-cache",),
}
"""Flags without one."""

_HALF = {"half": "float16", "float": "float32"}
_TOOLS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3_json": "llama3",
    "deepseekv3": "deepseek_v3",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
}
_REASONING = dict.fromkeys(("deepseek-r1", "deepseek_r1", "qwen3", "qwen3-thinking", "glm45"), "think")
VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": _HALF,
    "--generation-config": {"vllm": "none"},
    "--kv-dtype": {"fp8_e4m3": "fp8"},
    "--tool-parser": _TOOLS,
    "--reasoning-parser": _REASONING,
}
"""By our flag: their words for what we have. What is not here stays, and is refused if we lack it."""

_BACKEND = "each constraint runs on the backend that keeps all of it"
IGNORED: Mapping[str, str] = {
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enable-auto-tool-choice": "tools are always offered to a model that can call them",
    "--enable-chunked-prefill": "long prompts are always run in chunks",
    "--no-enable-chunked-prefill": "long prompts are always run in chunks",
    "--enable-metrics": "/metrics is always there",
    "--enable-cache-report": "cached tokens are always reported",
    "--is-embedding": "what a checkpoint was made for is read from its files; one that generates embeds too",
    "--enable-prompt-tokens-details": "cached tokens are always reported",
    "--enable-custom-logit-processor": "requests may name those of --logit-processor",
    "--enable-return-hidden-states": "hidden states are there for every request that asks",
    "--enable-return-routed-experts": "experts are there for every request that asks",
    "--enable-prompt-embeds": "prompts of embeddings are always taken: nothing of them is unpickled",
    "--skip-server-warmup": "the server is ready only once it is warm",
    "--disable-log-requests": "requests' texts are never logged",
    "--no-enable-log-requests": "requests' texts are never logged",
}
"""Flags without a value that change no answer, and why."""

IGNORED_VALUES: Mapping[str, str] = {
    "--max-prefill-tokens": "--step-tokens bounds a step",
    "--runner": "what a checkpoint was made for is read from its files",
    "--task": "what a checkpoint was made for is read from its files",
    "--structured-outputs-config.backend": _BACKEND,
    "--guided-decoding-backend": _BACKEND,
    "--grammar-backend": _BACKEND,
    "--cuda-graph-max-bs-decode": "graphs are captured for every size up to --max-running",
    "--cuda-graph-backend-prefill": "there is one way to capture a step; it changes speed only",
    "--random-seed": "a request without a seed draws its own",
    "--seed": "a request without a seed draws its own",
}
"""The same for flags with one."""

ONLY: Mapping[str, str] = {
    "--tp": "1",
    "--tp-size": "1",
    "--tensor-parallel-size": "1",
    "--pp-size": "1",
    "--pipeline-parallel-size": "1",
    "--dp-size": "1",
    "--data-parallel-size": "1",
}
"""Flags of which one value says what is the case anyway."""

_VALUED = {*RENAMED, *VALUES, *IGNORED_VALUES, *ONLY}

_UNBOUNDED = {
    "--chunked-prefill-size": "long prompts are always run in chunks",
    "--max-model-len": "the model's own length is the default",
}
"""Flags whose -1 asks for no bound."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_SUFFIX = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


class Translated(msgspec.Struct, frozen=True):
    """A command line in our words."""

    flags: list[str]
    notices: list[str]
    """One line for each flag that was ignored."""
    renamed: dict[str, str]
    """Our flag to the one that was written, for messages about its value."""


def translate(argv: Sequence[str]) -> Translated:
    """`argv` without the program's name. Raises `ConfigError` for a value that only they have."""
    done = Translated([], [], {})
    words = iter(argv)
    if argv[:1] == ["serve"]:
        next(words)
        if len(argv) > 1 and not argv[1].startswith("-"):  # vLLM: `serve MODEL`
            done.flags.extend(("--model", next(words)))
    for word in words:
        _take(done, word, words)
    return done


def _take(done: Translated, word: str, rest: Iterator[str]) -> None:
    written, equals, value = word.partition("=")
    name = written.replace("_", "-")  # vLLM takes both
    if name in SWITCHES and not equals:
        done.flags.extend(SWITCHES[name])
    elif name in IGNORED and not equals:
        done.notices.append(f"{name} is ignored: {IGNORED[name]}")
    elif name in _VALUED:
        _valued(done, name, value if equals else next(rest, None))
    else:
        done.flags.append(name + equals + value if word.startswith("--") else word)


def _valued(done: Translated, name: str, value: str | None) -> None:
    if name in IGNORED_VALUES:
        done.notices.append(f"{name} is ignored: {IGNORED_VALUES[name]}")
        return
    if name in ONLY:
        if value != ONLY[name]:
            raise ConfigError(f"{name} {value} is not available: only {ONLY[name]} is")
        return
    if name in _UNBOUNDED and value in ("-1", "auto"):
        done.notices.append(f"{name} {value} is ignored: {_UNBOUNDED[name]}")
        return
    ours = RENAMED.get(name, name)
    if ours != name:
        done.renamed[ours] = name
    done.flags.append(ours)
    if value is not None:
        done.flags.append(VALUES.get(ours, {}).get(value, _count(value)))


def _count(text: str) -> str:
    """vLLM's `32k` (32,000) and `32K` (32,768) as plain digits; anything else as it is."""
    found = _COUNT.fullmatch(text)
    return text if found is None else str(int(float(found[1]) * _SUFFIX[found[2]]))
