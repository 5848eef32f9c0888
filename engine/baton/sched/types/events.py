"""Events of the scheduler for its shell: values, in the order in which they must be carried out."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import EngineError
from baton.sched.types.plan import PromptLogprobs, TokenLogprobs
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages, RequestTimeline


class RowError(NamedTuple):
    """Why a request ends without a further token."""

    code: str
    message: str
    param: str | None = None
    """Field of the request that is at fault."""

    @classmethod
    def of(cls, error: EngineError) -> RowError:
        return cls(error.code, error.message, error.param)


class EmittedTokens(NamedTuple):
    """New output of a request: zero or one token, and its end if this is it.

    `new_token` makes one faster.
    """

    handle: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    cached_tokens: int
    """Prompt tokens that were not computed by this cluster's prefill for this request."""
    logprobs: TokenLogprobs | None = None
    error: RowError | None = None
    """Set when finish is ERROR."""
    retry_after_secs: int | None = None
    """Time after which to retry, with an error of overload."""
    stages: FirstTokenStages | None = None
    """Stages until the first token, which they come with."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of prompt tokens, in the order of the prompt; they come before the first token."""
    drafts: tuple[int, int] | None = None
    """Drafted tokens of the request so far: accepted, rejected. The last ones that come count;
    None: as before.
    """


NewToken = tuple[
    int,
    tuple[int],
    FinishReason | None,
    int,
    TokenLogprobs | None,
    None,
    None,
    FirstTokenStages | None,
    None,
    tuple[int, int] | None,
]
"""Fields of an EmittedTokens that has a token and no error."""
new_token: Callable[[NewToken], EmittedTokens] = functools.partial(tuple.__new__, EmittedTokens)
"""An EmittedTokens of its fields in order, without the Python call of the generated `__new__`: a
step makes hundreds.
"""


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """Order to the transfer driver about the room of a request."""

    req: ValidatedRequest


@dataclass(frozen=True, slots=True)
class PagesFinal(TransferEvent):
    """P: prompt pages [first_page, first_page + len(pages)) are computed and stay the same while
    the request lives.
    """

    first_page: int
    """Counted in pages of the group."""
    pages: array[int]
    group: int = 0
    """Page group that they belong to."""


@dataclass(frozen=True, slots=True)
class PrefillDone(TransferEvent):
    """P: the whole prompt is computed and its first token drawn; the pages stay locked until
    `release`.
    """

    total_pages: int
    last_page_tokens: int
    token: int
    cached_tokens: int
    logprobs: TokenLogprobs | None
    completes_grammar: bool = False
    """The answer is the first token alone: its grammar allows no other."""
    further: tuple[tuple[int, int], ...] = ()
    """(first page, end) of the pages of groups 1, 2, ... that the prompt's end sees;
    `total_pages` are those of group 0.
    """


@dataclass(frozen=True, slots=True)
class OpenTransfer(TransferEvent):
    """D: meet P and learn which pages of the prompt are ready."""


@dataclass(frozen=True, slots=True)
class GrantPages(TransferEvent):
    """D: the prompt's pages before `start_page` are here already; the rest may be written into
    `pages`.
    """

    start_page: int
    pages: array[int]
    further: tuple[tuple[int, array[int]], ...] = ()
    """(start page, pages) of groups 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class RevokeGrant(TransferEvent):
    """D: take the granted pages back if nothing has come for them; `grant_revoked` or
    `transfer_announced` answers.
    """


@dataclass(frozen=True, slots=True)
class AbortTransfer(TransferEvent):
    """Close a room at the peer. On D the pages stay reserved until `transfer_closed`."""

    code: str


Event = EmittedTokens | TransferEvent | RequestTimeline
