"""Pages of sequences: who holds which, what the tree keeps, and how many more are going to be needed.

A sequence's pages, in the order of its tokens:

    [ shared with the tree, locked through seq.node | private ........ ]
    0                                    seq.published          len(seq.pages)

(private pages below `published` exist too: where the tree already had the same tokens, both copies live on.)

Prompt tokens that need no computing are counted where a sequence gets them (`share`), by source.

Invariants: free + cached + locked + private = capacity; `new_pages` lists what got a new owner since `start_plan`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from baton.cache.kv_events import KvEventLog
from baton.cache.pages import PageAllocator
from baton.cache.radix import TOKEN_BYTES, Match, RadixCache
from baton.sched.estimate import KnownAnswer, NewTokenRatio, peak_growth
from baton.sched.limits import Limits
from baton.sched.policy import cached_tokens
from baton.sched.seq import Seq, SeqState

HIT_SOURCES = ("device", "in_flight", "decode_tree", "rematch")
"""Where the pages came from that a sequence did not compute:

device       this node's tree, computed earlier (admission, or between two chunks of a prompt)
in_flight    this node's tree, scheduled by a step that had not committed yet: prompts that arrive together
decode_tree  D: its own tree, so that P does not send them
rematch      found again by a request that had let go of its pages (retraction, preemption, suspension): no saving over
             a run without them, and counted in no request's cached_tokens
