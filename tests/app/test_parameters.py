"""Every parameter that clients of OpenAI, SGLang, vLLM, Anthropic and Cohere send, by route.

One table: a parameter works (its value is taken, null is unset, another type is a 400 that names it), is
refused by name, or is ignored because it means nothing to this server. What a struct declares has to be
in its table, so that nothing is taken untested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from app.api.anthropic.schema import MessagesBody
from app.api.cohere.schema import CohereBody
from app.api.pooling.rerank import PairBody
from app.api.pooling.score import GenerativeBody, ScoreBody
from app.api.request.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    NativeSampling,
    TokenizeBody,
)
from app.api.responses.schema import ResponsesBody
from app.api.vllm.chat_batch import BatchChatBody
from app.api.vllm.inference import InferenceBody
from core.config import ServeConfig
from core.request import SamplingParams
from tests.rigs.engine import ROUTED, WIDTH
from tests.rigs.server import Server, know
from tests.rigs.tensors import tensor
from tests.rigs.tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TENSOR = tensor(np.full((2, WIDTH), 0.5, np.float32))
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


class Works(NamedTuple):
    """`value` is taken, `wrong` is not, and an error names the parameter or a part of it. `given` are
    other fields that it needs. A parameter that is `needed` cannot be null."""

    value: Any
    wrong: Any = (object,)
    given: Mapping[str, Any] = {}
    needed: bool = False


class Refused(NamedTuple):
    """`value` asks for what is not there."""

    value: Any
    given: Mapping[str, Any] = {}


class Ignored(NamedTuple):
    """Taken whatever it is: it means nothing here."""

    value: Any = "anything"


Case = Works | Refused | Ignored
WRONG: dict[type, Any] = {str: 5, int: "five", float: "half", bool: "yes", list: 5, dict: "x"}

CONSTRAINTS: dict[str, Case] = {
    "response_format": Works({"type": "json_object"}, "json"),
    "regex": Works("a+", 5),
    "ebnf": Works("root ::= 'a'", 5),
    "grammar": Works('root ::= "a"', 5),
    "json_schema": Works("{}", 5),
    "structural_tag": Works({"structures": [], "triggers": []}, 5),
    "structured_outputs": Works({"regex": "a"}, "x"),
    "guided_json": Works({"type": "object"}, 5),
    "guided_regex": Works("a", 5),
    "guided_choice": Works(["a", "b"], [5]),
    "guided_grammar": Works("root ::= 'a'", 5),
    "bad_words": Works(["never"], "never"),
    "allowed_token_ids": Works([1, 2], ["a"]),
    "custom_logit_processor": Works("ban", 5),
    "custom_params": Works({"a": 1}, "x"),
    "logit_processors": Refused(["x"]),
    "logits_processors": Refused(["x"]),
    "use_beam_search": Refused(True),
    "max_thinking_tokens": Works(5),
    "thinking_token_budget": Works(5),
    "lora_path": Refused("adapter"),
    "prompt_embeds": Refused("AAAA"),
    "input_embeds": Refused([[0.5]]),
    "return_routed_experts": Works(True),
    "routed_experts_start_len": Works(1, given={"return_routed_experts": True}),
    "return_entropy": Works(True, given={"return_meta_info": True}),
    "return_sampling_mask": Works(True, given={"return_meta_info": True, "top_k": 5}),
    "chat_template": Refused("{{ messages }}"),
    "image_data": Refused("x"),
    "video_data": Refused("x"),
    "audio_data": Refused("x"),
    "suffix": Refused("x"),
}
"""Parameters that a body of every kind that generates may have."""

SAMPLING: dict[str, Case] = {
    "temperature": Works(0.5),
    "top_p": Works(0.5),
    "top_k": Works(5),
    "min_p": Works(0.1),
    "presence_penalty": Works(0.5),
    "frequency_penalty": Works(0.5),
    "repetition_penalty": Works(1.1),
    "logit_bias": Works({"5": 1.5}),
    "n": Works(2),
    "stop": Works(["a", "b"]),
    "stop_token_ids": Works([5]),
    "stop_regex": Works("a+"),
    "ignore_eos": Works(True),
    "no_stop_trim": Works(True),
    "skip_special_tokens": Works(False),
    "logprobs_mode": Works("processed_logprobs"),
    "stream_interval": Works(4),
    "spaces_between_special_tokens": Ignored(False),
}

GENERATION: dict[str, Case] = {
    **CONSTRAINTS,
    **SAMPLING,
    "use_beam_search": Works(True),
    "length_penalty": Works(1.5),
    "model": Works("org/tiny"),
    "seed": Works(5),
    "max_tokens": Works(2),
    "min_tokens": Works(1),
    "include_stop_str_in_output": Works(True),
    "add_special_tokens": Works(True),
    "truncate_prompt_tokens": Works(3),
    "truncation_side": Works("right", given={"truncate_prompt_tokens": 2}),
    "prompt_logprobs": Works(1),
    "logprob_token_ids": Works([5, 6], given={"logprobs": 1}),
    "repetition_detection": Works({"max_pattern_size": 4, "min_count": 3}),
    "stream": Works(True),
    "stream_options": Works({"include_usage": True}, given={"stream": True}),
    "priority": Works(3),
    "timeout": Works(5.0),
    "cache_salt": Works("tenant"),
    "extra_key": Works("more"),
    "prompt_cache_key": Works("key"),
    "prompt_cache_retention": Works("24h"),
    "rid": Works("one"),
    "request_id": Works("one"),
    "return_token_ids": Works(True),
    "return_tokens_as_token_ids": Works(True),
    "return_prompt_token_ids": Works(True),
    "return_prompt_text": Works(True),
    # one process with one model on its devices: nothing to route, to hand over or to label
    "bootstrap_host": Ignored("h"),
    "bootstrap_port": Ignored(1),
    "bootstrap_room": Ignored(1),
    "routed_dp_rank": Works(0),
    "data_parallel_rank": Works(0),
    "kv_transfer_params": Ignored({}),
    "custom_labels": Ignored({"a": "b"}),
    "vllm_xargs": Ignored({"a": 1}),
    "best_of": Ignored(1),
    # for OpenAI's own books
    "user": Ignored("me"),
    "metadata": Ignored({"a": "b"}),
    "store": Ignored(True),
    "service_tier": Ignored("auto"),
    "safety_identifier": Ignored("me"),
}

TOLD: dict[str, Case] = {
    "return_cached_tokens_details": Works(True),
    "return_meta_info": Works(True),
    "return_token_offsets": Works(True),
}
"""Extras of peers' answers."""

