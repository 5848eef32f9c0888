"""Compiled grammars, and the thread that compiles them.

1. `request` asks for the grammar of a request; one that is not compiled yet is compiled on a thread
   of its own, because it takes 1 ms for most schemas and seconds for some;
2. `take_outcomes` returns the outcomes of that thread: the request may run, or the reason why it
   cannot;
3. `start_sequence` copies the grammar for a sequence that gets a slot, on the thread that runs the
   model.

Copies of one matcher share a lexer, and their masks cannot be filled at the same time. A grammar
with many users is compiled again, at most once per thread that fills masks, and its sequences are
shared out (`CompiledGrammar.start_matcher`).

A request's grammar is kept until the request has ended (`release_ended`), and the latest ones
longer, for later requests with the same text (`KEPT_GRAMMARS`).

Bounds: `MAX_WAITING_TEXTS` grammars wait to be compiled. A request is refused if its grammar is not
compiled `COMPILE_LIMIT_SECS` after its turn came; llguidance's own limits end a compilation after
some 2.5 s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.errors import BadRequest, EngineError, GrammarFailed, QueueFull
from baton.runtime.grammar.gated_grammar import GatedGrammar, GateVocabulary
from baton.runtime.grammar.limits import COMPILE_LIMIT_SECS, RANK_LIMITS
from baton.runtime.grammar.reasoning_tracker import tokens_of_answer
from baton.runtime.grammar.sequence_grammar import GrammarLexer, SequenceGrammar
from baton.runtime.grammar.token_constraint import TokenConstraint
from baton.runtime.grammar.token_masks import MaskFiller
from baton.sched.metrics.histogram import Histogram, exponential
from baton.sched.types.plan import AdmittedSeq
from baton.sched.types.reasoning import ReasoningGate

log = logging.getLogger("baton.grammar")

KEPT_GRAMMARS = 256
"""Some 100 kB each in most cases."""
KEPT_CHARS = 4 * 2**20
"""Length of all their texts.

A schema of 75 kB with 1,800 properties takes 8 MB when it is compiled.
"""
MAX_WAITING_TEXTS = 256
USERS_PER_LEXER = 16
"""Requests with a grammar until it gets a further lexer: masks of fewer rows take little time."""
COSTLY_COMPILE_SECS = 0.05
"""Grammars that took longer get no further lexer: other requests would wait for it."""
SECONDS_BUCKETS = exponential(0.0001, 4.0, 10.0)
COMPILE_STACK_BYTES = 64 * 2**20
"""llguidance recurses along chains of rules. A front accepts those that it has checked with an
eighth of this (`server.request.grammar.checks.worker.CHECK_STACK_BYTES`); pages that are not used
take no memory.
"""
MESSAGE_CHARS = 300
"""Longest part of llguidance's message that a client gets."""


