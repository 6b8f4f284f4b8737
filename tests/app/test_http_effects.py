"""Effects of the less usual parameters and routes, on what reaches the engine and on the answers."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.api.sglang.parsing import MAX_TEXT
from app.engine.submit import Submitter
from app.http import middleware
from app.text.repetition import Repetition
from app.text.tokenizer import Tokenizer
from core.clock import monotonic
from core.config import ServeConfig
from core.errors import RequestError
from core.grammar import CompiledGrammar, GrammarSpec, TokenRules
from tests.rigs import vocabularies
from tests.rigs.compiler import FakeCompiler
from tests.rigs.server import Server, Start, know
from tests.rigs.step_loop import VOCAB, Bench
from tests.rigs.wait import settle

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "Well, "}]
SAID = "Hello wörld 😀!"


# -- tokens that may be taken ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "allowed_token_ids": [3, 4], "bad_words": ["a b", "c"]}),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [3, 4], "bad_words": ["a b", "c"]}),
        (RESPONSES, {"input": "a", "allowed_token_ids": [3, 4], "bad_words": ["a b", "c"]}),
        (GENERATE, {"text": "a", "allowed_token_ids": [3, 4], "bad_words": ["a b", "c"]}),
        (
            GENERATE,
            {"text": "a", "sampling_params": {"allowed_token_ids": [3, 4], "bad_words": ["a b", "c"]}},
        ),
    ],
)
async def test_lists_of_tokens_reach_the_engine(server: Server, path: str, body: dict[str, Any]) -> None:
    await server.ask(path, body)
    job = server.engine.runs[-1].job
    assert (job.allowed_ids, job.bad_words) == ((3, 4), ("a b", "c"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 2000}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids"),
        ({"stream_interval": 0, "stream": True}, "stream_interval"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": 1000, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
    ],
)
async def test_what_cannot_be_done_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (await server.refused(COMPLETIONS, {"prompt": "a", **fields}))["param"] == param
    assert not server.engine.runs


class Restricting(FakeCompiler):
    """Notes what it is asked to restrict."""

    def __init__(self) -> None:
        super().__init__()
        self.ready.set()
        self.told: list[tuple[CompiledGrammar | None, TokenRules]] = []

    async def restrict(
        self, grammar: CompiledGrammar | None, rules: TokenRules, param: str
    ) -> CompiledGrammar:
        self.told.append((grammar, rules))
        return self.grammar


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tokenizer = Tokenizer.load(None, VOCAB, [2])
    made = Bench(tokenizer)
    compiler = Restricting()
    made.submitter = Submitter(made.replicas, tokenizer, monotonic, compiler)
    yield made
    made.engine.close()
    tokenizer.close()


async def test_words_become_the_tokens_that_they_are_encoded_to(bench: Bench) -> None:
    run = await bench.start("a", 2, allowed_ids=(7,), bad_words=("ab", " ab", "c"))
    await run.wait()
    compiler = bench.submitter._grammars
    assert isinstance(compiler, Restricting)
    ((grammar, rules),) = compiler.told
    assert grammar is None
    assert rules.allowed == (7,)
    assert rules.banned == tuple(tuple(text) for text in (b"ab", b" ab", b"c", b" c"))
    assert run.requests[0].grammar is compiler.grammar


async def test_words_with_tokens_that_only_the_tokenizer_has_need_no_rule(bench: Bench) -> None:
    core = vocabularies.byte_level()
    core.add_tokens([f"<{i}>" for i in range(VOCAB)])
    compiler = Restricting()
    bench.submitter = Submitter(bench.replicas, Tokenizer(core, {}), monotonic, compiler)
    await (await bench.start("a", 2, bad_words=("c<299>", "c"))).wait()
    assert [rules.banned for _, rules in compiler.told] == [((ord("c"),), (ord(" "), ord("c")))]


async def test_rules_join_a_grammar(bench: Bench) -> None:
    spec = GrammarSpec("regex", "a+", "regex")
    run = await bench.start("a", 2, grammar=spec, bad_words=("b",))
    await run.wait()
    compiler = bench.submitter._grammars
    assert isinstance(compiler, Restricting)
    assert compiler.told[0][0] is compiler.grammar
    plain = await bench.start("b", 2, grammar=spec)
    await plain.wait()
    assert len(compiler.told) == 1


async def test_without_masks_they_are_refused() -> None:
    tokenizer = Tokenizer.load(None, VOCAB, [2])
    bench = Bench(tokenizer)
    with pytest.raises(RequestError) as caught:
        await bench.start("a", 2, allowed_ids=(1,))
    assert (caught.value.param, caught.value.code) == ("allowed_token_ids", "unsupported")
    bench.engine.close()
    tokenizer.close()


# -- log-probabilities of named tokens ---------------------------------------------------------------


async def test_named_tokens_are_asked_for(server: Server) -> None:
    for path, body in (
        (CHAT, {"messages": HI, "logprobs": True, "logprob_token_ids": [3, 4]}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [3, 4]}),
        (GENERATE, {"text": "a", "return_logprob": True, "token_ids_logprob": [3, 4]}),
    ):
        await server.ask(path, body)
        assert server.engine.runs[-1].params.logprob_ids == (3, 4)


@pytest.mark.parametrize("streamed", [False, True])
async def test_generate_tells_best_and_named_tokens_apart(server: Server, streamed: bool) -> None:
    """The fake says 2 tokens for each position: here the first is the best, the second the named one."""
    body = {
        "text": "a",
        "return_logprob": True,
        "top_logprobs_num": 1,
        "token_ids_logprob": [3],
        "sampling_params": {"max_new_tokens": 2},
        "stream": streamed,
    }
    if streamed:
        meta = json.loads((await server.events(GENERATE, body))[-2])["meta_info"]
    else:
        meta = (await server.ask(GENERATE, body))["meta_info"]
    assert [[entry[1] for entry in tops] for tops in meta["output_top_logprobs"]] == [[72], [108]]
    assert [[entry[1] for entry in tops] for tops in meta["output_token_ids_logprobs"]] == [[73], [109]]


# -- prompts -----------------------------------------------------------------------------------------


async def test_a_prompt_is_cut_at_either_side(bench: Bench) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    for end, expected in ((False, [17, 18, 19]), (True, [10, 11, 12])):
        run = await bench.start(f"a{end}", 1, prompt=prompt, truncate_prompt=3, truncate_end=end)
        assert run.prompt.tolist() == expected
        await run.wait()
    await settle()


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        ("ipython", "ipython"),
        ("observation", "observation"),
        ("critic", "critic"),
        ("developer", "system"),
        ("function", "tool"),
    ],
)
async def test_any_role_reaches_the_template(server: Server, role: str, shown: str) -> None:
    for fields in (
        {"messages": [{"role": role, "content": "x"}]},
        {"messages": [*HI, {"role": role, "content": "x"}]},
    ):
        await server.ask(CHAT, fields)
        assert f"{shown}: x\n" in str(server.engine.runs[-1].job.prompt)


async def test_the_side_reaches_the_engine(server: Server) -> None:
    await server.ask(COMPLETIONS, {"prompt": "abc", "truncate_prompt_tokens": 2, "truncation_side": "right"})
    assert server.engine.runs[-1].job.truncate_end is True


async def test_the_prompt_is_told_as_text_and_ids(server: Server) -> None:
    rendered = "user: hi\nassistant: "
    for fields in ({}, {"stream": True}):
        body = {"messages": HI, "return_prompt_text": True, "return_prompt_token_ids": True, **fields}
        if fields:
            told = json.loads((await server.events(CHAT, body))[0])
        else:
            told = await server.ask(CHAT, body)
        assert told["prompt_text"] == rendered
        assert told["prompt_token_ids"] == list(rendered.encode())
    answer = await server.ask(
        COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 5, "return_prompt_text": True}
    )
    assert [choice["prompt_text"] for choice in answer["choices"]] == ["a", "b"]
    assert answer["choices"][0]["text"] == SAID, "told, not echoed"
    answer = await server.ask(COMPLETIONS, {"prompt": [104, 105], "return_prompt_text": True})
    assert answer["choices"][0]["prompt_text"] == "hi"


@pytest.mark.parametrize("thinks", [False, True])
async def test_chat_echoes_what_was_begun(server: Server, thinks: bool) -> None:
    if thinks:
        know(server, None, "think")
    body = {"messages": BEGUN, "echo": True, "continue_final_message": True}
    answer = await server.ask(CHAT, body)
    assert answer["choices"][0]["message"]["content"] == "Well, " + SAID
    events = [json.loads(event) for event in (await server.events(CHAT, {**body, "stream": True}))[:-1]]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == "Well, " + SAID
    answer = await server.ask(CHAT, {**body, "messages": HI, "continue_final_message": False})
    assert answer["choices"][0]["message"]["content"] == SAID, "the user's words are no answer"


async def test_ids_stand_for_rendered_messages(server: Server) -> None:
    know(server, None, "think")
    opened = list(b"user: hi\nassistant: <think>\n")
    server.engine.scripts = [["hm", "</think>", "yes"]]
    answer = await server.ask(CHAT, {"messages": HI, "input_ids": opened})
    assert server.engine.runs[-1].prompt.tolist() == opened
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


# -- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "stream_interval": 3}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5, "stream_interval": 3}),
    ],
)
async def test_tokens_are_told_a_few_at_a_time(server: Server, path: str, body: dict[str, Any]) -> None:
    events = await server.events(path, {**body, "stream": True, "return_token_ids": True})
    told = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [len(choice["token_ids"]) for choice in told if "token_ids" in choice] == [1, 3, 1]


async def test_generate_too(server: Server) -> None:
    sampling = {"max_new_tokens": 5, "stream_interval": 3}
    events = await server.events(GENERATE, {"text": "a", "stream": True, "sampling_params": sampling})
    assert [len(json.loads(event)["output_ids"]) for event in events[:-1]] == [1, 4, 5]


async def test_responses_too(server: Server) -> None:
    body = {"input": "a", "max_output_tokens": 5, "stream": True, "stream_interval": 3}
    async with server.http.post(RESPONSES, json=body) as response:
        told = (await response.text()).count("event: response.output_text.delta\n")
    assert told == 3


async def test_repetition_detection_reaches_the_engine(server: Server) -> None:
    asked = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    await server.ask(COMPLETIONS, {"prompt": "a", "repetition_detection": asked})
    assert server.engine.runs[-1].job.text.repetition == Repetition(2, 8, 3)
    for nothing in ({}, {"max_pattern_size": 0, "min_count": 0}):
        await server.ask(COMPLETIONS, {"prompt": "a", "repetition_detection": nothing})
        assert server.engine.runs[-1].job.text.repetition is None


# -- processors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [(RESPONSES, {"input": "a"}), (MESSAGES, {"messages": HI, "max_tokens": 2})]
)
async def test_every_route_takes_processors(server: Server, path: str, body: dict[str, Any]) -> None:
    server.engine.processors = ("ban",)
    fields = {"custom_logit_processor": "ban", "custom_params": {"a": 1}}
    await server.ask(path, {**body, **fields})
    params = server.engine.runs[-1].params
    assert (params.processor, json.loads(params.processor_params)) == ("ban", {"a": 1})
    status, _ = await server.post(path, {**body, "custom_logit_processor": "stranger"})
    assert status == 400


# -- routes ------------------------------------------------------------------------------------------


async def test_render_shows_and_runs_nothing(server: Server) -> None:
    told = await server.ask(CHAT + "/render", {"messages": HI, "rid": "mine"})
    assert told == {
        "request_id": "mine",
        "model": "org/tiny",
        "prompt": "user: hi\nassistant: ",
        "token_ids": list(b"user: hi\nassistant: "),
        "max_model_len": 512,
        "features": None,
        "sampling_params": {"skip_special_tokens": True},
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
    }
    told = await server.ask(COMPLETIONS + "/render", {"prompt": ["a", "b"]})
    assert [(one["prompt"], one["token_ids"]) for one in told] == [("a", [256, 97]), ("b", [256, 98])]
    told = await server.ask(COMPLETIONS + "/render", {"prompt": [5, 6]})
    assert [(one["prompt"], one["token_ids"]) for one in told] == [(None, [5, 6])]
    assert not server.engine.runs


CALL = 'Sure. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("e", "f")]


async def test_calls_are_read_out_of_a_text(server: Server) -> None:
    told = await server.ask(
        "/parse_function_call", {"text": CALL, "tools": TOOLS, "tool_call_parser": "qwen25"}
    )
    assert told["normal_text"].strip() == "Sure."
    assert told["calls"] == [{"tool_index": 1, "name": "f", "parameters": '{"a": 1}'}]
    know(server)
    assert (await server.ask("/parse_function_call", {"text": CALL, "tools": TOOLS}))["calls"]


@pytest.mark.parametrize("text", ["<think>hm</think>yes", "hm</think>yes"])
async def test_thinking_is_read_out_of_a_text(server: Server, text: str) -> None:
    told = await server.ask("/separate_reasoning", {"text": text, "reasoning_parser": "qwen3"})
    assert (told["reasoning_text"].strip(), told["text"].strip()) == ("hm", "yes")
    told = await server.ask("/separate_reasoning", {"text": "yes", "reasoning_parser": "think"})
    assert (told["reasoning_text"], told["text"]) == ("", "yes")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/parse_function_call", {"text": "a"}, "tool_call_parser"),
        ("/parse_function_call", {"text": "a", "tool_call_parser": "none"}, "tool_call_parser"),
        ("/parse_function_call", {"tool_call_parser": "hermes"}, "text"),
        ("/parse_function_call", {"text": "a" * (MAX_TEXT + 1), "tool_call_parser": "hermes"}, "text"),
        ("/separate_reasoning", {"text": "a"}, "reasoning_parser"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "x"}, "reasoning_parser"),
    ],
)
async def test_parsers_that_are_not_there(server: Server, path: str, body: Any, param: str) -> None:
    assert (await server.refused(path, body))["param"] == param


async def test_sagemakers_route_is_both(server: Server) -> None:
    assert (await server.ask("/invocations", {"messages": HI}))["object"] == "chat.completion"
    assert (await server.ask("/invocations", {"prompt": "a"}))["object"] == "text_completion"
    assert (await server.events("/invocations", {"prompt": "a", "stream": True}))[-1] == "[DONE]"
    assert (await server.refused("/invocations", {"inputs": "a"}))["param"] == "messages"


async def test_logging_is_changed_by_operators_only(start: Start) -> None:
    closed = await start()
    status, _ = await closed.post("/configure_logging", {"log_level": "debug"})
    assert status == 503 or status == 403
    server = await start(ServeConfig(control_routes=True))
    await server.ask("/configure_logging", {"log_level": "error", "log_requests": False})
    assert logging.getLogger().level == logging.ERROR
    assert logging.getLogger(middleware.__name__).level == logging.WARNING
    await server.ask("/configure_logging", {"log_requests": True})
    assert logging.getLogger(middleware.__name__).level == logging.NOTSET
    assert logging.getLogger().level == logging.ERROR
    assert (await server.refused("/configure_logging", {"log_level": "loud"}))["param"] == "log_level"
