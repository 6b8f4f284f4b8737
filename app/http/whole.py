"""Bodies to whole answers without a connection: what batches and `app.offline` share with HTTP."""

from __future__ import annotations

from app.batch.work import Answers
from app.http.body import decode
from app.http.chat import chat_answer
from app.http.completions import completion_answer
from app.http.sampling import check_model
from app.http.schema import CHAT, COMPLETION
from app.service import Loaded


async def chat(body: bytes, loaded: Loaded) -> dict[str, object]:
    """What `/v1/chat/completions` answers. `stream` is ignored. Raises `core.errors`."""
    asked = decode(CHAT, body)
    check_model(loaded, asked.model)
    return await chat_answer(asked, loaded)


async def completion(body: bytes, loaded: Loaded) -> dict[str, object]:
    """The same for `/v1/completions`."""
    asked = decode(COMPLETION, body)
    check_model(loaded, asked.model)
    return await completion_answer(asked, loaded)


ANSWERS: Answers = {"/v1/chat/completions": chat, "/v1/completions": completion}
"""By endpoint."""
