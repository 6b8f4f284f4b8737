"""`text_offset` of completions: where in the text each token begins."""

from __future__ import annotations

import pytest

from app.api.request.logprobs import Offsets
from app.engine.job import Piece
from core.types import Finish, FinishReason
from tests.rigs.server import Server
from tests.rigs.tokenizer import BOS, EOS, ByteTokenizer

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "fields", "text", "offsets"),
    [
        ("abc", {}, "abc", [0, 0, 1, 2]),  # the token that begins a text is none of the client's
        ([BOS, 97, EOS, 98], {}, "ab", [0, 0, 1, 1]),
        ([BOS, 97, EOS, 98], {"skip_special_tokens": False}, "<s>a</s>b", [0, 3, 4, 8]),
        ([97, EOS, EOS, EOS], {}, "a", [0, 1, 1, 1]),
        ("aöb", {}, "aöb", [0, 0, 1, 1, 2]),
        ([97, 98], {"return_tokens_as_token_ids": True}, "ab", [0, 1]),
    ],
)
async def test_offsets_of_an_echo_are_places_in_it(
    server: Server, prompt: object, fields: dict[str, object], text: str, offsets: list[int]
) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, **fields}
    _, answer = await server.post(COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def piece(text: str, tokens: list[int], finish: Finish | None = None) -> Piece:
    return Piece(text, tokens, [], finish)


def test_offsets_go_on_behind_the_echo_and_from_piece_to_piece() -> None:
    offsets = Offsets(ByteTokenizer(), skip_special=True)
    assert offsets.echoed([BOS, 97, 98], "ab") == [0, 0, 1]
    assert offsets.made(piece("c", [99, 0xC3])) == [2, 3]  # "ö" in two halves
    assert offsets.made(piece("ö", [0xB6, EOS, 100])) == [3, 4, 4]
    assert offsets.made(piece("de", [101])) == [5]


def test_what_a_stop_cut_off_begins_at_the_end_of_the_text() -> None:
    offsets = Offsets(ByteTokenizer(), skip_special=True)
    end = Finish(FinishReason.STOP, "cd")
    assert offsets.made(piece("ab", [*b"abcd"], end)) == [0, 1, 2, 2]


def test_a_blank_that_the_text_lost_takes_no_room() -> None:
    offsets = Offsets(ByteTokenizer(), skip_special=True)
    assert offsets.echoed([BOS, 32, 97, 98], "ab") == [0, 0, 0, 1]
