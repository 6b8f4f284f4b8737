"""Answers of `/generate`: whole, and as cumulative events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from app.api.request.experts import check_experts, experts
from app.api.request.hidden import check_states, states
from app.api.request.logprobs import Entry, Namer, output_entries, prompt_entries, token_details
from app.api.request.schema import NativeBody
from app.engine.job import DraftCounts, Job, Piece, Run
from app.http.delivery import Frames
from app.http.reply import encode_long, pieces
from app.service import Loaded
from core.types import Finish, FinishReason

_encode = msgspec.json.Encoder().encode

_END = b"}}\n\n"
"""End of an event; `meta_info` is its last field."""

SMALL = 64 * 1024
"""Bytes up to which every piece gets its event."""
GROWTH = 16
"""Beyond `SMALL` an event waits until a sixteenth is new. Every event repeats all before it: without
this, 64 choices of 1,000 tokens with 20 log-probabilities each are 25 GB of events."""


def meta_info(id: str, run: Run, choice: int, tokens: int, finish: Finish | None) -> dict[str, object]:
    """SGLang's `meta_info` of a `choice` of the run, with this many output `tokens`."""
    meta: dict[str, object] = {
        "id": id,
        "finish_reason": None if finish is None else _finish(finish, tokens),
        "prompt_tokens": len(run.prompt),
        "completion_tokens": tokens,
        "cached_tokens": run.cached,
    }
    if run.params.support:
        meta["output_token_sampling_mask_length"] = tokens
    if finish is not None and (drafts := run.drafts(choice)) is not None:
        meta |= _speculation(drafts)
    return meta


def _speculation(drafts: DraftCounts) -> dict[str, object]:
    """How drafts of a complete choice were accepted. Its length is that of the steps that verified any."""
    steps, drafted, accepted = drafts
    return {
        "spec_accept_rate": accepted / drafted if drafted else 0.0,
        "spec_accept_length": (steps + accepted) / steps if steps else 0.0,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_verify_ct": steps,
    }


def _finish(finish: Finish, tokens: int) -> dict[str, object]:
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": tokens}
    if finish.reason is FinishReason.ABORT:
        return {"type": "abort", "message": finish.message or "Aborted"}
    return {"type": finish.reason.value, "matched": finish.matched}