CHAT: dict[str, Case] = {
    **GENERATION,
    "messages": Works(HI, needed=True),
    "input_ids": Works([5, 6]),
    "echo": Works(True),
    "max_completion_tokens": Works(2),
    "logprobs": Works(True),
    "logprob_token_ids": Works([5, 6], given={"logprobs": True}),
    "top_logprobs": Works(2, given={"logprobs": True}),
    "tools": Works([FUNCTION]),
    "tool_choice": Works("auto", 5, given={"tools": [FUNCTION]}),
    "add_generation_prompt": Works(True),
    "continue_final_message": Works(True),
    "chat_template": Works("{{ messages }}"),
    "chat_template_kwargs": Works({"a": 1}),
    "documents": Works([{"text": "a"}]),
    "parallel_tool_calls": Works(False),
    "separate_reasoning": Works(False),
    "include_reasoning": Works(False),
    **TOLD,
    "reasoning_effort": Works("low"),
    "modalities": Ignored(["text"]),
    "prediction": Ignored({"type": "content", "content": "a"}),
    "verbosity": Ignored("low"),
    "stream_reasoning": Ignored(True),
    "media_io_kwargs": Ignored({}),
    "mm_processor_kwargs": Ignored({}),
    "min_dynamic_patch": Ignored(1),
    "max_dynamic_patch": Ignored(1),
}

