"""Pages of sequences: their holders, the pages that the tree keeps, and the number that is going to
be needed.

A sequence's pages, in the order of its tokens:

    [ shared with the tree, locked through seq.node | private ........ ]
    0                                    seq.published          len(seq.pages)

(private pages below `published` exist too: where the tree already had the same tokens, both copies
live on.)

Behind the device's pages stands the host tier, if there is one: it takes the pages that the tree
evicts (all of them by `release_device_memory` with mode offload). A sequence that is admitted gets
its continuation from there (`restore_prefix`).

Where the model keeps states of sequences, the one at the end of a prompt that P sends to D has
pages of its own (`Seq.state_pages`), outside the tree, which is made of whole pages of tokens.
Without them P cannot serve the prompt and D cannot take it, so they are part of a grant. Before the
prompt's end P may use them for a state that gives up its slot (`park_state`).

Where the model has further page groups (cache.group_pages), a sequence holds in each of them the
blocks from `FurtherPages.first` on, up to as many as it has pages; those in front were left behind.
A grant is of all groups or none.

Prompt tokens that need no computing are counted where a sequence gets them (`share_prefix`,
`restore_prefix`), by source.

Invariants: free + cached + locked + private = capacity; new pages and copies are handed to exactly
one plan, the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

from baton.cache.group_pages import NO_PAGE, GroupPages, GroupUsage
from baton.cache.host import CopyRun, HostPage, HostTier
from baton.cache.joint_prefix import JointPrefix, find_joint_prefix
from baton.cache.kv_events import KvEventLog
from baton.cache.pages import PageAllocator
from baton.cache.radix import TOKEN_BYTES, PrefixMatch, RadixCache, RadixNode
from baton.sched.memory.demand import KnownAnswer, NewTokenRatio, peak_growth
from baton.sched.memory.restores import RestoreLog
from baton.sched.policies.base import refresh_probe
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StateCopy
from baton.sched.types.sequence import FurtherPages, Seq, SeqState

HIT_SOURCES = ("device", "in_flight", "host", "decode_tree", "rematch")
"""Where the pages came from that a sequence did not compute:

| source | pages of |
|---|---|
| `device` | this node's tree, computed earlier (admission, or between two chunks of a prompt) |
| `in_flight` | this node's tree, scheduled by a step that had not committed yet |
| `host` | the host tier: evicted from this node's tree, and copied back |
| `decode_tree` | D: its own tree, so that P does not send them |
| `rematch` | found again by a request that had released its pages |

