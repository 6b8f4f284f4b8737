"""Names of the one model: those the operator gave, its path, and the clients' word for whatever is served."""

from __future__ import annotations

import msgspec
import pytest

from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate

HI = [{"role": "user", "content": "hi"}]
NAMES = ("first", "second", "third")

DIALECTS = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v2/chat": {"messages": HI, "max_tokens": 2},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 2}},
    "/v1/chat/completions/render": {"messages": HI},
}


@pytest.fixture
def named(server: Server) -> Server:
    card = msgspec.structs.replace(CARD, name=NAMES[0], aliases=NAMES[1:])
    server.service.ready(make_loaded(card, ByteTokenizer(), JoinTemplate(), server.engine))
    return server


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_name_is_served_in_every_dialect(named: Server, path: str) -> None:
    names = [*NAMES, "default"] + ["default:latest", "second:latest"] * path.startswith("/api/")
    for name in names:
        answer = await named.ask(path, {**DIALECTS[path], "model": name})
        if "model" in answer and not path.startswith("/api/"):  # Ollama's clients get their own word back
            assert answer["model"] == "first"
    status, answer = await named.post(path, {**DIALECTS[path], "model": "fourth"})
    assert status == 404, answer


async def test_all_names_are_listed(named: Server) -> None:
    listed = (await named.get("/v1/models"))["data"]
    assert [each["id"] for each in listed] == list(NAMES)
    for asked, told in [*zip(NAMES, NAMES, strict=True), ("default", "first")]:
        assert (await named.get(f"/v1/models/{asked}"))["id"] == told
    answer = await named.get("/v1/models", headers={"Anthropic-Version": "2023-06-01"})
    assert (answer["first_id"], answer["last_id"]) == ("first", "third")
    assert [each["name"] for each in (await named.get("/api/tags"))["models"]] == list(NAMES)
