"""What each handler takes and answers, for `/openapi.json`: by handler, so that aliases share a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp.typedefs import Handler

from app.api.admin import admin, control, load
from app.api.anthropic import routes as anthropic
from app.api.anthropic.schema import MessagesBody
from app.api.cohere import routes as cohere
from app.api.cohere.schema import CohereBody
from app.api.ollama import routes as ollama
from app.api.ollama import schema as ollama_schema
from app.api.openai import batches, files, models
from app.api.openai.chat import chat
from app.api.openai.completions import completions
from app.api.openai.invoke import InvocationBody, invocations
from app.api.openai.tokens import detokenize, tokenize
from app.api.pooling import classify, embeddings, generative, rerank, score
from app.api.request.schema import (
    AbortBody,
    AbortManyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    TokenizeBody,
)
from app.api.responses import routes as responses
from app.api.responses.schema import ResponsesBody
from app.api.sglang import parsing, sessions
from app.api.sglang.generate import generate
from app.api.vllm import chat_batch, derender, inference, render
from app.http.prometheus import CONTENT_TYPE
from core.command import TAGS

Schema = dict[str, Any]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """One handler. Statuses beyond those that every route may answer are named here."""

    summary: str = ""
    """Empty: the first sentence of the handler's own."""
    body: type[msgspec.Struct] | None = None
    optional: bool = False
    """No body is an empty object."""
    example: Schema | None = None
    """A body that works with every model."""
    form: Schema | None = None
    """A multipart form instead of JSON."""
    has: tuple[str, ...] = ()
    """Fields that every answer of status 200 has."""
    lists: bool = False
    """The answer is a list; with `has`: or an object."""
    string: bool = False
    """The answer is a JSON string."""
    media: str = "application/json"
    streams: bool = False
    """Events instead, when `stream` asks for them."""
    lines: bool = False
    """Lines of JSON instead, unless `stream` is false."""
    errors: tuple[int, ...] = ()
    query: Mapping[str, Schema] = {}


_MODEL = (404,)
_RUN = (404, 429)
_AFTER: Schema = {"type": "string"}
_ORDER: Schema = {"type": "string", "enum": ["asc", "desc"]}
_RECORD = ("id", "object")
_LIST = ("object", "data", "first_id", "last_id", "has_more")
_DELETED = (*_RECORD, "deleted")
_VECTORS = ("id", "object", "created", "model", "data", "usage")
_CHOICES = (*_RECORD, "created", "model", "choices")
_TAGS: Schema = {"type": "array", "items": {"type": "string", "enum": list(TAGS)}}
_HI: Schema = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
_ONCE: Schema = {"prompt": "Once upon a time", "max_tokens": 16}
_UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(files.PURPOSES)},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