COMPLETIONS: dict[str, Case] = {
    **GENERATION,
    "prompt": Works("hi", needed=True),
    "suffix": Works("x"),
    "best_of": Works(1),
    "prompt_embeds": Works(TENSOR),
    "logprobs": Works(1),
    "echo": Works(True),
    **TOLD,
}

NATIVE_SAMPLING: dict[str, Case] = {
    **CONSTRAINTS,
    **SAMPLING,
    "return_entropy": Works(True),
    "return_sampling_mask": Works(True, given={"temperature": 0.0}),
    "max_new_tokens": Works(2),
    "min_new_tokens": Works(1),
    "sampling_seed": Works(5),
}

NATIVE: dict[str, Case] = {
    **CONSTRAINTS,
    "return_entropy": Works(True),
    "return_sampling_mask": Works(True, given={"sampling_params": {"top_k": 5}}),
    "text": Works("hi", needed=True),
    "input_ids": Works([5, 6], "x", given={"text": None}, needed=True),
    "input_embeds": Works([[0.5] * WIDTH], "x", given={"text": None}, needed=True),
    "sampling_params": Works({"max_new_tokens": 2}),
    "stream": Works(True),
    "rid": Works("one"),
    "return_logprob": Works(True),
    "logprob_start_len": Works(0, given={"return_logprob": True}),
    "top_logprobs_num": Works(2, given={"return_logprob": True}),
    "token_ids_logprob": Works([5], given={"return_logprob": True}),
    "return_text_in_logprobs": Works(True),
    "priority": Works(3),
    "timeout": Works(5.0),
    "cache_salt": Works("tenant"),
    "extra_key": Works("more"),
    "routed_dp_rank": Works(0),
    "data_parallel_rank": Works(0),
    "bootstrap_host": Ignored("h"),
    "bootstrap_room": Ignored(1),
    "custom_labels": Ignored({}),
}

RESPONSES: dict[str, Case] = {
    **{name: case for name, case in GENERATION.items() if name not in ("metadata", "store")},
    "response_format": Refused({"type": "json_object"}),
    "use_beam_search": Refused(True),
    "chat_template": Works("{{ messages }}", 5),
    "return_routed_experts": Refused(True),
    "routed_experts_start_len": Works(1),
    "return_entropy": Refused(True),
    "return_sampling_mask": Refused(True),
    "max_tokens": Refused(2),
    "n": Refused(2),
    "prompt_logprobs": Refused(1),
    "logprob_token_ids": Refused([5, 6], given={"top_logprobs": 1}),
    "return_token_ids": Refused(True),
    "return_tokens_as_token_ids": Refused(True),
    "return_prompt_token_ids": Refused(True),
    "return_prompt_text": Refused(True),
    "input": Works("hi", 5, needed=True),
    "instructions": Works("Be brief."),
    "max_output_tokens": Works(2),
    "max_tool_calls": Works(2),
    "tools": Works([{"type": "function", "name": "f", "parameters": SCHEMA}]),
    "tool_choice": Works("auto", 5),
    "parallel_tool_calls": Works(False),
    "text": Works({"format": {"type": "text"}}),
    "reasoning": Works({"effort": "low"}),
    "include": Works(["reasoning.encrypted_content"]),
    "top_logprobs": Works(2),
    "metadata": Works({"a": "b"}),
    "store": Works(False),
    "background": Works(False),
    "truncation": Works("auto"),
    "service_tier": Works("auto"),
    "safety_identifier": Works("me"),
    "user": Works("me"),
    "chat_template_kwargs": Works({"a": 1}),
    "return_cached_tokens_details": Ignored(True),
    "return_meta_info": Ignored(True),
    "return_token_offsets": Ignored(True),
    "prompt": Refused({"id": "pmpt_1"}),
    "conversation": Refused("conv_1"),
}