`in_flight` is of prompts that arrive together. `rematch` (after a retraction, preemption or
suspension) saves nothing over a run without them, and is counted in no request's cached_tokens.
"""

COPY_RATE_SMOOTHING = 0.1


class KvManager:
    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.quarantined_pages = 0
        """Cached pages taken out of use since the start (`quarantine`)."""
        self.allocator = PageAllocator(limits.num_pages)
        self.kv_events: KvEventLog | None = None
        if limits.kv_event_batches:
            page_bytes = limits.page_size * TOKEN_BYTES
            self.kv_events = KvEventLog(page_bytes, limits.kv_event_batches)
        self.cache = RadixCache(
            limits.page_size,
            self.allocator,
            limits.radix_eviction_policy,
            self.kv_events,
            limits.page_groups,
        )
        self._groups = self.cache.groups
        self._states: GroupPages | None = None
        """Snapshots of states, for models that have some."""
        self._states_index = -1
        self.rolling_tokens = 0
        """Tokens from one rolling snapshot of an answer to the next; 0: none is taken."""
        for index, group in enumerate(self._groups):
            if group.rule.kind == "state":
                self._states = group
                self._states_index = index
                # A snapshot that no other sequence can find is worth nothing.
                if limits.radix_cache:
                    self.rolling_tokens = group.rule.rolling_tokens(limits.page_size)
        self._attention_groups = [group for group in self._groups if group is not self._states]
        self.pages_per_block = 1 + sum(group.width for group in self._attention_groups)
        """Pages of the pool that one more page of tokens needs, in all groups."""
        self._most_snapshot_pages = int(limits.state_snapshot_share * limits.num_pages)
        self._given: list[tuple[RadixNode, array[int]]] = []
        """Snapshots that the tree has and the plan that is being made writes: the end of their
        path, and their first pages."""
        self._private_snapshots = 0
        """Pages of snapshots that the tree does not have."""
        self._rolling: dict[int, FurtherPages] = {}
        """By handle, whose rolling snapshots give way to any allocation."""
        self._rolled: list[Seq] = []
        """Sequences whose rolling snapshot the plan that is being made writes."""
        self._parked: dict[int, StateCopy] = {}
        """States that the next plan copies out of the slots that they had, by handle."""
        self._limits = limits
        self._publishes = limits.radix_cache
        self._priority = limits.priority
        self.ratio = NewTokenRatio(limits.schedule_conservativeness, limits.clip_max_new_tokens)
        self.watermark = int(limits.watermark * limits.num_pages)
        """Pages that stay available when a request is admitted beside others."""
        self.hit_tokens = dict.fromkeys(HIT_SOURCES, 0)
        self.host: HostTier | None = None
        if limits.host_pages and limits.radix_cache:
            self.host = HostTier(
                limits.host_pages, limits.page_size, limits.radix_eviction_policy, self._groups
            )
            self.cache.on_remove = self.host.on_remove
            self.cache.on_pop = self.host.on_pop
        self.host_pages_per_s = limits.host_pages_per_s
        self.restores = RestoreLog(limits.page_size)
        """Pages back from the host whose checksums are not compared yet."""
        self._new_pages: array[int] = array("i")

    # ------------------------------------------------------------------ handed to the next plan

    @property
    def has_copies(self) -> bool:
        """True if a plan must be made even without rows."""
        return bool(self._parked) or (self.host is not None and self.host.has_copies)

    def take_new_pages(self) -> array[int]:
        """Pages that got a new owner since the last call, each once."""
        pages = self._new_pages
        self._new_pages = array("i")
        return array("i", dict.fromkeys(pages))

    def take_copies(self) -> tuple[CopyRun, ...]:
        if self.host is None:
            return ()
        self.restores.take_plan()
        return self.host.take_copies()

    def take_parked_states(self) -> tuple[StateCopy, ...]:
        parked = tuple(self._parked.values())
        self._parked = {}
        return parked

    def observe_copies(self, copies: Iterable[CopyRun], seconds: float) -> None:
        pages = sum(len(run.pages) for run in copies)
        # A step without copies measures no rate.
        if pages and seconds > 0:
            self.host_pages_per_s += COPY_RATE_SMOOTHING * (pages / seconds - self.host_pages_per_s)

    # ------------------------------------------------------------------ pages available and needed

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free, evictable, or of rolling snapshots."""
        pages = self.allocator.free_count + self.cache.evictable_pages
        return pages + self._rolling_pages if self._rolling else pages

    @property
    def _rolling_pages(self) -> int:
        assert self._states is not None, "models with states have rolling snapshots"
        return len(self._rolling) * self._states.width

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def cached_pages(self, seq: Seq) -> int:
        """Pages of a waiting sequence that the tree holds now."""
        return self.cached_tokens(seq) // self.page_size

    def cached_tokens(self, seq: Seq) -> int:
        """Prompt tokens of a waiting sequence that need no computing."""
        if seq.pages:
            return seq.computed
        return self.cache.valid_tokens(refresh_probe(seq, self.cache))

    def held_pages(self, seq: Seq) -> int:
        """Pages of the pool that a sequence holds, in all groups."""
        pages = len(seq.pages)
        for group, held in zip(self._groups, seq.further, strict=False):
            own = held.pages[held.first * group.width :]
            pages += len(own) - own.count(NO_PAGE)
        return pages + len(seq.state_pages)

    def private_pages(self, seq: Seq) -> int:
        """Pages of the pool that a sequence owns outside the tree, in all groups."""
        further = sum(len(held.private) for held in seq.further)
        return len(seq.private) + further + len(seq.state_pages)

    def further_usage(self, seqs: Collection[Seq]) -> dict[str, GroupUsage]:
        """Pages of the further groups by their kind; states that travel are states, too.

        Args:
            seqs: all that there are.
        """
        usage: dict[str, GroupUsage] = {}
        tables = [seq.further for seq in seqs if seq.further]
        for index, group in enumerate(self._groups):
            private = sum(len(further[index].private) for further in tables)
            of_kind = usage.setdefault(group.rule.kind, GroupUsage())
            of_kind.held += group.locked_pages + private
            of_kind.cached += group.evictable_pages
            if group is self._states:
                of_kind.held += sum(len(seq.state_pages) for seq in seqs)
        return usage

    def prompt_pages(self, seq: Seq, cached_pages: int) -> int:
        """Pages that computing a waiting sequence's tokens takes, beside `cached_pages` of its
        prefix.
        """
        pages = self.pages(len(seq.tokens))
        needed = pages - cached_pages + self._state_pages_lacking(seq)
        row_tokens = self._limits.longest_chunk(len(seq.tokens))
        for group in self._groups:
            most = min(pages, group.rule.most_blocks(self.page_size, row_tokens))
            visible = cached_pages - group.first_block(cached_pages * self.page_size)
            needed += max(most - visible, 0) * group.width
        return needed

    def pages_to_pull(self, seq: Seq, cached_pages: int) -> int:
        """D: pages that a prompt takes beside `cached_pages` of its prefix: in further groups only
        what its end still sees, and its state whatever the prefix is.
        """
        pages = self.pages(seq.prompt_len)
        needed = pages - cached_pages + self._state_pages_lacking(seq)
        for group in self._attention_groups:
            first = max(group.first_block(seq.prompt_len), cached_pages)
            needed += (pages - first) * group.width
        return needed

    def _state_pages_lacking(self, seq: Seq) -> int:
        """Pages that a sequence lacks for the state at its prompt's end."""
        return 0 if seq.state_pages else self._traveling_state_pages(seq)

    def _traveling_state_pages(self, seq: Seq) -> int:
        """Pages of the state that P sends to D with a sequence's prompt."""
        # D leaves the pages with the first row, and a request that it computes itself has none.
        if seq.is_lease or seq.state in (SeqState.OPENING, SeqState.TRANSFER):
            return self._limits.state_pages
        return 0

    def answer_pages(self, tokens: int) -> int:
        """Pages that an answer of so many tokens takes.

        A window goes along with the answer: it needs room for the block that comes before one is
        left behind.
        """
        pages = self.pages(tokens)
        return pages + min(pages, 1) * (self.pages_per_block - 1)

    def available_to(self, seq: Seq) -> int:
        """Pages that an allocation for a waiting sequence can get: it is going to share its cached
        prefix, and evicting that makes no room for it.
        """
        # A retained request holds its pages already, and shares no prefix when it is admitted.
        if seq.pages:
            return self.available
        probe = refresh_probe(seq, self.cache)
        return self.available - self.cache.unlocked_pages(probe)

    def answer_tokens(self, seq: Seq) -> int:
        """Tokens that the rest of the answer is expected to have; exactly those that ignore_eos
        makes it have.
        """
        left = seq.max_new_tokens - seq.generated
        # P generates one token for a lease, which needs no page: D computes the answer.
        if seq.is_lease:
            return 0
        return left if seq.has_fixed_length else self.ratio.estimate(left)

    def growth(self, seq: Seq) -> int:
        """Pages that a sequence is expected to still take."""
        tokens = seq.total_len + self.answer_tokens(seq)
        growth = max(self.pages(tokens) - len(seq.pages), 0)
        if not self._groups:
            return growth
        return growth + self._further_growth(seq, tokens) + self._state_pages_lacking(seq)

    def _further_growth(self, seq: Seq, tokens: int) -> int:
        """Pages that a sequence still takes in further groups until it has `tokens` tokens."""
        blocks = self.pages(tokens)
        row_tokens = self._limits.longest_chunk(seq.extend_tokens)
        growth = 0
        for index, group in enumerate(self._groups):
            held = len(seq.pages) - seq.further[index].first if seq.further else 0
            most = min(blocks, group.rule.most_blocks(self.page_size, row_tokens))
            growth += max(most - held, 0) * group.width
        return growth

    def pages_at_end(self, seq: Seq) -> int:
        """Pages that a sequence is expected to hold at its end."""
        blocks = self.pages(seq.total_len + self.answer_tokens(seq))
        pages = blocks
        for group in self._groups:
            pages += min(blocks, group.rule.most_blocks(self.page_size, 1)) * group.width
        return pages + self._traveling_state_pages(seq)

    def total_growth(self, seqs: Iterable[Seq]) -> int:
        """The sum of `growth`, without a call per sequence: it is taken in every step that a
        waiting request sees.
        """
        if self._groups:
            return sum(map(self.growth, seqs))
        page_size = self.page_size
        clip = self.ratio.clip
        ratio = self.ratio.value
        longest = int(clip * ratio)
        total = 0
        for seq in seqs:
            tokens = most = seq.max_total_tokens
            if not seq.has_fixed_length:
                tokens = len(seq.tokens) + seq.inflight
                if not seq.is_lease:
                    left = most - tokens
                    tokens += int(left * ratio) if left < clip else longest
            beyond = tokens - len(seq.pages) * page_size
            if beyond > 0:
                total -= -beyond // page_size
        return total

    def peak_growth(self, seqs: Sequence[Seq]) -> int:
        """Like `total_growth`, less what decoding answers of known length give back before others
        need it.

        When a prompt in progress will end is not known: it counts in full and gives nothing back.
        """
        fixed_length: list[Seq] = []
        other_seqs: list[Seq] = []
        for seq in seqs:
            if seq.has_fixed_length and seq.is_decoding:
                fixed_length.append(seq)
            else:
                other_seqs.append(seq)
        # Pages for tokens in flight, which are not held yet.
        pages_in_flight = [self.pages(seq.total_len) - len(seq.pages) for seq in fixed_length]
        answers = []
        for seq, num_in_flight in zip(fixed_length, pages_in_flight, strict=True):
            held_alone = len(seq.private) + self._locked_alone(seq) + num_in_flight
            tokens_to_come = seq.max_new_tokens - seq.generated
            answers.append(KnownAnswer(seq.total_len, tokens_to_come, held_alone))
        peak = sum(pages_in_flight) + peak_growth(answers, self.page_size)
        further = 0
        if self._groups:
            further = sum(self._further_growth(seq, seq.max_total_tokens) for seq in fixed_length)
        return max(peak, 0) + further + self.total_growth(other_seqs)

    def freed_by(self, seq: Seq) -> tuple[int, int]:
        """(pages that become available, tokens to compute again) if this running sequence released
        everything.

        Available are its private pages, the tree's pages that only it locks, and what was reserved
        for its growth.
        """
        pages_alone = self._locked_alone(seq)
        freed_pages = self.private_pages(seq) + pages_alone + self.growth(seq)
        # Its rolling snapshot is available already.
        if self._states is not None and seq.handle in self._rolling:
            freed_pages -= self._states.width
        for group, held in zip(self._groups, seq.further, strict=False):
            blocks = held.pages[held.first * group.width :: group.width]
            freed_pages += sum(map(group.is_locked_once, blocks)) * group.width
        cached_tokens = (seq.published - pages_alone) * self.page_size
        return freed_pages, max(seq.computed - cached_tokens, 0)

    def _locked_alone(self, seq: Seq) -> int:
        return self.cache.pages_locked_once(seq.node) if seq.node is not None else 0

    # ------------------------------------------------------------------ taking

    def allocate(self, n: int) -> array[int] | None:
        """n pages with a new owner, evicting cached ones if need be; None when there are not so
        many.
        """
        short = n - self.allocator.free_count
        # Cached pages stay as long as there are free ones: each may spare a later request its
        # prefill.
        if short > 0:
            short -= self.cache.evict(short)
            while short > 0 and self._rolling:
                short -= self._drop_rolling(next(iter(self._rolling)))
        pages = self.allocator.alloc(n)
        # The next plan tells the runner which pages have a new owner.
        if pages is not None:
            self._new_pages.extend(pages)
        return pages

    def match_prefix(
        self, seq: Seq, max_tokens: int, *, restores_state: bool = True
    ) -> PrefixMatch:
        """The cached prefix of a sequence, locked: the caller hands it to `share_prefix` or unlocks
        its node.

        Args:
            restores_state: the row behind the prefix begins with a snapshot. D begins with the
                state that comes from P.
        """
        if seq.node is not None and self.cache.is_quarantined(seq.node):
            # A damaged prefix has left the tree: the sequence keeps its own path, and no other
            # sequence's pages continue it.
            self.cache.lock(seq.node)
            return PrefixMatch(seq.node, seq.pages[: seq.published], seq.published * self.page_size)
        num_further = None if restores_state else len(self._attention_groups)
        match = self.cache.match(seq.key, seq.req.namespace, max_tokens, num_further)
        self.cache.lock(match.node)
        for group, _, block in self._blocks_of(match):
            group.lock(block)
        return match

    def holds_snapshot(self, match: PrefixMatch) -> bool:
        """Whether a locked match keeps a snapshot, which takes pages that no estimate counts."""
        return self._states is not None and match.num_tokens > 0

    def drop_match(self, match: PrefixMatch) -> None:
        """Unlock a match that no sequence takes."""
        self.cache.unlock(match.node)
        for group, _, block in self._blocks_of(match):
            group.unlock(block, left_behind=False)

    def _blocks_of(self, match: PrefixMatch) -> Iterator[tuple[GroupPages, int, int]]:
        """(group, place among the pages of tokens, block) of what a row behind the match reads."""
        for group, pages in zip(self._groups, match.further, strict=False):
            first = group.first_block(match.num_tokens)
            for place in range(first, len(match.pages)):
                yield group, place, pages[place * group.width]

    def share_prefix(self, seq: Seq, match: PrefixMatch) -> None:
        """Let a sequence use a locked prefix in place of, and beyond, the pages it has."""
        self._count_hit(seq, match)
        self._hold_match(seq, match)

    def _hold_match(self, seq: Seq, match: PrefixMatch) -> None:
        """Let a sequence hold a locked prefix in place of the pages that it has of it."""
        self._hold_path(seq, match.node, len(match.pages))
        if self._groups:
            self._share_further(seq, match)
        seq.pages.extend(match.pages[len(seq.pages) :])

    def _share_further(self, seq: Seq, match: PrefixMatch) -> None:
        """Let a sequence use the match's blocks of further groups beyond those that it has."""
        num_own = len(seq.pages)
        is_own_work = seq.pages_were_released
        for group, place, block in self._blocks_of(match):
            # Its own block for these tokens stays; this one was locked for nothing.
            if place < num_own:
                group.unlock(block, left_behind=False)
            elif not is_own_work:
                group.reuse(block)
        self._hold_further(seq)
        # A match without snapshots: the sequence has pages for its state.
        if len(match.further) < len(self._groups):
            held = seq.further[-1]
            held.pages.extend(array("i", (NO_PAGE,)) * (len(match.pages) * held.width))
            held.first = len(match.pages)
        for group, held, pages in zip(self._groups, seq.further, match.further, strict=False):
            visible = group.first_block(match.num_tokens)
            self._give_back(group, held, min(visible, num_own), left_behind=True)
            held.pages.extend(pages[len(held.pages) :])
            held.first = max(held.first, visible)

    def _hold_path(self, seq: Seq, node: RadixNode | None, published: int) -> None:
        """Let a sequence hold this path, which is locked for it, in place of the one it had."""
        # A path that stays locked without a sequence is never evicted.
        if seq.node is not None:
            self.cache.unlock(seq.node)
        seq.node = node
        seq.published = published

    def _count_hit(self, seq: Seq, match: PrefixMatch) -> None:
        tokens = (len(match.pages) - len(seq.pages)) * self.page_size
        # Its own pages again: no work was saved, and no reuse keeps them from eviction for longer.
        if seq.pages_were_released:
            self.hit_tokens["rematch"] += tokens
            return
        priority = self._priority.base(seq)
        fresh_pages = self.cache.reuse(match.node, priority, beyond=seq.node)
        fresh_tokens = fresh_pages * self.page_size
        # P reports the cached tokens of the request: D's own would be added to them.
        if seq.state is SeqState.TRANSFER:
            self.hit_tokens["decode_tree"] += tokens
            return
        self.hit_tokens["in_flight"] += fresh_tokens
        self.hit_tokens["device"] += tokens - fresh_tokens
        seq.cached_tokens = max(seq.cached_tokens, 0) + tokens

    def restore_prefix(self, seq: Seq, max_tokens: int) -> None:
        """Bring back pages from the host that follow the sequence's shared prefix.

        They are copied before the next step's rows.
        """
        if self.host is None:
            return
        assert seq.node is not None, "share_prefix comes first"
        if self._groups:
            self._restore_groups(seq, self.host, max_tokens)
            self._unpin_pages(seq)
            return
        first = len(seq.pages)
        host_pages = self.host.find(
            seq.node, seq.key, seq.req.namespace, first, max_tokens // self.page_size
        )
        if host_pages:
            # The allocation below may evict, and a page that moves to the host could take the place
            # of one that is to be copied back.
            self.host.pin(host_pages)
            pages = self.allocate(len(host_pages))
            # Without pages for them the sequence computes these tokens again.
            if pages is not None:
                self.host.copy_in(host_pages, pages)
                self._share_restored(seq, pages, host_pages[0])
            self.host.unpin(host_pages)
        self._unpin_pages(seq)

    def _share_restored(self, seq: Seq, pages: array[int], like: HostPage) -> None:
        first = len(seq.pages)
        priority = max(self._priority.base(seq), like.priority)
        inserted = self.cache.insert(seq.key, pages, seq.req.namespace, first, priority, like)
        self.cache.lock(inserted.node)
        self._count_restored(seq, inserted.node, len(pages), priority)
        self._hold_path(seq, inserted.node, first + len(pages))
        seq.pages.extend(pages)
        self.restores.add(seq, range(first, len(seq.pages)))

    def _count_restored(self, seq: Seq, node: RadixNode, pages: int, priority: int) -> None:
        """A sequence goes on with `pages` pages of tokens, up to `node`, thanks to the host."""
        tokens = pages * self.page_size
        if seq.pages_were_released:
            self.hit_tokens["rematch"] += tokens
            return
        self.hit_tokens["host"] += tokens
        self.cache.reuse(node, priority, beyond=seq.node)
        if seq.state is not SeqState.TRANSFER:
            seq.cached_tokens = max(seq.cached_tokens, 0) + tokens

    def _restore_groups(self, seq: Seq, host: HostTier, max_tokens: int) -> None:
        """`restore_prefix` of all groups, to the longest length at which each has what the next row
        reads.
        """
        # The search costs a look-up per page of the prompt.
        if host.is_empty:
            return
        first = len(seq.pages)
        prompt = (seq.key, seq.req.namespace)
        path = self.cache.match_full_group(*prompt, max_tokens)
        limit = max_tokens // self.page_size
        joint = find_joint_prefix(host, self._groups, path, prompt, valid=first, limit=limit)
        # The host adds nothing to what the sequence shares already, or to what it was admitted
        # without because the pool has no room for its snapshot.
        if joint.length <= first or not joint.host_pages:
            return
        # The allocation may evict: neither what is to be copied back nor what stands beside it on
        # the device may go.
        self.cache.lock(path.node)
        locked = self._lock_visible(path, joint.length)
        host.pin(joint.host_pages)
        pages = self.allocate(sum(len(page.slots) for page in joint.host_pages))
        # Without pages for them the sequence computes these tokens again.
        if pages is not None:
            node = self._insert_restored(seq, path, joint, pages)
            match = self.match_prefix(seq, joint.length * self.page_size)
            assert match.node is node, "the tree has what was just inserted"
            self._count_restored(seq, node, joint.length - first, self._priority.base(seq))
            self._hold_match(seq, match)
            self.restores.add(seq, joint.places)
        host.unpin(joint.host_pages)
        for group, block in locked:
            group.unlock(block, left_behind=False)
        self.cache.unlock(path.node)

    def _lock_visible(self, path: PrefixMatch, length: int) -> list[tuple[GroupPages, int]]:
        """Lock the blocks on a path that a row behind `length` pages of tokens reads."""
        locked = []
        for group, pages in zip(self._groups, path.further, strict=True):
            blocks = pages[:: group.width]
            for block in blocks[group.first_block(length * self.page_size) : length]:
                if block != NO_PAGE:
                    group.lock(block)
                    locked.append((group, block))
        return locked

    def _insert_restored(
        self, seq: Seq, path: PrefixMatch, joint: JointPrefix, pages: array[int]
    ) -> RadixNode:
        """Ask for the copies of a joint prefix into `pages`, and give these to the tree."""
        assert self.host is not None, "the prefix was found there"
        first = len(seq.pages)
        num_full = len(joint.pages)
        self.host.copy_in(joint.pages, pages[:num_full])
        further = [
            array("i", (NO_PAGE,)) * ((joint.length - first) * group.width)
            for group in self._groups
        ]
        taken = num_full
        for block in joint.blocks:
            width = self._groups[block.group].width
            copied = pages[taken : taken + width]
            self.host.copy_block_in(block.host_page, copied)
            start = (block.place - first) * width
            further[block.group][start : start + width] = copied
            taken += width
        full_pages = path.pages[first : joint.length] + pages[:num_full]
        like = joint.host_pages[0]
        priority = max(self._priority.base(seq), *(page.priority for page in joint.host_pages))
        inserted = self.cache.insert(
            seq.key, full_pages, seq.req.namespace, first, priority, like, further
        )
        return inserted.node

    def _unpin_pages(self, seq: Seq) -> None:
        if self.host is not None and seq.pinned:
            self.host.unpin(seq.pinned)
            seq.pinned = []

    def extend(self, seq: Seq, tokens: int, position: int | None = None) -> bool:
        """Make room for the sequence's first `tokens` tokens.

        Args:
            position: where its next row begins, in front of which further groups leave blocks
                behind; None: at its first token that is not computed.
        Returns whether there is room; if not, the sequence holds no page more than before.
        """
        need = -(-tokens // self.page_size) - len(seq.pages)
        state_pages = self._state_pages_lacking(seq) if self._states is not None else 0
        if need <= 0 and not state_pages:
            return True
        if self._groups:
            start = seq.computed if position is None else position
            return self._extend_all(seq, max(need, 0), start, tokens, state_pages)
        pages = self.allocate(need)
        if pages is None:
            return False
        seq.pages.extend(pages)
        seq.private.update(pages)
        return True

    def _extend_all(
        self, seq: Seq, need: int, position: int, tokens: int, state_pages: int
    ) -> bool:
        """`extend` by `need` pages of tokens in all groups, and `state_pages` for a state."""
        self._hold_further(seq)
        # A snapshot that is left behind before the tree has it would be lost.
        if self._states is not None and any(
            len(held.private) > len(held.rolling) for held in seq.further
        ):
            self.publish(seq)
            if seq.is_decoding:
                self._keep_newest(seq, self._states, position)
        self._leave_behind(seq, position)
        first = len(seq.pages)
        end = first + need
        # What the next row does not see gets no block: D pulls the end of a window alone.
        visible = [
            end if group is self._states else max(group.first_block(position), first)
            for group in self._groups
        ]
        sizes = [
            (end - start) * group.width for group, start in zip(self._groups, visible, strict=True)
        ]
        needed = need + sum(sizes) + state_pages
        pages = self.allocate(needed)
        # A sequence alone in the pool would wait for pages that its own snapshots take.
        if pages is None and self._drop_snapshots(seq):
            pages = self.allocate(needed)
        if pages is None:
            return False
        if state_pages:
            seq.state_pages = pages[needed - state_pages :]
        seq.pages.extend(pages[:need])
        seq.private.update(pages[:need])
        taken = need
        for group, held, start, size in zip(self._groups, seq.further, visible, sizes, strict=True):
            if group is self._states:
                held.pages.extend(array("i", (NO_PAGE,)) * (need * group.width))
                # A row of a prompt fills whole pages up to its end. One token at a time fills its
                # page with later rows, which bring no pages.
                last = end if seq.is_decoding else tokens // self.page_size
                # No row here computes what D pulls.
                pulled = min(self.pages(position), end)
                held.first = max(held.first, pulled if seq.state is SeqState.TRANSFER else 0)
                self._add_snapshots(seq, held, group, range(max(first, pulled), last))
                continue
            # No block in front of the first visible one is held, so that none is left behind.
            if start > first:
                held.pages.extend(array("i", (NO_PAGE,)) * ((start - first) * group.width))
                held.first = start
            held.pages.extend(pages[taken : taken + size])
            held.private.update(pages[taken : taken + size])
            taken += size
        return True

    def _add_snapshots(
        self, seq: Seq, held: FurtherPages, group: GroupPages, places: range
    ) -> None:
        """Find pages for snapshots of a sequence's state at the end of these pages of tokens."""
        width = group.width
        # A snapshot that no other sequence can find is worth nothing.
        if not self._publishes:
            return
        for place in group.rule.snapshot_places(places, self.page_size, len(seq.tokens)):
            pages = self._allocate_snapshot(group)
            if pages is None:
                return
            held.pages[place * width : (place + 1) * width] = pages
            held.private.update(pages)

    def roll_snapshot(self, seq: Seq, tokens: int) -> tuple[int, int, array[int]]:
        """Move an answer's rolling snapshot to the page that ends behind `tokens` tokens.

        The pages are the same ones: the end of an answer is not known before it has come, and its
        state cannot step back. So the last border that a row reached has the snapshot, and the
        tree gets it when the sequence leaves (`publish`).
        Returns (number of the group, page of tokens, pages that the row writes). They are NO_PAGE
        without room: the runner may know pages of an earlier row whose drafts went beyond the
        border, and by now another owner has them.
        """
        assert self._states is not None, "models with states have rolling snapshots"
        group = self._states
        held = seq.further[self._states_index]
        place = tokens // self.page_size - 1
        # The tree gets the one that is taken here anyway.
        if held.pages[place * group.width] != NO_PAGE:
            return self._states_index, place, array("i")
        if not held.rolling:
            pages = None if self._has_most_rolling else self._allocate_snapshot(group)
            if pages is None:
                return self._states_index, place, array("i", (NO_PAGE,)) * group.width
            held.rolling = pages
            held.private.update(pages)
        held.rolling_place = place
        # A second owner in this plan would write in the same step.
        self._rolling.pop(seq.handle, None)
        self._rolled.append(seq)
        return self._states_index, place, held.rolling

    @property
    def _has_most_rolling(self) -> bool:
        """Whether rolling snapshots have half of the share: no other snapshot evicts them, and
        running answers that had all of it would leave none to prompts.
        """
        assert self._states is not None, "models with states have rolling snapshots"
        width = self._states.width
        count = len(self._rolling) + len(self._rolled)
        return count > 0 and 2 * (count + 1) * width > self._most_snapshot_pages

    def _keep_newest(self, seq: Seq, group: GroupPages, position: int) -> None:
        """Keep the newest snapshot that the tree does not take from a running sequence as its
        rolling one: what is left behind next would be lost.
        """
        held = seq.further[self._states_index]
        width = group.width
        for place in reversed(range(held.first, position // self.page_size)):
            pages = held.pages[place * width : (place + 1) * width]
            if pages[0] in held.private:
                self._free_rolling(seq)
                held.pages[place * width : (place + 1) * width] = array("i", (NO_PAGE,)) * width
                held.rolling = pages
                held.rolling_place = place
                self._rolling[seq.handle] = held
                return

    def _free_rolling(self, seq: Seq) -> None:
        """Free a sequence's rolling snapshot, if it has one."""
        # The sequence holds no pages, or none of states.
        if self._states is None or not seq.further:
            return
        held = seq.further[self._states_index]
        if held.rolling:
            self._rolling[seq.handle] = held
            self._drop_rolling(seq.handle)

    def _drop_rolling(self, handle: int) -> int:
        """Free a rolling snapshot that gives way. Returns how many pages it had."""
        held = self._rolling.pop(handle)
        freed = held.rolling
        held.rolling = array("i")
        held.private.difference_update(freed)
        self._private_snapshots -= len(freed)
        self.allocator.free(freed)
        return len(freed)

    def _end_rolling(self, seq: Seq, first: int, last: int) -> None:
        """Put the rolling snapshot of a sequence that leaves into its table, where pages of tokens
        [first, last) go to the tree.
        """
        # The sequence holds no pages, or none of states.
        if self._states is None or not seq.further:
            return
        held = seq.further[self._states_index]
        place = held.rolling_place
        # A row in flight went beyond the answer's end, or the tree has a newer one.
        if not held.rolling or not first <= place < last:
            return
        width = self._states.width
        held.pages[place * width : (place + 1) * width] = held.rolling
        held.first = min(held.first, place)
        held.rolling = array("i")
        self._rolling.pop(seq.handle, None)

    def _drop_snapshots(self, seq: Seq) -> bool:
        """Free a sequence's snapshots that the tree lacks. Returns whether there were any."""
        if self._states is None:
            return False
        width = self._states.width
        held = seq.further[self._states_index]
        freed = array("i")
        # The row that fills the last page writes the snapshot there, which the runner knows of.
        for place in range(held.first, seq.computed // self.page_size):
            pages = held.pages[place * width : (place + 1) * width]
            if pages[0] in held.private:
                freed.extend(pages)
                held.pages[place * width : (place + 1) * width] = array("i", (NO_PAGE,)) * width
        held.private.difference_update(freed)
        self._private_snapshots -= len(freed)
        self.allocator.free(freed)
        return bool(freed)

    def _allocate_snapshot(self, group: GroupPages) -> array[int] | None:
        """Pages for a snapshot within the share of the pool; None: there are none to spare."""
        while self._snapshot_pages(group) + group.width > self._most_snapshot_pages:
            evicted = group.next_block(passed=True) or group.next_block(passed=False)
            # Running sequences hold all of the share.
            if evicted is None:
                return None
            self.allocator.free(group.pop_block(*evicted))
        # Without the watermark a snapshot would take the room that decoding needs next.
        # One that takes the place of another's rolling snapshot would be lost like that.
        if self.available - self._rolling_pages < group.width + self.watermark:
            return None
        pages = self.allocate(group.width)
        if pages is not None:
            self._private_snapshots += group.width
        return pages

    def _snapshot_pages(self, group: GroupPages) -> int:
        """Pages of the pool that snapshots take."""
        return self._private_snapshots + group.evictable_pages + group.locked_pages

    def _hold_further(self, seq: Seq) -> None:
        """Let a sequence have page tables of the further groups, from its first pages on."""
        # A sequence that goes on keeps the blocks that it has.
        if not seq.further:
            seq.further = [FurtherPages(group.width) for group in self._groups]

    def _leave_behind(self, seq: Seq, position: int) -> None:
        """Give back the blocks of further groups that no row from `position` on reads.

        A step in flight may still read them: their next owner writes in a later step.
        """
        for group, held in zip(self._groups, seq.further, strict=True):
            visible = min(group.first_block(position), len(seq.pages))
            # A snapshot is read by the row that begins with it alone, the first one that names it.
            if group is self._states and seq.pages_sent_to_runner > visible:
                visible = position // self.page_size
            self._give_back(group, held, visible, left_behind=True)

    def leave_snapshots(self, seqs: Iterable[Seq]) -> bool:
        """Give up the snapshots that running sequences hold and no row of theirs reads.

        The plan that is being made has no rows yet: their steps would write them.
        Returns whether pages became available.
        """
        if self._states is None:
            return False
        before = self.available
        for seq in seqs:
            if seq.further:
                self._leave_behind(seq, seq.computed)
        return self.available > before

    def _give_back(
        self, group: GroupPages, held: FurtherPages, end: int, *, left_behind: bool
    ) -> None:
        """Free or unlock a sequence's blocks in front of block `end`."""
        width = group.width
        freed = array("i")
        for place in range(held.first, end):
            pages = held.pages[place * width : (place + 1) * width]
            # No snapshot was taken here.
            if pages[0] == NO_PAGE:
                continue
            if pages[0] in held.private:
                held.private.difference_update(pages)
                freed.extend(pages)
                if group is self._states:
                    self._private_snapshots -= width
            else:
                group.unlock(pages[0], left_behind=left_behind)
            held.pages[place * width : (place + 1) * width] = array("i", (NO_PAGE,)) * width
        held.first = max(held.first, end)
        self.allocator.free(freed)

    def further_pages(
        self, seq: Seq, first: int, end: int | None = None
    ) -> tuple[tuple[int, array[int]], ...]:
        """What the end of a prompt sees of its pages of tokens [first, end), by further group.

        Returns:
            (place of the first page, counted in pages of the pool; pages) of each.
        """
        found = []
        for group, held in zip(self._groups, seq.further, strict=False):
            # The state at the prompt's end, whatever pages of tokens come with it.
            if group is self._states:
                is_end = end is None or end == self.pages(seq.prompt_len)
                found.append((0, seq.state_pages if is_end else array("i")))
                continue
            start = max(first, group.first_block(seq.prompt_len))
            stop = len(seq.pages) if end is None else end
            pages = held.pages[start * group.width : max(start, stop) * group.width]
            found.append((start * group.width, pages))
        return tuple(found)

    def adopt_prefix(self, seq: Seq) -> None:
        """Share pages that another sequence computed since the last chunk of this prompt."""
        ends_at_page = len(seq.pages) * self.page_size == seq.computed
        # The last page holds computed tokens already; a shared one would have to replace it.
        if not ends_at_page:
            return
        # P: D reads pages that were announced, so the prompt cannot be computed again from its
        # start if a shared page turns out to be damaged.
        if seq.announced_pages and self.restores.has_unverified:
            return
        match = self.match_prefix(seq, seq.reusable_tokens)
        # The tree has nothing beyond the tokens computed here.
        if match.num_tokens <= seq.computed:
            self.drop_match(match)
            return
        # A locked snapshot takes pages that no estimate counts: the prompt could not go on.
        left = self.pages(len(seq.tokens)) - len(match.pages)
        if self.holds_snapshot(match) and left > self.available:
            self.drop_match(match)
            return
        self.share_prefix(seq, match)
        seq.computed = match.num_tokens

    # ------------------------------------------------------------------ giving

    def publish(self, seq: Seq, *, leaves: bool = False) -> None:
        """Offer every whole page of known tokens whose computation is scheduled to the tree.

        Args: `leaves`: the sequence releases its pages next.
        """
        first = seq.published
        last = min(seq.computed, len(seq.tokens)) // self.page_size
        # Without a radix cache all pages stay private, and are free when the sequence ends.
        if last <= first or not self._publishes:
            return
        if seq.node is not None and self.cache.is_quarantined(seq.node):
            # Pages computed from a damaged one would give other sequences wrong tokens.
            return
        priority = self._priority.base(seq)
        if leaves:
            self._end_rolling(seq, first, last)
        if self._states is not None and not leaves:
            probe = self.cache.probe(seq.key, seq.req.namespace, last * self.page_size)
            known = probe.num_tokens // self.page_size
            # The tree has these tokens without a snapshot in front of the sequence. It would lock
            # the tree's pages beside its own, and alone in the pool wait for them for ever.
            if known > first:
                self._give_snapshots(seq, self._states, range(first, min(known, last)), priority)
                return
        further = [
            held.pages[first * group.width : last * group.width]
            for group, held in zip(self._groups, seq.further, strict=True)
        ]
        inserted = self.cache.insert(
            seq.key, seq.pages[first:last], seq.req.namespace, first, priority, further=further
        )
        self.cache.lock(inserted.node)
        self._hold_path(seq, inserted.node, last)
        # Where the tree had the same tokens already, its pages stay and ours remain private.
        first_taken = first + len(inserted.existing_pages)
        seq.private.difference_update(seq.pages[first_taken:last])
        for group, held in zip(self._groups, seq.further, strict=True):
            for place in range(max(first, held.first), last):
                pages = held.pages[place * group.width : (place + 1) * group.width]
                # Where the tree had a block of the same tokens, ours remains private.
                if pages[0] in held.private and group.owns(pages[0]):
                    held.private.difference_update(pages)
                    group.lock(pages[0])
                    if group is self._states:
                        self._private_snapshots -= group.width

    def _give_snapshots(self, seq: Seq, states: GroupPages, places: range, priority: int) -> None:
        """Let the tree have a sequence's snapshots at pages of tokens that it has already."""
        width = states.width
        held = seq.further[self._states_index]
        further = [
            own.pages[places.start * group.width : places.stop * group.width]
            if group is states
            else array("i", (NO_PAGE,)) * (len(places) * group.width)
            for group, own in zip(self._groups, seq.further, strict=True)
        ]
        pages = seq.pages[places.start : places.stop]
        inserted = self.cache.insert(
            seq.key, pages, seq.req.namespace, places.start, priority, further=further
        )
        given = array("i")
        for place in places:
            block = held.pages[place * width : (place + 1) * width]
            if block[0] in held.private and states.owns(block[0]):
                held.private.difference_update(block)
                held.pages[place * width : (place + 1) * width] = array("i", (NO_PAGE,)) * width
                self._private_snapshots -= width
                states.lock(block[0])
                given.append(block[0])
        if given:
            self.cache.lock(inserted.node)
            self._given.append((inserted.node, given))

    def release_given(self) -> None:
        """Let snapshots go that this plan writes, rolling ones and those that sequences gave to the
        tree: the next owner of their pages writes in a later step than the one that takes them.
        """
        for seq in self._rolled:
            # A sequence that has left meanwhile has none.
            if seq.further and seq.further[self._states_index].rolling:
                self._rolling[seq.handle] = seq.further[self._states_index]
        self._rolled = []
        for node, blocks in self._given:
            self.cache.unlock(node)
            for block in blocks:
                assert self._states is not None, "snapshots are given by models with states"
                self._states.unlock(block, left_behind=True)
        self._given = []

    def release_device_memory(self, seq: Seq, mode: str, prefill_rate: float) -> None:
        """Release everything that a sequence holds, which is going to come back.

        Args:
            mode: recompute: the KV is lost, but for published pages. cache: it stays in the
                tree, evictable. offload: pages that no other sequence uses go to the host now, so
                that they are free here, and stay there until the sequence is back; without room
                there, as cache. auto: offload if copying the pages takes less time than computing
                them at `prefill_rate` [tokens/s], else cache.

        The last page, if it is not full, is always computed again: it goes into the same forward
        pass as the token that has to be computed anyway, and a page that is not full has no place
        in the tree.
        """
        if mode != "recompute":
            self.publish(seq, leaves=True)
        # Remembered, because the sequence leaves its path before the end of it may be moved.
        node = seq.node
        self.release_pages(seq)
        copy_rate = self.host_pages_per_s * self.page_size
        pays = mode == "offload" or (mode == "auto" and prefill_rate < copy_rate)
        if self.host is not None and node is not None and pays:
            self._offload_branch(seq, node, self.host)

    def _offload_branch(self, seq: Seq, node: RadixNode, host: HostTier) -> None:
        """Send the end of a branch without users to the host, pinned for this sequence."""
        keys, num_slots = host.branch_keys(self.cache.branch_nodes(node))
        # Without room on the host the pages stay in the tree, where the sequence may find them.
        if not keys or not host.reserve(num_slots):
            return
        self.cache.evict_branch(node)
        seq.pinned = host.only_here(keys)
        host.pin(seq.pinned)

    def release_pages(self, seq: Seq) -> None:
        """Free what a sequence holds; what it published stays cached."""
        seq.pages_were_released = True
        self._unpin_pages(seq)
        # Sorted, so that equal inputs give equal pages: recordings replay to identical plans.
        if seq.private:
            self.allocator.free(array("i", sorted(seq.private)))
            seq.private.clear()
        self._free_rolling(seq)
        for group, held in zip(self._groups, seq.further, strict=False):
            self._give_back(group, held, len(seq.pages), left_behind=False)
        seq.further = []
        self._hold_path(seq, None, 0)
        seq.pages = array("i")
        self.release_state(seq)

    def park_state(self, seq: Seq) -> None:
        """P: let the next plan copy the state of an unfinished prompt to its pages, because another
        sequence gets its slot.
        """
        # Nothing is computed yet, or the state at the prompt's end goes to these pages anyway; or
        # it is parked since the last time, and no row has begun with it.
        if not seq.state_pages or not 0 < seq.computed < seq.prompt_len:
            return
        if seq.state_tokens == seq.computed or self._has_snapshot(seq):
            return
        parked = StateCopy("park", seq.slot, seq.computed, seq.state_pages)
        self._parked[seq.handle] = parked
        seq.state_tokens = seq.computed

    def _has_snapshot(self, seq: Seq) -> bool:
        """Whether the next row of a sequence finds a snapshot of the tree in front of it: its slot
        may stand elsewhere, where another sequence computed the pages in between.
        """
        place, behind = divmod(seq.computed, self.page_size)
        held = seq.further[-1]
        block = held.pages[(place - 1) * held.width]
        # A snapshot of its own may go to the tree, and out of its table, before that row.
        return not behind and block != NO_PAGE and block not in held.private

    def release_state(self, seq: Seq) -> None:
        """Free the pages of a sequence's own state."""
        # Their next owner must not find another's state in them.
        self._parked.pop(seq.handle, None)
        seq.state_tokens = -1
        if seq.state_pages:
            self.allocator.free(seq.state_pages)
            seq.state_pages = array("i")

    def quarantine(self, seq: Seq) -> None:
        """Keep the cached pages of this sequence from all others, those on the host too.

        The transfer peer found one of them damaged, or the model computed NaN or infinity from
        them.
        """
        self._unpin_pages(seq)
        self.quarantine_prefix(seq.key, seq.req.namespace)

    def quarantine_prefix(self, tokens: bytes, namespace: bytes) -> None:
        """Keep every cached page of the prompts that begin with the first page of these tokens from
        all sequences.
        """
        self.quarantined_pages += self.cache.quarantine(tokens, namespace)
        if self.host is not None:
            self.quarantined_pages += self.host.quarantine(tokens, namespace)

    def flush(self) -> int:
        """Drop every cached page without users, on the host too; returns how many of the device."""
        if self.host is not None:
            self.host.clear()
        return self.cache.flush()