def _limit(most: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _switch(summary: str, body: type[msgspec.Struct] | None = None, **more: Any) -> About:
    """A control route: 403 unless the operator opened them."""
    return About(summary=summary, body=body, optional=True, has=("success",), errors=(403,), **more)


NEEDED: Mapping[type[msgspec.Struct], tuple[str, ...]] = {
    AbortManyBody: ("request_ids",),
    ChatBody: ("messages",),
    MessagesBody: ("messages",),
    CohereBody: ("messages",),
    DetokenizeBody: ("tokens",),
    batches.BatchBody: ("input_file_id", "endpoint"),
    rerank.RerankBody: ("query", "documents"),
    chat_batch.BatchChatBody: ("messages",),
    derender.DerenderBody: ("generate_responses",),
    derender.DerenderChatBody: ("generate_response",),
    generative.GenerativeBody: ("query", "items", "label_token_ids"),
    inference.InferenceBody: ("token_ids",),
}
"""Fields without which a body is refused. In the structs they may be absent, so that an error names them
in our words."""

ABOUT: Mapping[Handler, About] = {
    chat: About(
        summary="Answer a conversation.",
        body=ChatBody,
        example=_HI,
        has=_CHOICES,
        streams=True,
        errors=_RUN,
    ),
    completions: About(
        summary="Go on with a text.",
        body=CompletionBody,
        example=_ONCE,
        has=_CHOICES,
        streams=True,
        errors=_RUN,
    ),
    generate: About(
        summary="Go on with a text, after SGLang.",
        body=NativeBody,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        has=("text", "meta_info"),
        lists=True,
        streams=True,
        errors=_RUN,
    ),
    invocations: About(body=InvocationBody, example=_ONCE, has=_CHOICES, streams=True, errors=_RUN),
    tokenize: About(
        body=TokenizeBody,
        example={"prompt": "Once upon a time"},
        has=("tokens", "count", "max_model_len"),
        errors=_MODEL,
    ),
    detokenize: About(body=DetokenizeBody, example={"tokens": [1, 2]}, has=("text", "prompt"), errors=_MODEL),
    models.models: About(has=("object", "data")),
    models.model: About(has=("id", "object", "created", "owned_by"), errors=_MODEL),
    models.model_info: About(has=("model_path", "tokenizer_path", "served_model_name")),
    models.tokenizer_info: About(has=("tokenizer_class",)),
    admin.root: About(has=("name", "health", "openapi")),
    admin.health: About(has=("status",)),
    admin.health_generate: About(has=("status",), errors=(429,)),
    admin.metrics: About(media=CONTENT_TYPE.partition(";")[0]),
    admin.server_info: About(has=("version", "status", "model_card", "internal_states")),
    admin.show_version: About(has=("version",)),
    admin.flush_cache: About(has=("success", "message")),
    admin.abort_request: About(
        body=AbortBody, example={"abort_all": True}, has=("success", "aborted"), errors=(404,)
    ),
    admin.abort_requests: About(
        body=AbortManyBody, example={"request_ids": ["a"]}, has=("success", "aborted")
    ),
    admin.timeline: About(has=("id",), errors=(404,)),
    load.load: About(summary="Requests that are here.", has=("server_load",)),
    load.get_load: About(summary="Requests and tokens that are here.", lists=True),
    load.loads: About(
        summary="Requests and tokens, waiting and running.", has=("timestamp", "dp_rank_count", "loads")
    ),
    control.pause: _switch("Stop planning steps.", control.PauseBody),
    control.resume: _switch("Go on planning steps."),
    control.slow_down: _switch("Leave time between steps.", control.SlowBody),
    control.start_profile: _switch("Record what the device does."),
    control.stop_profile: _switch("Write what was recorded to the server's disk."),
    control.load_weights: _switch("Exchange the weights.", control.WeightsBody),
    control.sleep: _switch("Give memory back.", control.TagsBody, query={"tags": _TAGS}),
    control.wake: _switch("Take memory again.", control.TagsBody, query={"tags": _TAGS}),
    control.freeze_gc: _switch("Keep the garbage collector from what is alive now."),
    control.configure_logging: _switch("Change what is logged.", control.LoggingBody),
    parsing.parse_calls: About(
        body=parsing.CallsBody,
        example={"text": "Hello", "tool_call_parser": "hermes"},
        has=("normal_text", "calls"),
    ),
    parsing.separate_reasoning: About(
        body=parsing.ReasoningBody,
        example={"text": "Hello", "reasoning_parser": "think"},
        has=("reasoning_text", "text"),
    ),
    render.render_chat: About(body=ChatBody, example=_HI, has=("request_id", "token_ids"), errors=_MODEL),
    render.render_completions: About(body=CompletionBody, example=_ONCE, lists=True, errors=_MODEL),
    control.is_paused: About(has=("is_paused",)),
    control.is_sleeping: About(has=("is_sleeping",)),
    files.upload: About(form=_UPLOAD, has=(*_RECORD, "bytes", "filename", "purpose")),
    files.files: About(
        has=_LIST,
        errors=(404,),
        query={
            "purpose": {"type": "string"},
            "after": _AFTER,
            "order": {"type": "string", "description": "`asc`; anything else is newest first"},
            "limit": _limit(10_000),
        },
    ),
    files.file: About(has=(*_RECORD, "bytes", "filename", "purpose"), errors=(404,)),
    files.content: About(media="application/octet-stream", errors=(404,)),
    files.delete: About(has=_DELETED, errors=(404,)),
    batches.create: About(body=batches.BatchBody, has=(*_RECORD, "status"), errors=(404,)),
    batches.batches: About(has=_LIST, errors=(404,), query={"after": _AFTER, "limit": _limit(100)}),
    batches.batch: About(has=(*_RECORD, "status"), errors=(404,)),
    batches.cancel: About(has=(*_RECORD, "status"), errors=(404,)),
    responses.create: About(
        body=ResponsesBody,
        example={"input": "Hello", "max_output_tokens": 16},
        has=(*_RECORD, "status", "output"),
        streams=True,
        errors=_RUN,
    ),
    responses.input_tokens: About(
        body=ResponsesBody,
        example={"input": "Hello"},
        has=("object", "input_tokens"),
        errors=_MODEL,
    ),
    responses.retrieve: About(
        has=(*_RECORD, "status", "output"),
        streams=True,
        errors=(404,),
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    ),
    responses.delete: About(has=_DELETED, errors=(404,)),
    responses.input_items: About(
        has=_LIST,
        errors=(404,),
        query={"after": _AFTER, "order": _ORDER, "limit": _limit(responses.MAX_PAGE)},
    ),
    responses.cancel: About(has=(*_RECORD, "status", "output"), errors=(404,)),
    anthropic.messages: About(
        summary="Answer a conversation, after Anthropic.",
        body=MessagesBody,
        example=_HI,
        has=("id", "type", "role", "content"),
        streams=True,
        errors=_RUN,
    ),
    cohere.chat: About(
        body=CohereBody,
        example=_HI,
        has=("id", "finish_reason", "message", "usage"),
        streams=True,
        errors=_RUN,
    ),
    cohere.render: About(body=CohereBody, example=_HI, has=("request_id", "token_ids"), errors=_MODEL),
    score.score: About(
        body=score.ScoreBody,
        example={"query": "Is it? ", "items": ["Yes", "No"], "label_token_ids": [1, 2]},
        has=("object", "model", "scores", "usage"),
        errors=_RUN,
    ),
    embeddings.embeddings: About(
        body=embeddings.EmbeddingBody, example={"input": "Once upon a time"}, has=_VECTORS, errors=_RUN
    ),
    embeddings.pooling: About(
        body=embeddings.PoolingBody, example={"input": "Once upon a time"}, has=_VECTORS, errors=_RUN
    ),
    classify.classify: About(
        body=classify.ClassifyBody, example={"input": "Once upon a time"}, has=_VECTORS, errors=_RUN
    ),
    classify.encode_native: About(
        body=classify.EncodeBody,
        example={"text": "Once upon a time"},
        has=("embedding", "meta_info"),
        lists=True,
        errors=_RUN,
    ),
    rerank.rerank: About(
        body=rerank.RerankBody,
        example={"query": "Is it?", "documents": ["Yes", {"text": "No"}]},
        has=("id", "model", "results", "usage"),
        errors=_RUN,
    ),
    sessions.open_session: About(body=sessions.OpenBody, optional=True, string=True, errors=(429,)),
    sessions.close_session: About(body=sessions.CloseBody, example={"session_id": "s"}, has=("success",)),
    chat_batch.chat_batch: About(
        body=chat_batch.BatchChatBody,
        example={"messages": [_HI["messages"], _HI["messages"]], "max_tokens": 16},
        has=_CHOICES,
        errors=_RUN,
    ),
    inference.inference: About(
        body=inference.InferenceBody,
        example={"token_ids": [1, 2], "sampling_params": {"max_tokens": 16}},
        has=("request_id", "choices", "usage"),
        streams=True,
        errors=_RUN,
    ),
    derender.derender_chat: About(
        body=derender.DerenderChatBody,
        example={"generate_response": {"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}},
        has=_CHOICES,
        errors=_MODEL,
    ),
    derender.derender_completions: About(
        body=derender.DerenderBody,
        example={"generate_responses": [{"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}]},
        has=_CHOICES,
        errors=_MODEL,
    ),
    generative.generative_scoring: About(
        body=generative.GenerativeBody,
        example={"query": "Is it? ", "items": ["Yes", "No"], "label_token_ids": [1, 2]},
        has=("id", "object", "created", "model", "data", "usage"),
        errors=_RUN,
    ),
    ollama.chat: About(
        body=ollama_schema.OllamaChatBody,
        example={"messages": _HI["messages"]},
        has=("model", "created_at", "message", "done"),
        lines=True,
        errors=_RUN,
    ),
    ollama.generate: About(
        body=ollama_schema.OllamaGenerateBody,
        example={"prompt": "Once upon a time"},
        has=("model", "created_at", "response", "done"),
        lines=True,
        errors=_RUN,
    ),
    ollama.tags: About(has=("models",)),
    ollama.running_models: About(has=("models",)),
    ollama.show: About(
        body=ollama_schema.OllamaShowBody,
        optional=False,
        example={},
        has=("details", "model_info", "capabilities"),
        errors=_MODEL,
    ),
    ollama.version: About(has=("version",)),
    anthropic.count_tokens: About(body=MessagesBody, example=_HI, has=("input_tokens",), errors=_MODEL),
}
"""A route whose handler is missing here cannot be described: a test says so."""
