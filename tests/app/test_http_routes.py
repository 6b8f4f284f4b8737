"""Every route: who may ask, what comes back."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from app.api.request.sampling import root_key
from app.api.routes import TABLE
from app.service import Health, Phase
from core.config import ServeConfig
from tests.rigs.server import Server, Start
from tests.rigs.wait import until

HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ON_DISK = ("/v1/files", "/v1/batches", "/v1/responses/")
"""Kept without a model: answered from the first second."""

ALWAYS_THERE = ("/", "/health", "/ping", "/metrics", "/version", "/api/version", "/openapi.json")
"""Routes that speak of the server, not of the model."""


def message(answer: Any) -> str:
    """Message of an error, which is a text for Ollama's clients, and bare for Cohere's."""
    error = answer.get("error", answer)
    return error if isinstance(error, str) else error["message"]


async def get(server: Server, path: str) -> tuple[int, Any]:
    async with server.http.get(path) as response:
        return response.status, await response.json()


# -- answers -----------------------------------------------------------------------------------------


async def test_chat_answer(server: Server) -> None:
    answer = await server.ask(CHAT, {"model": "org/tiny", "messages": HI, "request_id": "r", "stop": ["END"]})
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "r",
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello wörld 😀!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": "END",
                "stop_reason": "END",
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 5,
            "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_what_the_template_is_given(server: Server) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
    }
    await server.post(CHAT, body)
    await server.post(CHAT, {**body, "tool_choice": "none"})
    await server.post(
        CHAT, {"messages": [*HI, {"role": "assistant", "content": "Yes"}], "continue_final_message": True}
    )
    prompts = [bytes(run.prompt.tolist()).decode() for run in server.engine.runs]
    rest = (
        "system: be kind\nuser: a\nb\nassistant: \n"
        "enable_thinking=False\nreasoning_effort=low\nthinking=False\nassistant: "
    )
    assert prompts == ["tools: 1\n" + rest, rest, "user: hi\nassistant: Yes"]


async def test_fields_reach_the_job(server: Server) -> None:
    await server.post(
        CHAT,
        {
            "messages": HI,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": -3},
            "seed": 42,
            "max_completion_tokens": 7,
            "max_tokens": 3,
            "min_tokens": 2,
            "stop": "END",
            "stop_token_ids": [9],
            "stop_regex": ["a+b"],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": True,
            "top_logprobs": 3,
            "priority": 5,
            "cache_salt": "tenant",
            "truncate_prompt_tokens": 6,
        },
    )
    job = server.engine.runs[0].job
    s, t = job.sampling, job.text
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 0, 0.1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (s.logit_bias, s.stop_ids, s.min_tokens, s.logprobs) == (((5, -3.0),), frozenset({9}), 2, 3)
    assert (t.stop, t.stop_regex, t.include_stop, t.skip_special_tokens) == (("END",), ("a+b",), True, False)
    assert (job.max_tokens, job.seed, job.ignore_eos, job.priority) == (7, 42, True, 5)
    assert (job.truncate_prompt, job.add_special_tokens, job.prompt_param) == (6, False, "messages")
    assert job.root == root_key(server.service.loaded, "tenant", None)


async def test_salts_never_spell_each_other(server: Server) -> None:
    keys = [(None, None), ("a", None), (None, "a"), ("ab", "c"), ("a", "bc"), ("1:a", "")]
    assert len({root_key(server.service.loaded, *key) for key in keys}) == len(keys)


async def test_completions_of_every_kind_of_prompt(server: Server) -> None:
    for prompt, texts in (("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97], [98], [99]], 3)):
        answer = await server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "echo": True, "n": 2})
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * texts))
        assert all(choice["text"].endswith("Hello") for choice in answer["choices"])
    assert [c["text"] for c in answer["choices"]] == ["aHello"] * 2 + ["bHello"] * 2 + ["cHello"] * 2
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 12


async def test_scoring_a_prompt_as_lm_eval_does(server: Server) -> None:
    body = {"prompt": [97, 98], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1}
    answer = await server.ask(COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, pytest.approx(-0.98)]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": 0.0}]
    events = await server.events(COMPLETIONS, {**body, "stream": True})
    assert json.loads(events[0])["choices"][0]["logprobs"] == choice["logprobs"]
    assert events[-1] == "[DONE]" and len(events) == 3


async def test_prompt_logprobs_as_vllm_spells_them(server: Server) -> None:
    _, answer = await server.post(CHAT, {"messages": HI, "prompt_logprobs": 1, "max_tokens": 1})
    listed = answer["prompt_logprobs"]
    assert len(listed) == 20 and listed[0] is None
    assert listed[1] == {"115": {"logprob": 0.0, "rank": 1, "decoded_token": "s"}}
    _, answer = await server.post(COMPLETIONS, {"prompt": "ab", "prompt_logprobs": 0, "max_tokens": 1})
    assert answer["choices"][0]["prompt_logprobs"][1] == {
        "97": {"logprob": pytest.approx(-0.97), "rank": 1, "decoded_token": "a"}
    }


async def test_generate(server: Server) -> None:
    body = {"text": "ab", "rid": "g", "sampling_params": {"max_new_tokens": 2, "stop_token_ids": [3]}}
    assert await server.post(GENERATE, body) == (
        200,
        {
            "text": "Hello",
            "output_ids": [72, 108],
            "meta_info": {
                "id": "g",
                "finish_reason": {"type": "length", "length": 2},
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "cached_tokens": 0,
            },
        },
    )
    _, answer = await server.post(GENERATE, {"input_ids": [97], "sampling_params": {"max_new_tokens": 0}})
    assert answer["meta_info"]["completion_tokens"] == 0
    for prompts in (
        {"text": ["a", "b"]},
        {"input_ids": [[1], [2]]},
        {"text": "a", "sampling_params": {"n": 2}},
    ):
        _, answer = await server.post(GENERATE, {"rid": "g", **prompts})
        assert [one["meta_info"]["id"] for one in answer] == ["g-0", "g-1"]
    _, answer = await server.post(GENERATE, {"text": ["a"], "rid": ["own"]})
    assert [one["meta_info"]["id"] for one in answer] == ["own"]


async def test_generate_logprobs(server: Server) -> None:
    body = {
        "input_ids": [97, 98, 99],
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 1},
    }
    _, answer = await server.post(GENERATE, body)
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.72, 72, "H"]]
    assert meta["output_top_logprobs"] == [[[0.0, 72, "H"]]]
    assert meta["input_token_logprobs"] == [[pytest.approx(-0.98), 98, "b"], [pytest.approx(-0.99), 99, "c"]]
    assert meta["input_top_logprobs"] == [[[0.0, 98, "b"]], [[0.0, 99, "c"]]]
    *_, last, _ = await server.events(GENERATE, {**body, "stream": True})
    assert json.loads(last)["meta_info"] == {**meta, "id": json.loads(last)["meta_info"]["id"]}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(server: Server, prefix: str) -> None:
    _, answer = await server.post(f"{prefix}/tokenize", {"prompt": "aé", "return_token_strs": True})
    assert answer == {
        "tokens": [256, 97, 195, 169],
        "count": 4,
        "max_model_len": 512,
        "token_strs": ["<s>", "a", "<0xC3>", "<0xA9>"],  # as the vocabulary spells them
    }
    _, answer = await server.post(f"{prefix}/tokenize", {"prompt": ["a", "bc"], "add_special_tokens": False})
    assert (answer["tokens"], answer["count"]) == ([[97], [98, 99]], [1, 2])
    _, answer = await server.post(f"{prefix}/tokenize", {"messages": HI})
    assert bytes(answer["tokens"]) == b"user: hi\nassistant: "
    assert await server.post(f"{prefix}/detokenize", {"tokens": [256, 97, 195, 169]}) == (
        200,
        {"text": "aé", "prompt": "aé"},
    )
    _, answer = await server.post(
        f"{prefix}/detokenize", {"tokens": [[97], [256]], "skip_special_tokens": False}
    )
    assert answer["text"] == ["a", "<s>"]


async def test_models_and_information(server: Server) -> None:
    card = {
        "id": "org/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "loom",
        "root": "org/tiny",
        "parent": None,
        "max_model_len": 512,
    }
    assert await get(server, "/v1/models") == (200, {"object": "list", "data": [card]})
    assert await get(server, "/v1/models/org/tiny") == (200, card)
    assert (await get(server, "/v1/models/other"))[0] == 404
    for path in ("/model_info", "/get_model_info"):
        assert (await get(server, path))[1]["tokenizer_path"] == "/models/tiny"
    for path in ("/server_info", "/get_server_info"):
        status, info = await get(server, path)
        assert status == 200 and info["device"] == "cpu"
        assert info["internal_states"][0]["scheduler"]["waiting"] == 2
        assert info["max_total_num_tokens"] == 1600  # 100 pages of 16
    assert "version" in (await get(server, "/version"))[1]


async def test_flush_only_when_idle(server: Server) -> None:
    assert (await server.post("/flush_cache?timeout=30"))[0] == 200
    assert (await get(server, "/flush_cache"))[0] == 200
    assert server.engine.flushed == 2
    server.engine.manual = True
    task = asyncio.create_task(server.post(CHAT, {"messages": HI}))
    await until(lambda: bool(server.engine.live))
    assert (await server.post("/flush_cache"))[0] == 400
    assert await server.post("/abort_request", {"abort_all": True}) == (200, {"success": True, "aborted": 1})
    assert (await task)[1]["choices"][0]["finish_reason"] == "abort"


async def test_abort_of_a_request_with_several_prompts(server: Server) -> None:
    server.engine.manual = True
    task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": ["a", "b"], "rid": "both"}))
    await until(lambda: len(server.engine.live) == 2)
    assert await server.post("/abort_request", {"rid": "both"}) == (200, {"success": True, "aborted": 2})
    assert (await task)[0] == 200


async def test_abort_of_many_passes_over_those_that_are_gone(server: Server) -> None:
    server.engine.manual = True
    task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": ["a", "b"], "rid": "both"}))
    await until(lambda: len(server.engine.live) == 2)
    ended = await server.post("/abort_requests", {"request_ids": ["gone", "both"]})
    assert ended == (200, {"success": True, "aborted": 2})
    assert (await task)[0] == 200
    assert await server.post("/abort_requests", {"request_ids": []}) == (200, {"success": True, "aborted": 0})
    assert (await server.refused("/abort_requests", {"request_ids": None}))["param"] == "request_ids"


async def test_the_tokenizer_is_described(server: Server) -> None:
    status, told = await get(server, "/tokenizer_info")
    assert status == 200
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert told["chat_template"] == server.service.loaded.template.source


async def test_the_model_answers_to_its_root(server: Server) -> None:
    root = (await get(server, "/v1/models"))[1]["data"][0]["root"]
    status, answer = await server.post(COMPLETIONS, {"model": root, "prompt": "a", "max_tokens": 1})
    assert (status, answer["model"]) == (200, "org/tiny")


# -- health ------------------------------------------------------------------------------------------


async def test_a_starting_server_says_how_far_it_is(start: Start) -> None:
    server = await start(ready=False)
    server.service.health = Health(Phase.STARTING, "weights", 0.4321, seconds_left=12.34)
    assert await get(server, "/health") == (
        503,
        {"status": "starting", "stage": "weights", "progress": 0.432, "reason": None, "seconds_left": 12.3},
    )
    for method, path in ((route.method, route.path) for route in TABLE):
        if path not in ALWAYS_THERE and not path.startswith((*ON_DISK, "/page/")):
            body = {"messages": HI, "prompt": "a", "text": "a", "tokens": [1], "abort_all": True}
            body |= {"input": "a", "max_tokens": 1}
            if path in ("/tokenize", "/v1/tokenize"):
                del body["messages"]
            if path == "/v1/responses":
                body = {"input": "a"}
            if path == CHAT + "/batch":
                body = {"messages": [HI]}
            async with server.http.request(
                method, path.replace("{id:.+}", "x").replace("{id}", "x"), json=body
            ) as response:
                assert response.status == 503, (path, await response.text())
                assert "weights" in message(await response.json())
                assert "Retry-After" in response.headers
    assert "loom_ready 0" in await server.text("/metrics")


async def test_a_draining_server_takes_nothing_new_and_finishes_the_rest(server: Server) -> None:
    server.engine.manual = True
    task = asyncio.create_task(server.post(CHAT, {"messages": HI}))
    await until(lambda: bool(server.engine.runs))
    server.service.health = Health(Phase.DRAINING, "draining", 1.0, "The server is shutting down.")
    assert (await get(server, "/health"))[0] == 503
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"}), (GENERATE, {"text": "a"})):
        assert (await server.post(path, body))[0] == 503
    run = server.engine.runs[0]
    run.push(0, run.piece(0, 1))
    assert (await task)[1]["choices"][0]["message"]["content"] == "Hel"


async def test_health_generate_runs_a_token_within_a_deadline(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await get(server, "/health_generate") == (200, {"status": "ok"})
    assert server.engine.runs[0].job.max_tokens == 1
    monkeypatch.setattr("app.api.admin.admin.HEALTH_SECONDS", 0.02)
    server.engine.manual = True
    assert (await get(server, "/health_generate"))[0] == 503
    assert server.engine.runs[1].aborted


# -- around every handler ----------------------------------------------------------------------------


async def test_without_the_key_every_route_is_closed_but_the_open_ones(start: Start) -> None:
    server = await start(ServeConfig(api_key=("s3cret",)))
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer s3cre"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
        {"x-api-key": "nope"},
        {"x-api-key": "schlüssel"},
    ]
    paths = [(route.method, route.path.replace("{id:.+}", "x").replace("{id}", "x")) for route in TABLE] + [
        ("GET", "/nope"),
        ("PUT", CHAT),
    ]
    for method, path in paths:
        for headers in wrong:
            async with server.http.request(method, path, headers=headers) as response:
                if path in (opened := {"/": 200, "/health": 200, "/metrics": 200, "/page/x": 404}):
                    assert response.status == opened[path]
                else:
                    assert response.status == 401, path
                    answer = await response.json()
                    assert message(answer)
                    if isinstance(answer.get("error"), dict):
                        assert answer["error"].get("code", "invalid_api_key") == "invalid_api_key"
    for headers in (
        {"Authorization": "Bearer s3cret"},
        {"authorization": "bearer s3cret"},
        {"x-api-key": "s3cret"},
    ):
        async with server.http.get("/v1/models", headers=headers) as response:
            assert response.status == 200


async def test_cors(start: Start) -> None:
    server = await start(ServeConfig(api_key=("k",)))
    asked = "authorization,content-type,x-stainless-lang,x-request-id"
    headers = {
        "Origin": "http://a",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }
    async with server.http.options(CHAT, headers=headers) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == asked
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    async with server.http.options(CHAT) as response:
        assert "X-Stainless-Lang" in response.headers["Access-Control-Allow-Headers"]
    async with server.http.post(CHAT, json={}) as response:
        assert response.status == 401 and response.headers["Access-Control-Allow-Origin"] == "*"


async def test_request_id_is_echoed_unless_it_could_forge(server: Server) -> None:
    async def echoed(**headers: str) -> str:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with server.http.get("/health", headers=names) as response:
            return response.headers["X-Request-Id"]

    assert await echoed(x_request_id="abc-1") == "abc-1"
    assert await echoed(x_correlation_id="corr") == "corr"
    assert (await echoed()).startswith("req_")
    assert (await echoed(x_request_id="a b")).startswith("req_")
    assert (await echoed(x_request_id="x" * 200)).startswith("req_")
    assert (await echoed(x_request_id="ünï")).startswith("req_")
    async with server.http.post(
        CHAT, json={"messages": HI, "stream": True}, headers={"x-request-id": "s"}
    ) as response:
        assert response.headers["X-Request-Id"] == "s"


async def test_one_log_line_per_request_that_cannot_be_forged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "app.http"):
        await get(server, "/a%0d%0aINFO forged%1b[31m")
        await get(server, "/health")
        await server.post(CHAT, {"messages": HI})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("GET /a\\r\\nINFO forged\\x1b[31m 404 ")
    assert lines[1].startswith(f"POST {CHAT} 200 ")


async def test_routes_that_are_not_there(server: Server) -> None:
    assert (await get(server, "/v1/nothing"))[1]["error"]["code"] == "unknown_url"
    async with server.http.get(CHAT) as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


RAW = [
    (b"NONSENSE\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: \x00\r\n\r\n", b"400"),
    (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400"),
    (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"400",
    ),
    (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
    (b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}", b"417"),
]


async def test_what_is_no_http_is_answered_in_the_same_shape(server: Server) -> None:
    for data, status in RAW:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == status, (data[:60], head)
        assert b"\r\nServer: loom\r\n" in head, "no version of what is used"
        size = int(head.lower().split(b"content-length: ")[1].split()[0])
        error = json.loads(await reader.readexactly(size))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        writer.close()
    assert (await get(server, "/health"))[0] == 200


async def test_expect_continue(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b'{"prompt":"a"}')
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_body_in_a_hundred_thousand_chunks(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    body = b'{"prompt":"a"' + b" " * 100_000 + b"}"
    for at in range(0, len(body), 10_000):
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body[at : at + 10_000]))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_whoever_asks_whether_there_is_a_server_is_told(start: Start) -> None:
    """Claude Code and Ollama send HEAD / before anything else, without a key."""
    server = await start(ServeConfig(api_key=("secret",)))
    async with server.http.head("/") as response:
        assert response.status == 200 and not await response.read()
    async with server.http.get("/") as response:
        assert response.status == 200 and (await response.json())["openapi"] == "/openapi.json"