MESSAGES: dict[str, Case] = {
    "model": Works("org/tiny"),
    "messages": Works(HI, needed=True),
    "max_tokens": Works(2, needed=True),
    "system": Works("Be brief."),
    "stop_sequences": Works(["a"]),
    "stream": Works(True),
    "temperature": Works(0.5),
    "top_k": Works(5),
    "top_p": Works(0.5),
    "thinking": Works({"type": "adaptive"}),
    "tools": Works([{"name": "f", "input_schema": SCHEMA}]),
    "tool_choice": Works({"type": "auto"}),
    "output_config": Works({"effort": "low"}),
    "output_format": Works({"type": "json_schema", "schema": SCHEMA}),
    "cache_control": Works({"type": "ephemeral", "ttl": "1h"}),
    "metadata": Works({"user_id": "u"}),
    "priority": Works(3),
    "timeout": Works(5.0),
    "custom_logit_processor": Works("ban"),
    "custom_params": Works({"a": 1}),
    "compaction": Refused({"mode": "auto"}),
    "betas": Ignored(["x"]),
    "container": Ignored("x"),
    "context_management": Ignored({}),
    "mcp_servers": Ignored([]),
    "service_tier": Ignored("auto"),
}

TOKENIZE: dict[str, Case] = {
    "model": Works("org/tiny"),
    "prompt": Works("hi", needed=True),
    "messages": Works(HI, given={"prompt": None}, needed=True),
    "tools": Works([FUNCTION], given={"prompt": None, "messages": HI}),
    "add_special_tokens": Works(False),
    "add_generation_prompt": Works(False),
    "continue_final_message": Works(True),
    "return_token_strs": Works(True),
    "chat_template_kwargs": Works({"a": 1}),
    "chat_template": Works("{{ messages }}"),
}

DETOKENIZE: dict[str, Case] = {
    "model": Works("org/tiny"),
    "tokens": Works([5, 6], needed=True),
    "skip_special_tokens": Works(False),
}

SCORE: dict[str, Case] = {
    "model": Works("org/tiny"),
    "query": Works("a", needed=True),
    "items": Works(["b"], needed=True),
    "label_token_ids": Works([5], needed=True),
    "apply_softmax": Works(True),
    "item_first": Works(True),
    "priority": Works(3),
    "cache_salt": Works("tenant"),
    "extra_key": Works("more"),
}

BATCH: dict[str, Case] = {
    **{name: case for name, case in CHAT.items() if not isinstance(case, Ignored)},
    "messages": Works([HI], needed=True),
    "n": Works(1),
    "stream": Works(False),
    "stream_options": Works({"include_usage": True}),
    "input_ids": Refused([5]),
}

COHERE: dict[str, Case] = {
    "model": Works("org/tiny"),
    "messages": Works(HI, needed=True),
    "stream": Works(True),
    "max_tokens": Works(3),
    "stop_sequences": Works(["x"]),
    "temperature": Works(0.5),
    "k": Works(5),
    "p": Works(0.9),
    "seed": Works(3),
    "frequency_penalty": Works(0.5),
    "presence_penalty": Works(0.5),
    "logprobs": Works(True),
    "response_format": Works(
        {"type": "json_object", "json_schema": SCHEMA}, {"type": "json_object", "json_schema": 1}
    ),
    "documents": Works(["a", {"data": {"text": "b"}, "id": "1"}], [{"id": "1"}]),
    "tools": Works([FUNCTION], [{"type": "function"}]),
    "strict_tools": Works(True, given={"tools": [FUNCTION]}),
    "tool_choice": Works("REQUIRED", "required", given={"tools": [FUNCTION]}),
    "thinking": Works({"type": "enabled", "token_budget": 5}, {"type": "enabled", "token_budget": 0}),
    "safety_mode": Works("STRICT"),
    "citation_options": Ignored({"mode": "FAST"}),
    "priority": Works(3),
    "timeout": Works(5.0),
    "chat_template_kwargs": Works({"a": 1}, {"tokenize": True}),
    "raw_prompting": Ignored(False),
    "kv_transfer_params": Ignored({}),
}

