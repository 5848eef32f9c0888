"""Continuing an answer that another engine began, as routers request it (docs/protocol.md §2).

1. The router asks for it with the header `x-baton-emit-tokens`; before each event of the stream
   stands a comment with the tokens that are out with the event: `: baton {"ids": [...]}`, in the
   first one also the seed and the time.
2. D dies. The same request goes to another pair with `baton_resume`: `{"ids": [...], "seed": ...,
   "created": ...}`, and `fingerprint`, that of the engine which gave the ids: an engine with
   another one refuses them.
3. The tokens become the end of the prompt; nothing of them is shown again, and counts go on behind
   them.

Invariant: token i depends on the tokens before it, (seed, position i) and the parameters, so the
answer is the one that the first engine would have given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import FingerprintMismatch
from baton.server import fields
from baton.server.request.schema import RequestFields, ResumeFields
from baton.server.request.token_ids import ModelVocabulary


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The beginning of an answer."""

    ids: tuple[int, ...]
    seed: int
    created: int
    """Unix seconds: what the first engine's events say."""
    events: int | None = None
    """Events that the client has, where they are numbered."""


def read_resume(
    request: RequestFields,
    most: int,
    vocabulary: ModelVocabulary,
    own_fingerprint: Mapping[str, str],
) -> ResumeState | None:
    """`baton_resume`. Raises BadRequest, and FingerprintMismatch for ids of an engine that differs
    from this one.
    """
    if request.baton_resume is None:
        return None
    state = fields.read(ResumeFields, request.baton_resume, "baton_resume.")
    _refuse_other_fingerprint(state.fingerprint or {}, own_fingerprint)
    ids = vocabulary.read_ids("baton_resume.ids", state.ids, most)
    if not ids or state.seed is None or state.created is None:
        raise fields.bad("baton_resume", "must have ids (at least one), seed and created")
    return ResumeState(ids, state.seed, state.created, state.events)


def _refuse_other_fingerprint(stated: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise FingerprintMismatch for an aspect that both tell and that differs."""
    for aspect in sorted(stated.keys() & own.keys()):
        if stated[aspect] != own[aspect]:
            raise FingerprintMismatch(
                f"the answer was begun by an engine whose {aspect} has the fingerprint "
                f"{stated[aspect][:64]}, this "
                f"engine's is {own[aspect]}; send the request without baton_resume",
                param="baton_resume",
            )
