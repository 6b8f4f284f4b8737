"""Compiles constraints: checked, cached, in threads; costly ones first in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import msgspec

from core.errors import RequestError
from core.grammar import CompiledGrammar, GrammarSpec, TokenRules, TokenTable
from core.helper import Exceeded, Helper
from gpu.grammar.cache import GrammarCache, Key, Refusal
from gpu.grammar.limits import check_text, needs_trial
from gpu.grammar.llguidance_backend import LlguidanceBackend, Source, check_table
from gpu.grammar.schema import Refused
from gpu.grammar.stepper import Grammar
from gpu.grammar.structural_tag_lark import NotInLark
from gpu.grammar.token_rules import RestrictedGrammar, TokenRuleStepper
from gpu.grammar.trial import trial_task
from gpu.grammar.xgrammar_backend import XgrammarBackend

SECONDS = 5.0
"""Wall time of one compile in the helper."""
CACHE_BYTES = 256 * 2**20
THREADS = 2
"""Grammars compiled at once. More would take cores from the launch threads."""

T = TypeVar("T")


class Compiler:
    """`core.grammar.GrammarCompiler` over llguidance, and xgrammar for the structural tags that are not
    translated to llguidance's notation.

    What has a bounded cost is compiled once, in a pool thread; of schemas the cost is estimated from what
    they contain. Anything else is compiled in the helper process first, within 5 s and 1 GB, and if it
    passes again in the thread. Compiling twice is cheaper than sending the result across: half of
    xgrammar's grammars take longer to serialise and read than to compile, and llguidance's cannot be
    serialised.

    Owner: event loop.
    """

    def __init__(
        self,
        table: TokenTable,
        helper: Helper,
        threads: int = 1,
        cache_bytes: int = CACHE_BYTES,
        helper_seconds: float = SECONDS,
    ) -> None:
        """`helper` is closed with this. `threads` is how many the launch thread may use to fill masks.
        Raises `Refused` for a vocabulary without an end or exact bytes."""
        check_table(table)
        self._llguidance = _Later(partial(LlguidanceBackend, table, threads))
        self._xgrammar = _Later(partial(XgrammarBackend, table, threads))
        self._cache = GrammarCache(cache_bytes)
        self._rules = TokenRuleStepper(table.width)
        self._helper, self._seconds = helper, helper_seconds
        self._trials = {tags: _Later(partial(trial_task, table, tags)) for tags in (False, True)}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._pending: dict[Key, _PendingCompile] = {}

    def prepare(self) -> None:
        """Read the vocabulary now, before serving, and not at the first constraint: 1.5 s for 150,000 tokens,
        most of them with the GIL held, and 190 MiB. What is refused here is refused again then."""
        for backend in (self._llguidance, self._xgrammar):
            with contextlib.suppress(Refused):
                backend()

    @property
    def cached_bytes(self) -> int:
        """Size of the cached grammars."""
        return self._cache.size

    async def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See `core.grammar.GrammarCompiler.compile`."""
        key = Key(spec.kind, spec.text, spec.lenient)
        found = self._cache.get(key)
        if found is None:
            found = await self._join(key)
        if isinstance(found, Refusal):
            raise RequestError(found.message, spec.param)
        return found

    async def restrict(
        self, grammar: CompiledGrammar | None, rules: TokenRules, param: str
    ) -> CompiledGrammar:
        """See `core.grammar.GrammarCompiler.restrict`."""
        found = RestrictedGrammar(self._rules, grammar, rules)
        dead = found.allows_nothing() if grammar is None else await self._in_thread(found.allows_nothing)
        if dead:
            constraint = "" if grammar is None else " that the request's other constraint allows"
            raise RequestError(f"'{param}' leaves no token{constraint} for the answer to begin with.", param)
        return found

    def close(self) -> None:
        """Idempotent. Compiles under way in a thread end by themselves."""
        for shared in list(self._pending.values()):
            shared.task.cancel()
        self._helper.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- one compile -------------------------------------------------------------------------------

    async def _join(self, key: Key) -> Grammar | Refusal:
        """Wait for the one task that compiles `key`. It is cancelled with the last request that waits."""
        shared = self._pending.get(key)
        if shared is None:
            shared = self._pending[key] = _PendingCompile(asyncio.ensure_future(self._build(key)))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                shared.task.cancel()  # nothing, where it is done
                if self._pending.get(key) is shared:
                    del self._pending[key]  # whoever comes now must not wait for a cancelled task

    async def _build(self, key: Key) -> Grammar | Refusal:
        found: Grammar | Refusal
        try:
            found = await (self._tag(key) if key.kind == "structural_tag" else self._compile(key))
        except Refused as error:
            found = Refusal(str(error))
        self._cache.put(key, found)
        return found

    async def _tag(self, key: Key) -> Grammar:
        """Compile a structural tag with llguidance if it can be, which takes more schemas and gives the
        better reasons, else with xgrammar."""
        try:
            source = await self._in_thread(lambda: self._tag_source(key))
            made = await self._compile(Key("lark", source.text, source.lenient))
            made.warnings = source.dropped + made.warnings
            return made
        except NotInLark:
            return await self._compile(key)
        except Refused as refused:
            with contextlib.suppress(Refused):
                return await self._compile(key)
            raise refused

    def _tag_source(self, key: Key) -> Source:
        check_text(key.kind, key.text)
        return self._llguidance().tag_source(key.text)

    async def _compile(self, key: Key) -> Grammar:
        made = await self._in_thread(lambda: self._direct(key))
        if made is None:
            await self._try_in_helper(key)
            made = await self._in_thread(lambda: self._compiled(key))
        return made

    def _direct(self, key: Key) -> Grammar | None:
        """The grammar, None when the helper has to try it first. Raises `Refused`."""
        check_text(key.kind, key.text)
        return None if needs_trial(key.kind, key.text) else self._compiled(key)

    def _compiled(self, key: Key) -> Grammar:
        if key.kind == "structural_tag":
            return self._xgrammar().compile(*key)
        return self._llguidance().compile(*key)

    async def _try_in_helper(self, key: Key) -> None:
        """Compile in the helper. Raises `Refused` for what it answers or when it passes its limits."""
        try:
            task = await self._in_thread(self._trials[key.kind == "structural_tag"])
            refusal = await self._helper.run(task, msgspec.msgpack.encode(key), self._seconds)
        except Exceeded as error:
            raise Refused(f"The constraint {error} to compile.") from error
        if refusal:
            raise Refused(refusal.decode())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class _Later(Generic[T]):
    """Makes a value once, in the first thread that calls it. A refusal is kept, too: the next attempt would
    take as long."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: T | Refused | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._make()
                except Refused as refused:
                    self._made = refused
        if isinstance(self._made, Refused):
            raise Refused(str(self._made))
        return self._made


class _PendingCompile:
    """A compile and how many requests wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Future[Grammar | Refusal]) -> None:
        self.task = task
        self.waiting = 0