INFERENCE: dict[str, Case] = {
    "model": Works("org/tiny"),
    "token_ids": Works([5, 6], needed=True),
    "sampling_params": Works({"max_tokens": 2}),
    "output_mode": Works("text"),
    "stream": Works(True),
    "stream_options": Works({"include_usage": True}, given={"stream": True}),
    "request_id": Works("one"),
    "cache_salt": Works("tenant"),
    "priority": Works(3),
    "timeout": Works(5.0),
    "return_token_ids": Works(True),
    "features": Refused({"mm_hashes": {}}),
    "content_parts": Refused([{"type": "image_url"}]),
    "token_offsets": Ignored([[0, 1]]),
    "kv_transfer_params": Ignored({}),
    "ec_transfer_params": Ignored({}),
    "reasoning_ended": Ignored(True),
}

GENERATIVE: dict[str, Case] = {
    **{name: case for name, case in SCORE.items() if name not in ("cache_salt", "extra_key")},
    "apply_softmax": Works(False),
    "add_special_tokens": Works(False),
    "request_id": Works("one"),
}

ELSEWHERE: dict[type, set[str]] = {
    ChatBody: {"functions", "function_call", "suffix", "return_hidden_states"},
    CompletionBody: {"return_hidden_states"},
    BatchChatBody: {"functions", "function_call", "suffix", "return_hidden_states"},
    NativeBody: {"session_params", "return_hidden_states"},
    NativeSampling: {"return_hidden_states"},
    ResponsesBody: {"previous_response_id", "return_hidden_states"},
    MessagesBody: {"thread"},
    ScoreBody: set(PairBody.__struct_fields__) - {"model", "priority", "cache_salt", "extra_key"},
}
"""Declared, and tested where it needs more than a value."""

_SCORED = {"query": "a", "items": ["b"], "label_token_ids": [5]}

ROUTES: list[tuple[str, type[msgspec.Struct], dict[str, Case], dict[str, Any], str]] = [
    ("/v1/chat/completions", ChatBody, CHAT, {"messages": HI, "max_tokens": 2}, ""),
    ("/v1/completions", CompletionBody, COMPLETIONS, {"prompt": "hi", "max_tokens": 2}, ""),
    ("/generate", NativeBody, NATIVE, {"text": "hi", "sampling_params": {"max_new_tokens": 2}}, ""),
    ("/generate", NativeSampling, NATIVE_SAMPLING, {"text": "hi"}, "sampling_params"),
    ("/v1/responses", ResponsesBody, RESPONSES, {"input": "hi", "max_output_tokens": 2, "store": False}, ""),
    ("/v1/messages", MessagesBody, MESSAGES, {"messages": HI, "max_tokens": 2}, ""),
    ("/v2/chat", CohereBody, COHERE, {"messages": HI, "max_tokens": 2}, ""),
    ("/tokenize", TokenizeBody, TOKENIZE, {"prompt": "hi"}, ""),
    ("/detokenize", DetokenizeBody, DETOKENIZE, {"tokens": [5]}, ""),
    ("/v1/chat/completions/batch", BatchChatBody, BATCH, {"messages": [HI], "max_tokens": 2}, ""),
    ("/inference/v1/generate", InferenceBody, INFERENCE, {"token_ids": [5]}, ""),
    ("/generative_scoring", GenerativeBody, GENERATIVE, _SCORED, ""),
    ("/v1/score", ScoreBody, SCORE, {"query": "a", "items": ["b"], "label_token_ids": [5]}, ""),
]
NAMES = [f"{path} {inside}".strip() for path, _, _, _, inside in ROUTES]


@pytest.fixture
def able(server: Server) -> Server:
    """A model that calls tools, thinks, inserts and has experts, a processor by name, and trust."""
    know(server, "hermes", "think", ROUTED)
    server.engine.processors = ("ban",)
    tokenizer = ByteTokenizer({"[PREFIX]": 258, "[SUFFIX]": 259})
    loaded = msgspec.structs.replace(
        server.service.loaded, tokenizer=tokenizer, settings=ServeConfig(trust_request_chat_template=True)
    )
    server.service.ready(loaded)
    return server


