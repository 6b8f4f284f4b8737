"""A fake executor whose "attention" reads tokens through the page table.

The pool stores token ids where a device would store K and V. A row's next token is a hash of every
token that its page-table row refers to, so a wrong page, a lost write, a stale prefix or a
page reused too early changes the output. `oracle` computes the same from the plain token list.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from core.command import Command, CommandDone
from core.executor import Capabilities
from core.mailbox import Outbox
from core.plan import MOST_SAVES, Chunk, PromptLogprobs, RowLogprobs, StepFailure, StepPlan, StepResult
from core.types import Floats, Ints, NDArray64

POISON = -7
"""Initial content of a page: reading it is an error."""

REJECTED = -8
"""Content of cells of rejected draft tokens: reading it is an error too."""


START = (0, 17)
"""The state of a slot before the first token."""


def advance(state: tuple[int, int], token: int) -> tuple[int, int]:
    """The state behind one token more."""
    return state[0] + 1, (state[1] * 1_000_003 + token + 1) % 2_147_483_647


def next_token(tokens: Iterable[int] | Ints, vocab_size: int) -> int:
    """The model: a polynomial hash of the whole prefix."""
    state = 17
    for token in tokens.tolist() if isinstance(tokens, np.ndarray) else tokens:
        state = (state * 1_000_003 + token + 1) % 2_147_483_647
    return state % vocab_size


def mark(adapter: str) -> int:
    """Added to the tokens that are stored with an adapter: its KV is of no use to another one."""
    return zlib.crc32(adapter.encode()) << 24 if adapter else 0


def oracle(
    prompt: Iterable[int],
    length: int,
    vocab_size: int,
    stop: frozenset[int] = frozenset(),
    adapter: str = "",
) -> list[int]:
    """The output that any schedule must produce."""
    tokens = [token + mark(adapter) for token in prompt]
    output: list[int] = []
    while len(output) < length:
        output.append(next_token(tokens, vocab_size))
        tokens.append(output[-1] + mark(adapter))
        if output[-1] in stop:
            break
    return output


class FakeExecutor:
    """Runs plans in `complete`, or as soon as they are submitted (`eager`).

    The step `fail_at` fails; logits of `nan_slots` are reported as not finite. If a plan allows drafts, the
    numbers of drafted and of accepted tokens are random, with `seed`.
    """

    def __init__(
        self, capabilities: Capabilities, *, eager: bool = False, fail_at: int = -1, seed: int = 0
    ) -> None:
        self._capabilities = capabilities
        pages = -(-capabilities.context_length // capabilities.page_size)
        self.pool = np.full((capabilities.num_pages, capabilities.page_size), POISON, np.int64)
        self.table = np.zeros((capabilities.max_rows + 1, pages), np.int32)
        self.length = np.zeros(capabilities.max_rows + 1, np.int64)
        self.limit = np.zeros(capabilities.max_rows + 1, np.int64)
        self.cell = np.zeros(capabilities.max_rows + 1, np.int64)
        self.pending: deque[StepPlan] = deque()
        self.done: Outbox[StepResult | StepFailure | CommandDone] = Outbox()
        self.commands: list[Command] = []
        self.holds = False
        """Commands wait for `carry_out`."""
        self.refuse: str | None = None
        self.plans: list[StepPlan] = []
        self.eager = eager
        self.fail_at = fail_at
        self.nan_slots: set[int] = set()
        self.seconds = self.token_seconds = 0.0
        """Seconds of each step, and of each token of its chunks beyond that."""
        self._rng = random.Random(seed)
        self.logprob_slots: dict[int, int] = {}
        self.hidden_slots: dict[int, bool] = {}
        self.routed_slots: dict[int, bool] = {}
        self.undrafted: set[int] = set()
        """Slots whose drafts are never verified."""
        self._proposed = False
        self.host: dict[str, str] = {}
        """Adapters that were read, with their paths."""
        self.placed: dict[int, str] = {}
        """Adapters by place."""
        self.broken: dict[str, str] = {}
        """The reason why an adapter cannot be read, by path."""
        self._row_place = np.full(capabilities.max_rows + 1, -1, np.int64)
        self._submitted_place = self._row_place.copy()
        self._places_read: dict[int, set[int]] = {}
        """Places of the rows of each pending step."""
        self.states: dict[int, tuple[int, int]] = {}
        """Length and hash of what a slot's linear attention has seen, by slot."""
        self.checkpoints = {0: START}
        self._saves: dict[int, dict[int, int]] = {}
        """Checkpoints of each slot's states, by the number of tokens that the state is behind."""
        self.closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def start(self, wake: Callable[[], None]) -> None:
        self.done.listen(wake)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.pending.append(plan)
        for new in plan.new_slots:
            self._submitted_place[new.slot] = new.place
        slots = [*plan.decode_slots.tolist(), *(chunk.slot for chunk in plan.chunks)]
        self._places_read[plan.step] = read = {int(self._submitted_place[slot]) for slot in slots} - {-1}
        assert plan.adapters == bool(read)
        if self.eager:
            self.complete()

    def complete(self, count: int = 1) -> None:
        """Run the oldest `count` submitted steps."""
        for _ in range(count):
            plan = self.pending.popleft()
            if 0 <= self.fail_at < plan.step:
                continue  # what follows a failure is dropped
            if plan.step == self.fail_at:
                self.done.put(StepFailure(plan.step, "injected"))
            else:
                self.done.put(self._run(plan))

    def command(self, command: Command) -> None:
        """Answered at once, unless `holds`; with the error `refuse` if it is set."""
        self.commands.append(command)
        if command.action == "adapter_place":
            assert command.adapter in self.host, "an adapter is placed that is not in host memory"
            assert not any(command.place in self._places_read[plan.step] for plan in self.pending)
            self.placed.pop(command.place, None)
        if not self.holds:
            self.carry_out()

    def carry_out(self, command: Command | None = None) -> None:
        """Answer the last command, or this one."""
        command = command or self.commands[-1]
        self.done.put(CommandDone(command.id, self.refuse or self._adapt(command)))

    def _adapt(self, command: Command) -> str | None:
        match command.action:
            case "adapter_read" if command.path in self.broken:
                return self.broken[command.path]
            case "adapter_read":
                limits = self._capabilities.adapters
                assert (
                    limits is not None and len(self.host) < limits.host and command.adapter not in self.host
                )
                self.host[command.adapter] = command.path
            case "adapter_place":
                assert 0 <= command.place < self._capabilities.adapters.places
                self.placed[command.place] = command.adapter
            case "adapter_drop":
                self.host.pop(command.adapter, None)
        return None

    def results(self) -> list[StepResult | StepFailure | CommandDone]:
        return self.done.drain()

    def close(self) -> None:
        self.closed = True

    def _run(self, plan: StepPlan) -> StepResult:
        capabilities = self._capabilities
        assert plan.num_tokens <= capabilities.max_step_tokens
        assert plan.num_samples <= max(capabilities.max_samples, capabilities.max_rows)
        assert self._proposed or not plan.drafts, "the step before had no drafter"
        self._proposed = plan.proposes
        for new in plan.new_slots:
            self.undrafted -= {new.slot}
            self.undrafted |= {new.slot} if new.grammar or new.params.processor else set()
            self.length[new.slot] = new.cached
            self._saves[new.slot] = {}
            if capabilities.checkpoints is not None:
                self.states[new.slot] = self.checkpoints[new.checkpoint]
                assert self.states[new.slot][0] == new.cached, "states of another length"
            self.limit[new.slot] = new.limit
            self._row_place[new.slot] = new.place
            self.logprob_slots[new.slot] = new.params.logprobs
        writes = plan.page_writes
        self.table[writes.slots, writes.indices] = writes.pages
        before = self.length.copy()
        assert len({save.checkpoint for save in plan.saves}) == len(plan.saves), "two write one checkpoint"
        before_step = {slot: self._saves[slot] for slot in {save.slot for save in plan.saves}}
        self._saves |= {slot: {} for slot in before_step}
        for save in plan.saves:
            self._saves[save.slot][save.tokens] = save.checkpoint
            if before_step[save.slot].get(save.tokens) != save.checkpoint:
                self.checkpoints[save.checkpoint] = REJECTED, 0
        assert max(Counter(save.slot for save in plan.saves).values(), default=0) <= MOST_SAVES
        self._check_common(plan)
        rows, queries = self._decode(plan)
        for chunk in plan.chunks:
            assert self.length[chunk.slot] == chunk.start
            self._store(chunk.slot, chunk.start, chunk.tokens)
        ends = [chunk.slot for chunk in plan.chunks if chunk.samples]
        rows += [[self._sample(slot)] for slot in ends]
        if not capabilities.max_drafts:
            passed = all(self.checkpoints[save.checkpoint][0] == save.tokens for save in plan.saves)
            assert passed, "a checkpoint of tokens that the step does not pass"
        slots = [
            slot for slot, made in zip([*plan.decode_slots.tolist(), *ends], rows, strict=True) for _ in made
        ]
        tokens = [token for made in rows for token in made]
        logprobs = {
            row: RowLogprobs(
                -0.5, np.arange(self.logprob_slots[slot], dtype=np.int32), np.zeros(0, np.float32)
            )
            for row, slot in enumerate(slots)
            if self.logprob_slots.get(slot, -1) >= 0
        }
        prompt = {chunk.slot: _prompt_logprobs(chunk) for chunk in plan.chunks if chunk.logprobs >= 0}
        counts = np.array([len(made) for made in rows], np.int32)
        drafted = np.array([max(query - 1, 0) for query in queries] + [0] * len(ends), np.int32)
        return StepResult(
            plan.step, np.asarray(tokens, np.int32), logprobs, prompt, hidden=self._hidden(plan, before),
            experts=self._experts(plan, before),
            counts=None if all(len(made) == 1 for made in rows) else counts,
            drafted=drafted if capabilities.max_drafts else None, seconds=self._taken(plan),
        )  # fmt: skip

    def _taken(self, plan: StepPlan) -> float:
        return self.seconds + self.token_seconds * sum(len(chunk.tokens) for chunk in plan.chunks)

    def _decode(self, plan: StepPlan) -> tuple[list[list[int]], list[int]]:
        """The tokens that each decode row accepts, and its query length. All tokens are stored before any row
        reads."""
        left, queries = plan.drafts, []
        for slot in plan.decode_slots.tolist():
            free = int(self.limit[slot] - self.length[slot])
            most = 0 if slot in self.undrafted else plan.query_length - 1
            drafts = self._rng.randint(0, max(min(most, left, free - 1), 0))
            left -= drafts
            queries.append(min(1 + drafts, free))
            assert self.length[slot] + queries[-1] <= plan.keys
            if free > 0:
                rejected = np.full(drafts, REJECTED)
                self._store(slot, int(self.length[slot]), np.asarray([self.cell[slot], *rejected]))
                self.length[slot] -= drafts
        slots = plan.decode_slots.tolist()
        return [self._accept(slot, query) for slot, query in zip(slots, queries, strict=True)], queries

    def _accept(self, slot: int, query: int) -> list[int]:
        """Accepted tokens of a row with query length `query`; its last token is stored already."""
        accepted: list[int] = []
        for _ in range(self._rng.randint(1, query) if query else 0):
            if accepted:
                self._store(slot, int(self.length[slot]), np.asarray(accepted[-1:]))
            accepted.append(self._sample(slot))
            if accepted[-1] < 0:
                break
        return accepted

    def _hidden(self, plan: StepPlan, before: NDArray64) -> dict[int, Floats]:
        """Hidden states: the token and its position, so that a test can identify them."""
        for new in plan.new_slots:
            self.hidden_slots[new.slot] = new.params.hidden in ("output", "all")
        found = {}
        for slot in plan.decode_slots.tolist():
            if self.hidden_slots[slot]:
                found[slot] = np.array(self._fed(slot, before), np.float32).reshape(-1, 2)
        for chunk in plan.chunks:
            n = len(chunk.tokens)
            states = np.array([(t, chunk.start + i) for i, t in enumerate(chunk.tokens)], np.float32)
            requested = states[max(chunk.hidden_start - chunk.start, 0) :]
            by_kind = {
                "first": states[:1],
                "last": states[n - 1 :],
                "all": requested,
                "sum": requested.sum(0, keepdims=True),
            }
            if chunk.hidden != "none":
                found[chunk.slot] = by_kind[chunk.hidden]
        return found

    def _experts(self, plan: StepPlan, before: NDArray64) -> dict[int, Ints]:
        """Routed experts of one layer with two experts: the token and its position."""
        for new in plan.new_slots:
            self.routed_slots[new.slot] = new.params.experts_from >= 0
        found = {}
        for slot in plan.decode_slots.tolist():
            if self.routed_slots[slot]:
                found[slot] = np.array(self._fed(slot, before), np.int32).reshape(-1, 1, 2)
        for chunk in plan.chunks:
            every = [[(t, chunk.start + i)] for i, t in enumerate(chunk.tokens)]
            if chunk.experts:
                found[chunk.slot] = np.array(every[max(chunk.hidden_start - chunk.start, 0) :], np.int32)
        return found

    def _fed(self, slot: int, before: NDArray64) -> list[tuple[int, int]]:
        """(token, position) that a decode row stored in this step and kept."""
        return [self._read(slot, at) for at in range(int(before[slot]), int(self.length[slot]))]

    def _read(self, slot: int, position: int) -> tuple[int, int]:
        page, at = divmod(position, self._capabilities.page_size)
        return int(self.pool[self.table[slot, page], at]) - self._mark(slot), position

    def _mark(self, slot: int) -> int:
        place = int(self._row_place[slot])
        return 0 if place < 0 else mark(self.placed[place])

    def _check_common(self, plan: StepPlan) -> None:
        """The common prefix of a plan must be whole pages, equal in all rows, without a row's last token."""
        count, rest = divmod(plan.common, self._capabilities.page_size)
        assert rest == 0
        if count:
            slots = plan.decode_slots
            assert (self.table[slots, :count] == self.table[slots[0], :count]).all()
            assert (self.length[slots] >= plan.common).all()

    def _store(self, slot: int, start: int, tokens: Ints | np.ndarray) -> None:
        end = start + len(tokens)
        assert end <= self.limit[slot], "a row writes past its limit"
        added, size = self._mark(slot), self._capabilities.page_size
        for position, token in enumerate(np.asarray(tokens).tolist(), start):
            page = self.table.item(slot, position // size)
            assert page > 0, "a row writes to the dump page"
            self.pool[page, position % size] = token if token < 0 else token + added
            if slot in self.states:
                if token >= 0:
                    self.states[slot] = advance(self.states[slot], token + added)
                if (checkpoint := self._saves[slot].get(position + 1, 0)) > 0:
                    self.checkpoints[checkpoint] = self.states[slot] if token >= 0 else (REJECTED, 0)
        self.length[slot] = end

    def _sample(self, slot: int) -> int:
        length = self.length.item(slot)
        pages = -(-length // self._capabilities.page_size)
        seen = self.pool[self.table[slot, :pages]].reshape(-1)[:length]
        assert seen.min(initial=0) >= 0, "a row reads a cell that was not written"
        if slot in self.states:
            state = START
            for each in seen.tolist():
                state = advance(state, each)
            assert self.states[slot] == state, "a state is not that of the slot's tokens"
        token = -1 if slot in self.nan_slots else next_token(seen, self._capabilities.vocab_size)
        self.cell[slot] = max(token, 0)
        return token


def _prompt_logprobs(chunk: Chunk) -> PromptLogprobs:
    """The value of a token is its id, so that a test can identify the reported positions."""
    start = max(chunk.start + 1, chunk.logprobs_start)
    targets = chunk.tokens.tolist()[start - chunk.start :] + ([chunk.target] if chunk.target >= 0 else [])
    named = np.tile(np.array(chunk.logprob_ids, np.int32), (len(targets), 1))
    values, ranks = np.asarray(targets, np.float32), np.ones(len(targets), np.int32)
    return PromptLogprobs(start, values, ranks, named, named.astype(np.float32))
