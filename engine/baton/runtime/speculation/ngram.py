"""Drafts by repetition: what followed the longest earlier occurrence of an answer's last tokens.

Occurrences are looked for in the request itself, in its `prediction`, and in recent answers to the
same tenant with the same cache_salt (crate baton-drafts).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton import _native
from baton.sched.types.sequence import Seq


class NgramDrafter:
    def __init__(self, min_match: int, store_tokens: int) -> None:
        """
        Args:
            min_match: fewest last tokens that have to occur.
            store_tokens: most tokens of recent answers.
        """
        self._native = _native.NgramDrafter(min_match=min_match, store_tokens=store_tokens)

    def start(self, seq: Seq) -> None:
        req = seq.req
        # Their length in front: no name of a tenant may make another group with the salt.
        tenant = req.tenant.encode()
        group = len(tenant).to_bytes(4, "little") + tenant + req.namespace
        tokens = seq.tokens.tobytes()
        # The beginning of a resumed answer came as the end of its prompt.
        prompt_len = seq.prompt_len - req.params.resumed
        self._native.start(seq.handle, group, tokens, prompt_len, req.prediction.tobytes())

    def append(self, handle: int, tokens: array[int]) -> None:
        self._native.append(handle, tokens.tobytes())

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        return [
            array("i", proposal) for proposal in self._native.propose_all(list(handles), list(most))
        ]

    def finish(self, handle: int) -> None:
        self._native.finish(handle)