async def answer(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, and the error's parameter and message."""
    async with server.http.post(path, json=body) as response:
        text = await response.read()
        if response.status == 200:
            return 200, "", ""
    told = msgspec.json.decode(text)
    error = told.get("error", told)
    return response.status, error.get("param") or "", error["message"]


def wrong_for(case: Works) -> Any:
    return WRONG[type(case.value)] if case.wrong == (object,) else case.wrong


def names(told: tuple[int, str, str], name: str, path: str) -> bool:
    """A 400 about `name`. Anthropic's and Cohere's errors have no field for it: the message says it."""
    status, param, message = told
    if path in ("/v1/messages", "/v2/chat"):
        return status == 400 and name in message
    return status == 400 and (param == name or param.startswith((f"{name}.", f"{name}[")))


@pytest.mark.parametrize(("path", "struct", "table", "base", "inside"), ROUTES, ids=NAMES)
async def test_every_parameter(
    able: Server, path: str, struct: type, table: dict[str, Case], base: dict[str, Any], inside: str
) -> None:
    problems: list[str] = []

    async def ask(name: str, value: Any, given: Mapping[str, Any] = {}) -> tuple[int, str, str]:
        sent = {**given, name: value}
        return await answer(able, path, {**base, inside: sent} if inside else {**base, **sent})

    for name, case in table.items():
        full = f"{inside}.{name}" if inside else name
        given = {} if isinstance(case, Ignored) else case.given
        told = await ask(name, case.value, given)
        if isinstance(case, Refused):
            if not names(told, full, path) or "not supported" not in told[2]:
                problems.append(f"{full} is not refused: {told}")
        elif told[0] != 200:
            problems.append(f"{full} is not taken: {told}")
        unset = await ask(name, None, given)
        if isinstance(case, Works) and case.needed:
            if unset[0] != 400:
                problems.append(f"{full} is needed, but may be null: {unset}")
        elif unset[0] != 200:
            problems.append(f"{full}: null is not unset: {unset}")
        if isinstance(case, Works):
            bad = await ask(name, wrong_for(case), given)
            if not names(bad, full, path):
                problems.append(f"{full} of another type is not named: {bad}")
        elif isinstance(case, Ignored) and (odd := await ask(name, [{"a": [None]}]))[0] != 200:
            problems.append(f"{full} is not ignored: {odd}")
    assert problems == []


@pytest.mark.parametrize(("struct", "table"), [(s, t) for _, s, t, _, _ in ROUTES], ids=NAMES)
def test_what_is_declared_is_tested(struct: type[msgspec.Struct], table: dict[str, Case]) -> None:
    declared = {field.name for field in msgspec.structs.fields(struct)}
    assert declared - set(table) - ELSEWHERE.get(struct, set()) == set()
    assert {name for name, case in table.items() if isinstance(case, Works)} <= declared


async def test_an_unknown_field_is_no_error(able: Server) -> None:
    for path, _, _, base, _ in ROUTES:
        assert (await answer(able, path, {**base, "no_such_field": {"a": 1}}))[0] == 200


DEFAULTS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)
INSIDE = {"/generate": "sampling_params", "/inference/v1/generate": "sampling_params", "/api/chat": "options"}
"""The field of a route's body with the sampling parameters, if they are not beside the prompt."""


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/generate", {"text": "hi"}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2}),
        ("/v2/chat", {"messages": HI}),
        ("/api/chat", {"messages": HI, "stream": False}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_the_models_sampling_defaults_hold_where_nothing_is_asked(
    able: Server, path: str, base: dict[str, Any]
) -> None:
    loaded = able.service.loaded
    card = msgspec.structs.replace(loaded.card, sampling=DEFAULTS)
    able.service.ready(msgspec.structs.replace(loaded, card=card))

    async def used(**asked: object) -> SamplingParams:
        body = {**base, INSIDE[path]: asked} if path in INSIDE else {**base, **asked}
        status, _, message = await answer(able, path, body)
        assert status == 200, message
        return able.engine.runs[-1].job.sampling

    default, greedy = await used(), await used(temperature=0)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(default, name) == getattr(DEFAULTS, name)
        assert getattr(greedy, name) == (0 if name == "temperature" else getattr(DEFAULTS, name))
