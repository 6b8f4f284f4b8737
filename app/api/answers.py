"""Bodies to whole answers without a connection: what batches and `app.offline` share with HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from app.api.openai.chat import chat_answer
from app.api.openai.completions import completion_answer
from app.api.pooling.classify import CLASSIFY, classify_answer
from app.api.pooling.embeddings import EMBEDDING, embeddings_answer
from app.api.request.sampling import check_model
from app.api.request.schema import CHAT, COMPLETION
from app.batch.work import Answers
from app.http.body import decode
from app.service import Loaded


async def chat(body: bytes, loaded: Loaded) -> dict[str, object]:
    """What `/v1/chat/completions` answers. `stream` is ignored. Raises `core.errors`."""
    asked = await decode(CHAT, body, loaded.bodies)
    check_model(loaded, asked.model)
    loaded.card.check_task("generate")
    return await chat_answer(asked, loaded)


async def completion(body: bytes, loaded: Loaded) -> dict[str, object]:
    """The same for `/v1/completions`."""
    asked = await decode(COMPLETION, body, loaded.bodies)
    check_model(loaded, asked.model)
    loaded.card.check_task("generate")
    return await completion_answer(asked, loaded)


async def embedding(body: bytes, loaded: Loaded) -> dict[str, object]:
    """The same for `/v1/embeddings`, vectors as JSON."""
    asked = await decode(EMBEDDING, body, loaded.bodies)
    check_model(loaded, asked.model)
    answer = await embeddings_answer(asked, loaded)
    told: Any = answer["data"]
    for each in told:
        if isinstance(each["embedding"], np.ndarray):
            each["embedding"] = msgspec.Raw(msgspec.json.encode(each["embedding"].tolist()))
            await asyncio.sleep(0)  # a long list would be one slice
    return answer


async def classified(body: bytes, loaded: Loaded) -> dict[str, object]:
    """The same for `/v1/classify`."""
    asked = await decode(CLASSIFY, body, loaded.bodies)
    check_model(loaded, asked.model)
    return await classify_answer(asked, loaded)


ANSWERS: Answers = {
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/embeddings": embedding,
    "/v1/classify": classified,
}
"""By endpoint."""