class NativeFrames(Frames[Any]):
    """`Frames` of `/generate`: every event has everything so far. Owner: event loop.

    Encoded pieces of a string or list, joined, are the encoded whole; so each piece is encoded once
    and only copied from then on. The prompt's log-probabilities are in the last event alone. All
    events together are bounded by `GROWTH` times the last, beyond `SMALL` for each token.
    """

    def __init__(
        self, body: NativeBody, loaded: Loaded, jobs: Sequence[Job], single: bool, runs: Sequence[Run]
    ) -> None:
        """`single`: the answer is one object, not a list. Raises as `check_states` does."""
        check_states(runs, jobs, loaded)
        check_experts(runs, jobs, loaded)
        self._body = body
        self._jobs = jobs
        self._runs = runs
        self._namer = Namer(loaded.tokenizer)
        self._n = jobs[0].n
        self._single = single
        self._wanted = jobs[0].sampling.wants_logprobs
        """Events have lists with an entry for each token."""
        total = len(jobs) * self._n
        self._tokens: list[list[int]] = [[] for _ in range(total)]
        self._texts = [bytearray() for _ in range(total)]
        self._logprobs: list[dict[str, bytearray]] = [{} for _ in range(total)]
        self._ends: dict[int, Finish] = {}
        self._sizes = [0] * total
        """Bytes of text and log-probabilities in each choice's last event."""

    # -- as a whole --------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Piece]) -> Any:
        """See `Frames.whole`."""
        listed = [self._object(index, piece) for index, piece in enumerate(pieces)]
        return listed[0] if self._single else listed

    def _object(self, index: int, piece: Piece) -> dict[str, object]:
        meta = self._meta(index, len(piece.tokens), piece.finish)
        if self._wanted:
            meta |= self.output_lists(piece) | self.input_logprobs(index)
        meta |= self.given(index, len(piece.tokens))
        return {"text": piece.text, "output_ids": piece.tokens, "meta_info": meta}

    def given(self, index: int, tokens: int) -> dict[str, object]:
        """Requested tensors of a complete choice with that many tokens: hidden states as lists of vectors,
        experts as bytes."""
        which, choice = divmod(index, self._n)
        run, found = self._runs[which], dict[str, object]()
        if self._jobs[which].sampling.hidden != "none":
            found["hidden_states"] = states(run, choice, tokens)
        if (chosen := experts(run, choice, tokens)) is not None:
            found["routed_experts"] = chosen
        return found

    def _meta(self, index: int, tokens: int, finish: Finish | None) -> dict[str, object]:
        """`meta_info` without log-probabilities."""
        which, choice = divmod(index, self._n)
        id = self._jobs[which].id if self._n == 1 else f"{self._jobs[which].id}-{choice}"
        return meta_info(id, self._runs[which], choice, tokens, finish)

    def output_lists(self, piece: Piece) -> dict[str, list[object]]:
        """Lists with an entry for each of the piece's tokens."""
        more = token_details(self._jobs[0].sampling, piece.logprobs or ())
        if not self._body.return_logprob:
            return more
        return self._lists("output", list(output_entries(piece.tokens, piece.logprobs or ()))) | more

    def input_logprobs(self, index: int) -> dict[str, list[object]]:
        """Lists about the prompt's tokens from `logprob_start_len` on, if requested."""
        job, run = self._jobs[index // self._n], self._runs[index // self._n]
        if job.sampling.prompt_logprobs < 0:
            return {}
        return self._lists("input", prompt_entries(run, job.sampling.prompt_logprobs_start))

    def _lists(self, side: str, entries: list[Entry]) -> dict[str, list[object]]:
        fields: dict[str, list[object]] = {
            f"{side}_token_logprobs": [self._tuple(entry.value, entry.token) for entry in entries]
        }
        best = self._body.top_logprobs_num or 0
        if best:
            fields[f"{side}_top_logprobs"] = [self._top(entry, slice(best)) for entry in entries]
        if self._body.token_ids_logprob:
            fields[f"{side}_token_ids_logprobs"] = [self._top(entry, slice(best, None)) for entry in entries]
        return fields

    def _top(self, entry: Entry, part: slice) -> list[object] | None:
        if entry.value is None:
            return None
        return [self._tuple(value, token) for token, value in entry.top[part]]

    def _tuple(self, value: float | None, token: int) -> list[object]:
        return [value, token, self._namer.text(token) if self._body.return_text_in_logprobs else None]

    # -- as a stream -------------------------------------------------------------------------------

    def delta(self, index: int, piece: Piece) -> bytes | None:
        """See `Frames.delta`. The last piece is sent by `finish`."""
        self._tokens[index] += piece.tokens
        self._texts[index] += _encode(piece.text)[1:-1]
        if self._wanted and piece.logprobs:
            known = self._logprobs[index]
            for name, listed in self.output_lists(piece).items():
                encoded = known.setdefault(name, bytearray())
                if encoded:
                    encoded += b","
                encoded += encode_long(listed)[1:-1]
        if piece.finish is not None:
            return None
        size = len(self._texts[index]) + sum(map(len, self._logprobs[index].values()))
        if size > SMALL and size - self._sizes[index] < size // GROWTH:
            return None
        self._sizes[index] = size
        return self._event(index, None)

    def finish(self, index: int, piece: Piece) -> bytes:
        """See `Frames.finish`."""
        assert piece.finish is not None
        self._ends[index] = piece.finish
        return self._event(index, piece.finish)

    def rest(self) -> Iterator[bytes]:
        """See `Frames.rest`. One more event per choice, with its hidden states or routed experts: they are
        too large to repeat in every cumulative event."""
        for index, finish in self._ends.items():
            given = self.given(index, len(self._tokens[index]))
            if given:
                yield self._event(index, finish)[: -len(_END)]
                for name, value in given.items():
                    yield b',"%b":' % name.encode()
                    yield from pieces(value)
                yield _END

    def _event(self, index: int, finish: Finish | None) -> bytes:
        tokens = self._tokens[index]
        meta = self._meta(index, len(tokens), finish)
        if finish is not None and self._wanted:
            meta |= self.input_logprobs(index)
        logprobs = b"".join(b',"%b":[%b]' % (k.encode(), bytes(v)) for k, v in self._logprobs[index].items())
        return b'data: {"text":"%b",%b"output_ids":%b,"meta_info":%b%b%b' % (
            bytes(self._texts[index]),
            b"" if self._single else b'"index":%d,' % index,
            _encode(tokens),
            encode_long(meta)[:-1],
            logprobs,
            _END,
        )