def hash_text(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class CompiledGrammar:
    """A grammar, with one lexer or several."""

    def __init__(self, text: str, matcher: LLMatcher, *, is_costly: bool = False) -> None:
        """`is_costly`: it gets no further lexer."""
        self.text = text
        self._lexers = [GrammarLexer(matcher)]
        self._is_costly = is_costly
        self._users = 0
        self._asked = 1
        """Lexers that are there or being compiled."""
        self._lock = threading.Lock()
        """llguidance refuses a matcher that another thread uses."""

    def start_matcher(self) -> tuple[LLMatcher, GrammarLexer]:
        """A matcher for one sequence, of the lexer with the fewest copies so far."""
        with self._lock:
            lexer = min(self._lexers, key=lambda lexer: (lexer.is_full, lexer.copies))
            lexer.copies += 1
            return lexer.matcher.deep_copy(), lexer

    @property
    def is_full(self) -> bool:
        """All of its lexers are full: new answers need another one."""
        return all(lexer.is_full for lexer in self._lexers)

    def count_accepted(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, the first of an answer, the grammar accepts."""
        with self._lock:
            return self._lexers[0].matcher.validate_tokens(list(tokens))

    def add_user(self, most_lexers: int) -> bool:
        """Count a request; True: call `add_lexer` with a further matcher of the same text."""
        self._users += 1
        is_due = self._users >= USERS_PER_LEXER * self._asked
        # A costly grammar would hold up the jobs behind it; more lexers than threads fill no mask
        # sooner.
        if self._is_costly or not is_due or self._asked >= most_lexers:
            return False
        self._asked += 1
        return True

    def add_lexer(self, matcher: LLMatcher) -> None:
        """`matcher`: no copy, at the beginning of the grammar."""
        with self._lock:
            self._lexers.append(GrammarLexer(matcher))


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """A request whose grammar is needed."""

    handle: int
    text: str
    key: bytes
    resumed: tuple[int, ...]
    """The beginning of the answer, which another engine has drawn."""
    reasoning: ReasoningGate | None
    """Reasoning in front of the grammar."""


@dataclass(frozen=True, slots=True)
class GrammarOutcome:
    """The end of a job: with an error the request cannot run."""

    handle: int
    error: EngineError | None


@dataclass(frozen=True, slots=True)
class _FinishedJob:
    job: GrammarJob
    result: CompiledGrammar | EngineError
    seconds: float | None
    """How long the compilation took; None: the grammar was there."""


class GrammarStore:
    """All methods but `start_sequence` are called from one thread."""

    def __init__(
        self, trie: LLTokenizer, filler: MaskFiller, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.filler = filler
        self._trie = trie
        self._eos_token_ids = frozenset(trie.eos_tokens)
        self._gate_vocabulary = GateVocabulary(trie)
        self._clock = clock
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._kept_chars = 0
        self._kept_lock = threading.Lock()
        self._pinned: dict[int, CompiledGrammar] = {}
        """By handle of the request."""
        self._sweep_size = KEPT_GRAMMARS
        """Number of pinned grammars at which those of ended requests are looked for."""
        self._pinned_chars = 0
        self._sweep_chars = KEPT_CHARS
        """Length of their texts at which the same is done."""
        self._waiting_texts = Counter[bytes]()
        self._jobs: queue.SimpleQueue[GrammarJob | CompiledGrammar] = queue.SimpleQueue()
        """Requests that need a grammar, and grammars that need a further lexer."""
        self._finished: queue.SimpleQueue[_FinishedJob] = queue.SimpleQueue()
        self._unread_events = 0
        """Jobs whose event has not been read from `event_fd`."""
        self._current: tuple[int, float] | None = None
        """Handle of the job that the thread works on, and since when."""
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when jobs have ended."""
        self.compile_seconds = Histogram(SECONDS_BUCKETS)
        self.counters = dict.fromkeys(("grammar_cache_hits_total", "grammar_errors_total"), 0.0)
        self._start_thread()

    def _start_thread(self) -> None:
        """Start the compiling thread, with a larger stack than others."""
        usual = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            threading.Thread(target=self._run_jobs, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)

    # ------------------------------------------------------------------ the engine loop's thread

    def request(
        self,
        handle: int,
        text: str,
        resumed: Sequence[int] = (),
        reasoning: ReasoningGate | None = None,
    ) -> bool:
        """Ask for a request's grammar. True: it is there; False: `take_outcomes` returns it later.

        Raises QueueFull.
        """
        key = hash_text(text)
        compiled = self._find_kept(key)
        # A resumed answer goes through the thread, which checks its beginning by the grammar.
        if compiled is not None and not resumed:
            self.counters["grammar_cache_hits_total"] += 1
            self._pin(handle, compiled)
            return True
        # A text that waits already adds no compilation: its later jobs find the grammar kept.
        if key not in self._waiting_texts and len(self._waiting_texts) >= MAX_WAITING_TEXTS:
            raise QueueFull(
                f"{MAX_WAITING_TEXTS} grammars wait to be compiled; retry after 2 s",
                retry_after_secs=2,
            )
        self._waiting_texts[key] += 1
        self._unread_events += 1
        self._jobs.put(GrammarJob(handle, text, key, tuple(resumed), reasoning))
        return False

    def take_outcomes(self) -> list[GrammarOutcome]:
        """Jobs that have ended since the last call, in order."""
        if self._unread_events:
            self._unread_events -= self._read_events()
        outcomes = []
        while not self._finished.empty():
            finished = self._finished.get()
            self._forget_waiting(finished.job.key)
            if finished.seconds is None:
                self.counters["grammar_cache_hits_total"] += 1
            else:
                self.compile_seconds.observe(finished.seconds)
            handle = finished.job.handle
            if isinstance(finished.result, EngineError):
                self.counters["grammar_errors_total"] += 1
                outcomes.append(GrammarOutcome(handle, finished.result))
            else:
                self._pin(handle, finished.result)
                outcomes.append(GrammarOutcome(handle, None))
        return outcomes

    def _pin(self, handle: int, compiled: CompiledGrammar) -> None:
        """Keep a request's grammar until the request has ended."""
        self._pinned[handle] = compiled
        self._pinned_chars += len(compiled.text)
        if compiled.add_user(most_lexers=self.filler.threads):
            self._jobs.put(compiled)

    def _read_events(self) -> int:
        """Number of jobs that have ended since the last call."""
        try:
            return os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return 0

    def overdue_job(self) -> int | None:
        """Handle of a request whose grammar takes too long to compile."""
        current = self._current
        if current is None or self._clock() - current[1] < COMPILE_LIMIT_SECS:
            return None
        return current[0]

    def release_ended(self, is_alive: Callable[[int], bool]) -> None:
        """Release the grammars of requests that have ended. Amortized O(1) per request."""
        if len(self._pinned) < self._sweep_size and self._pinned_chars < self._sweep_chars:
            return
        for handle in [handle for handle in self._pinned if not is_alive(handle)]:
            self._pinned_chars -= len(self._pinned.pop(handle).text)
        self._sweep_size = max(KEPT_GRAMMARS, 2 * len(self._pinned))
        self._sweep_chars = max(KEPT_CHARS, 2 * self._pinned_chars)

    def _find_kept(self, key: bytes) -> CompiledGrammar | None:
        with self._kept_lock:
            compiled = self._kept.get(key)
            if compiled is None:
                return None
            if compiled.is_full:  # it is compiled again, or later answers fail like those before
                self._kept.pop(key)
                self._kept_chars -= len(compiled.text)
                return None
            self._kept.move_to_end(key)
            return compiled

    def _forget_waiting(self, key: bytes) -> None:
        self._waiting_texts[key] -= 1
        if not self._waiting_texts[key]:
            del self._waiting_texts[key]

    # ------------------------------------------------------------------ the thread of the model

    def start_sequence(self, admitted: AdmittedSeq) -> TokenConstraint | None:
        """The constraint of a sequence behind its output so far; None: its answer is free."""
        params = admitted.params
        if not params.is_constrained:
            return None
        output = admitted.history[admitted.prompt_tokens - params.resumed :]
        # Without a pin the request has ended since the step was planned, and nothing reads its
        # token.
        compiled = self._pinned.get(admitted.handle)

        def start_grammar(output: Sequence[int] = ()) -> SequenceGrammar:
            if compiled is None:
                return SequenceGrammar(None, self._eos_token_ids, output)
            matcher, lexer = compiled.start_matcher()
            return SequenceGrammar(matcher, self._eos_token_ids, output, lexer)

        if params.reasoning is None:
            return start_grammar(output)
        start = start_grammar if params.grammar else None
        return GatedGrammar(params.reasoning, self._gate_vocabulary, start, output)

    # ------------------------------------------------------------------ the compiling thread

    def _run_jobs(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, CompiledGrammar):
                self._add_lexer(job)
                continue
            self._current = (job.handle, self._clock())
            self._finished.put(self._run_job(job))
            self._current = None
            os.eventfd_write(self.event_fd, 1)

    def _add_lexer(self, compiled: CompiledGrammar) -> None:
        matcher = self._compile(compiled.text)
        if isinstance(matcher, EngineError):  # the grammar goes on with the lexers that it has
            log.warning("a grammar that was compiled before was refused: %s", matcher)
        else:
            compiled.add_lexer(matcher)

    def _run_job(self, job: GrammarJob) -> _FinishedJob:
        seconds = None
        compiled = self._find_kept(job.key)
        if compiled is None:
            started = self._clock()
            result = self._compile(job.text)
            seconds = self._clock() - started
            if isinstance(result, EngineError):
                return _FinishedJob(job, result, seconds)
            is_costly = seconds > COSTLY_COMPILE_SECS
            compiled = CompiledGrammar(job.text, result, is_costly=is_costly)
            self._keep(job.key, compiled)
        accepted = self._count_accepted(job, compiled)
        # The sequence would begin with a failed matcher, and its answer would end with
        # grammar_failed.
        if accepted < len(job.resumed):
            refusal = BadRequest(
                f"baton_resume.ids: the answer's grammar refuses token {accepted + 1} of them; "
                "send the request without baton_resume",
                param="baton_resume.ids",
            )
            return _FinishedJob(job, refusal, seconds)
        return _FinishedJob(job, compiled, seconds)

    def _count_accepted(self, job: GrammarJob, compiled: CompiledGrammar) -> int:
        """How many of the resumed tokens the answer may begin with."""
        if job.reasoning is None:
            return compiled.count_accepted(job.resumed)
        token_bytes = self._gate_vocabulary.token_bytes
        answer = tokens_of_answer(job.reasoning, token_bytes, job.resumed)
        return len(job.resumed) - len(answer) + compiled.count_accepted(answer)

    def _compile(self, text: str) -> LLMatcher | EngineError:
        """Compile a grammar and fill its first mask, which takes longer than later ones."""
        try:
            limits = LLParserLimits(verbose_errors=False, **RANK_LIMITS)
            matcher = LLMatcher(self._trie, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                reason = matcher.get_error().partition("\n")[0][:MESSAGE_CHARS]
                return BadRequest(f"the grammar cannot be compiled: {reason}")
            return matcher
        except Exception as err:  # noqa: BLE001 - of the library
            # It ends the requests with this grammar.
            reason = str(err).partition("\n")[0][:MESSAGE_CHARS]
            return GrammarFailed(f"the grammar was not compiled: {type(err).__name__}: {reason}")

    def _keep(self, key: bytes, compiled: CompiledGrammar) -> None:
        with self._kept_lock:
            self._kept[key] = compiled
            self._kept_chars += len(compiled.text)
            while len(self._kept) > KEPT_GRAMMARS or self._kept_chars > KEPT_CHARS:
                _, oldest = self._kept.popitem(last=False)
                self._kept_chars -= len(oldest.text)
