"""Jobs, their options and their pieces: the interface between HTTP and the engine."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from app.parsers.base import Content, Event
from app.text.repetition import Repetition
from core.grammar import GrammarSpec
from core.plan import PromptLogprobs, RowLogprobs
from core.request import Request, SamplingParams, State
from core.types import Finish, Floats, Ints, RootKey


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the text that is made of the tokens."""

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop: bool = False
    """Leave the matched stop in the text."""
    skip_special_tokens: bool = True
    repetition: Repetition | None = None
    """When to stop a model that repeats itself."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes of a prompt that are to stay in the cache for a while, if there is room."""

    owner: str = ""
    """The tenant whose share of the pool they count against."""
    marks: tuple[tuple[int | None, float], ...] = ()
    """(characters of a prompt that is text, or None: all of it; seconds)."""


class BeamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to search for the `n` likeliest continuations (`app/engine/beam_search.py`)."""

    length_penalty: float = 1.0
    include_end: bool = False
    """The end of text is one of the tokens of an answer."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it, `n` times.

    `sampling.max_tokens`, `sampling.seed` and the end-of-sequence ids in `sampling.stop_ids` are
    filled in by the engine from `max_tokens` (None: all that fits), `seed` (None: drawn; choice i
    gets seed + i) and `ignore_eos`.
    """

    id: str
    prompt: str | Ints
    """Text to encode, or token ids to take as they are."""
    embeds: Floats | None = None
    """Embeddings of the first n ids, float32 [n, hidden]: these ids are placeholders then, and `root` is the
    job's own."""
    sampling: SamplingParams = SamplingParams()
    text: TextOptions = TextOptions()
    max_tokens: int | None = None
    cut_to_fit: bool = False
    """`max_tokens` is only an upper bound: where the context has less room, all that fits is generated."""
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    add_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    allowed_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None: any may."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated, as the tokens they are encoded to."""
    truncate_prompt: int | None = None
    """Keep only the last tokens of a longer prompt."""
    truncate_end: bool = False
    """`truncate_prompt` keeps the first tokens instead."""
    priority: int = 0
    root: RootKey = RootKey()
    owner: str = ""
    """The tenant that may abort the job and read its timings, and the caller to which fair scheduling charges
    it. Tenants may share a `root`."""
    keep: Keep | None = None
    prompt_param: str = "prompt"
    """The field that an error about the prompt names: `messages` for chat."""
    suffix: str = ""
    """The text that is to follow the generated one, where the prompt is text and the model has marks for it
    (`app/text/infill.py`)."""
    single_tokens: bool = False
    """A piece has at most one token, for readers that end the answer at an exact token. Else all tokens of a
    step are one piece: with drafts there are several."""
    beam: BeamOptions | None = None
    """Beam search instead of sampling; of `sampling` only what is reported applies."""
    replica: int | None = None
    """Which replica is to take it; None: it is chosen (`app/engine/replicas.py`)."""
    due: float = 0.0
    """Time by which the first token has to be there, on the engine's clock; 0: any. The job is refused if it
    could not be."""
    deadline: float = inf
    """Time on the same clock at which the job fails if it is still unfinished."""
    continues: bool = False
    """Part of an answer under way: taken while draining too."""
    resumes: bool = False
    """The job continues an answer that ran before: its request waits in front of all others, and the queue's
    limits do not apply to it."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """The newly certain part of one choice: text that no stop string can take back, and its tokens.

    `tokens` are those confirmed since the last piece; their text may come later (half a character,
    a possible stop string). `logprobs` is aligned with `tokens`, None unless requested. The last
    piece has `finish`; nothing follows it.
    """

    text: str
    tokens: list[int]
    logprobs: list[RowLogprobs] | None = None
    finish: Finish | None = None
    events: list[Event] | None = None
    """Events that the parsers found in the text; None where they found only content, or nothing parsed it."""
    calls: int = 0
    """Number of the choice's tool calls that are complete; set in the last piece."""

    def parsed(self) -> list[Event]:
        """The text as events."""
        if self.events is not None:
            return self.events
        return [Content(self.text)] if self.text else []


Sink = Callable[[int, Piece], None]
"""Called on the loop with (choice index, piece); must neither block nor raise."""


class DraftCounts(NamedTuple):
    """Counts of speculative decoding for a choice: steps that verified drafts, the drafts that they verified,
    and those of them that are in the answer."""

    steps: int
    drafted: int
    accepted: int


class Run(Protocol):
    """A job under way. Owner: event loop."""

    prompt: Ints
    params: SamplingParams
    """Parameters of every choice, with what the engine has filled in."""
    choices: int

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were found in the cache; known once choice 0 has produced a piece."""
        ...

    @property
    def output_tokens(self) -> int:
        """Tokens that the engine made for all choices so far: where it ran ahead of an end, a few more than
        the client gets."""
        ...

    @property
    def first_token_at(self) -> float:
        """When the first choice had its first token, on the engine's clock; 0 before."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens in all choices so far; 0 where they are not parsed."""
        ...

    def drafts(self, index: int) -> DraftCounts | None:
        """Counts of one choice's drafts so far; None where the engine does not speculate."""
        ...

    def request(self, index: int) -> Request:
        """The engine's request for one choice; where its reasoning was cut, the first of two."""
        ...

    def finish(self, index: int) -> Finish | None:
        """How one choice ended for its client; None before."""
        ...

    def count(self, *states: State) -> int:
        """Choices that the scheduler has in one of the states."""
        ...

    def kept(self, seconds: float) -> int:
        """Tokens of the prompt that a mark of `Job.keep` keeps in the cache for `seconds`."""
        ...

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """Log-probabilities of the prompt, ascending by `start`; complete once choice 0 has made a piece."""
        ...

    def hidden(self, index: int) -> list[Floats]:
        """Hidden states of one choice as steps gave them, float32 [n, width] each; complete with its last
        piece."""
        ...

    def hidden_from(self, index: int) -> int:
        """Position of the token that the first of the hidden states belongs to."""
        ...

    def experts(self, index: int) -> list[Ints]:
        """Experts chosen for one choice as steps gave them, int32 [n, layers, experts per token] each;
        complete with its last piece."""
        ...

    @property
    def stopped(self) -> Finish | None:
        """How the job was aborted, also where its choices had ended by then; None: it was not."""
        ...

    async def wait(self) -> None:
        """Wait until every choice has had its last piece."""
        ...

    def abort(self) -> None:
        """Free every unfinished choice within a step; each still gets its last piece."""
        ...

    def end(self, index: int) -> None:
        """`abort` for one choice."""
        ...


class Generator(Protocol):
    """Starts jobs."""

    async def start(self, job: Job, sink: Sink) -> Run:
        """Encode, check, queue. Raises `RequestError`, `Overloaded` or `Unavailable`, in which
        case nothing was queued. Cancelling it queues nothing."""
        ...