"""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Memory:
    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.allocator = PageAllocator(limits.num_pages)
        keep = limits.kv_event_batches
        self.kv_events = KvEventLog(limits.page_size * TOKEN_BYTES, keep) if keep else None
        self.cache = RadixCache(
            limits.page_size, self.allocator, limits.radix_cache, eviction=limits.eviction, log=self.kv_events
        )
        self._priority = limits.priority
        self.ratio = NewTokenRatio(limits.conservativeness, limits.clip_new_tokens)
        self.watermark = int(limits.watermark * limits.num_pages)
        """Pages that stay available when a request is admitted beside others."""
        self.new_pages: array[int] = array("i")
        self.hit_tokens = dict.fromkeys(HIT_SOURCES, 0)

    def start_plan(self) -> None:
        self.new_pages = array("i")

    # ------------------------------------------------------------------ how much there is, and will be needed

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free or evictable."""
        return self.allocator.free_count + self.cache.evictable_pages

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return ceil_div(tokens, self.page_size)

    def cached_pages(self, seq: Seq) -> int:
        """Pages of a waiting sequence that the tree holds now."""
        return cached_tokens(seq, self.cache) // self.page_size

    def answer_tokens(self, seq: Seq) -> int:
        """Tokens that the rest of the answer is expected to have; exactly those that ignore_eos makes it have."""
        left = seq.max_new_tokens - seq.generated
        if seq.is_lease:
            return 0
        return left if seq.req.params.ignore_eos else self.ratio.estimate(left)

    def growth(self, seq: Seq) -> int:
        """Pages that a sequence is expected to still take."""
        return max(self.pages(len(seq.tokens) + self.answer_tokens(seq)) - len(seq.pages), 0)

    def total_growth(self, seqs: Iterable[Seq]) -> int:
        """The sum of `growth`, without a call per sequence: it is taken in every step that a waiting request sees."""
        page_size, clip, ratio = self.page_size, self.ratio.clip, self.ratio.value
        total = 0
        for seq in seqs:
            tokens = len(seq.tokens)
            if not seq.is_lease:
                left = seq.max_new_tokens - (tokens - seq.prompt_len) - seq.inflight
                tokens += left if seq.req.params.ignore_eos else int((left if left < clip else clip) * ratio)
            pages = -(-tokens // page_size) - len(seq.pages)
            if pages > 0:
                total += pages
        return total

    def peak_growth(self, seqs: Sequence[Seq]) -> int:
        """Like `total_growth`, less what decoding answers of known length give back before others need it.

        When a prompt under way will end is not known: it counts in full and gives nothing back.
        """
        known: list[Seq] = []
        others: list[Seq] = []
        for seq in seqs:
            is_known = seq.is_decoding and seq.req.params.ignore_eos and not seq.is_lease
            (known if is_known else others).append(seq)
        answers = (
            KnownAnswer(seq.total_len, seq.max_new_tokens - seq.generated, self._held_alone(seq)) for seq in known
        )
        fixed = sum(self.pages(seq.total_len) - len(seq.pages) for seq in known)
        return max(fixed + peak_growth(answers, self.page_size), 0) + self.total_growth(others)

    def freed_by(self, seq: Seq) -> tuple[int, int]:
        """(pages that become available, tokens to compute again) if this running sequence let go of everything.

        Available are its private pages, the tree's pages that only it locks, and what was reserved for its growth.
        """
        alone = self._locked_alone(seq)
        stay = seq.published - alone
        return len(seq.private) + alone + self.growth(seq), max(seq.computed - stay * self.page_size, 0)

    def _locked_alone(self, seq: Seq) -> int:
        return self.cache.pages_locked_once(seq.node) if seq.node is not None else 0

    def _held_alone(self, seq: Seq) -> int:
        """Pages that become available when this sequence ends."""
        return len(seq.private) + self._locked_alone(seq)

    # ------------------------------------------------------------------ taking

    def allocate(self, n: int) -> array[int] | None:
        """n pages with a new owner, evicting cached ones if need be; None when there are not so many."""
        short = n - self.allocator.free_count
        if short > 0:
            self.cache.evict(short)
        pages = self.allocator.alloc(n)
        if pages is not None:
            self.new_pages.extend(pages)
        return pages

    def match(self, seq: Seq, max_tokens: int) -> Match:
        """The cached prefix of a sequence, locked: the caller hands it to `share` or unlocks its node."""
        match = self.cache.match(seq.key, seq.req.namespace, max_tokens)
        self.cache.lock(match.node)
        return match

    def share(self, seq: Seq, match: Match) -> None:
        """Let a sequence use a locked prefix in place of, and beyond, the pages it has."""
        self._count_hit(seq, match)
        if seq.node is not None:
            self.cache.unlock(seq.node)
        seq.node, seq.published = match.node, len(match.pages)
        seq.pages.extend(match.pages[len(seq.pages) :])

    def _count_hit(self, seq: Seq, match: Match) -> None:
        tokens = (len(match.pages) - len(seq.pages)) * self.page_size
        if seq.has_let_go:
            self.hit_tokens["rematch"] += tokens
            return
        fresh = self.cache.reuse(match.node, self._priority.base(seq), beyond=seq.node) * self.page_size
        if seq.state is SeqState.TRANSFER:
            self.hit_tokens["decode_tree"] += tokens
            return
        self.hit_tokens["in_flight"] += fresh
        self.hit_tokens["device"] += tokens - fresh
        seq.cached_tokens = max(seq.cached_tokens, 0) + tokens

    def extend(self, seq: Seq, tokens: int) -> bool:
        """Make room for the sequence's first `tokens` tokens. False: there is none, nothing changed."""
        need = self.pages(tokens) - len(seq.pages)
        if need <= 0:
            return True
        pages = self.allocate(need)
        if pages is None:
            return False
        self.own(seq, pages)
        return True

    def own(self, seq: Seq, pages: array[int]) -> None:
        seq.pages.extend(pages)
        seq.private.update(pages)

    def adopt_prefix(self, seq: Seq) -> None:
        """Between two chunks of a prompt: take over pages that another sequence computed meanwhile."""
        if seq.computed % self.page_size or len(seq.pages) * self.page_size != seq.computed:
            return
        match = self.match(seq, len(seq.tokens) - 1)
        if match.num_tokens <= seq.computed:
            self.cache.unlock(match.node)
            return
        self.share(seq, match)
        seq.computed = match.num_tokens

    # ------------------------------------------------------------------ giving

    def publish(self, seq: Seq) -> None:
        """Offer every whole page of known tokens whose computation is scheduled to the tree."""
        first = seq.published
        last = min(seq.computed, len(seq.tokens)) // self.page_size
        if last <= first or not self.cache.enabled:
            return
        priority = self._priority.base(seq)
        done = self.cache.insert(seq.key, seq.pages[first:last], seq.req.namespace, first, priority)
        self.cache.lock(done.node)
        if seq.node is not None:
            self.cache.unlock(seq.node)
        seq.node = done.node
        seq.published = last
        # Where the tree had the same tokens already, its pages stay and ours remain private.
        seq.private.difference_update(seq.pages[first + len(done.existing_pages) : last])

    def let_go(self, seq: Seq) -> None:
        """Free what a sequence holds; what it published stays cached."""
        seq.has_let_go = True
        if seq.private:
            self.allocator.free(array("i", sorted(seq.private)))
            seq.private.clear()
        if seq.node is not None:
            self.cache.unlock(seq.node)
            seq.node = None
            seq.published = 0
        seq.pages = array("i")
