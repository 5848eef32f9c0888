"""The longest prefix that device and host hold together, where the model has further page groups.

    pages of tokens   0 1 2 3 4 5 6 7
    group 0           d d d d h h . .        d on the device, h on the host, . nowhere
    a window          . . . h d h h .        a row that begins behind page 6 reads blocks 4 and 5

A prefix is valid up to a length if each group has on either side what a row beginning there reads.
What the device lacks of it comes back from the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.cache.group_pages import NO_PAGE, GroupPages
from baton.cache.host import HostPage, HostTier
from baton.cache.radix import PrefixMatch

ON_HOST = 0
"""Stands in a table of blocks for one that the host has: any page but NO_PAGE."""


class MissingBlock(NamedTuple):
    """A block of a further group that the host has and the device lacks."""

    group: int
    """0 is the first one after group 0."""
    place: int
    """Among the pages of tokens."""
    host_page: HostPage


@dataclass(frozen=True, slots=True)
class JointPrefix:
    length: int
    """In pages of tokens."""
    pages: Sequence[HostPage] = ()
    """Group 0's pages that the device lacks: the last ones of the prefix."""
    blocks: Sequence[MissingBlock] = ()

    @property
    def host_pages(self) -> list[HostPage]:
        """All that comes back, in this order."""
        return [*self.pages, *(block.host_page for block in self.blocks)]

    @property
    def places(self) -> list[int]:
        """Place of each page of the pool that comes back, in the order of `host_pages`."""
        first = self.length - len(self.pages)
        places = list(range(first, self.length))
        for block in self.blocks:
            places += [block.place] * len(block.host_page.slots)
        return places


@dataclass(slots=True)
class _BlockTable:
    """What both sides have of a further group along a prefix."""

    group: GroupPages
    blocks: array[int]
    on_host: dict[int, HostPage] = field(default_factory=dict)
    """By place."""


def find_joint_prefix(
    host: HostTier,
    groups: Sequence[GroupPages],
    path: PrefixMatch,
    prompt: tuple[bytes, bytes],
    *,
    valid: int,
    limit: int,
) -> JointPrefix:
    """Find the longest prefix of at most `limit` pages.

    Args:
        path: of RadixCache.match_full_group.
        prompt: tokens and namespace.
        valid: pages of tokens that the device alone has in all groups.
    Cost: O(pages of the prefix), with a look-up per block that the device lacks and a longer prefix
        could read.
    """
    tokens, namespace = prompt
    continuation = host.find(path.node, tokens, namespace, len(path.pages), limit)
    keys = host.path_keys(path.node) + [page.key for page in continuation]
    tables = []
    for index, (group, pages) in enumerate(zip(groups, path.further, strict=True)):
        table = _BlockTable(group, pages[:: group.width])
        table.blocks.extend([NO_PAGE] * len(continuation))
        for place in range(group.first_block((valid + 1) * group.page_size), len(keys)):
            if table.blocks[place] != NO_PAGE:
                continue
            host_page = host.find_block(keys[place], index + 1)
            if host_page is not None:
                table.on_host[place] = host_page
                table.blocks[place] = ON_HOST
        tables.append(table)
    length = len(keys)
    before = -1
    # A shorter prefix for one group may end where another group has a hole.
    while length != before:
        before = length
        for table in tables:
            length = table.group.longest_valid(table.blocks, length)
    if length <= valid:
        return JointPrefix(valid)
    missing = [
        MissingBlock(index, place, host_page)
        for index, table in enumerate(tables)
        for place, host_page in table.on_host.items()
        if table.group.first_block(length * table.group.page_size) <= place < length
    ]
    return JointPrefix(length, continuation[: max(length - len(path.pages), 0)], missing)
