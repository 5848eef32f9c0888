"""Token ids that the model takes, and the check of every id on its way to a rank.

The rows of the model's embedding decide, not the tokenizer. A fine-tune may have added tokens to
the tokenizer alone: the model has no row for their ids, as text or as ids. An embedding may be
padded beyond the tokenizer: the model takes and generates those ids. A tokenizer of which much lies
beyond the model is another model's (`refuse_foreign_tokenizer`).

Ids that a client, a router or a resumed answer states are checked as they are read (`check_ids`,
`read_ids`, `read_bias`); ids that the tokenizer made of a text are checked where it has tokens that
the model lacks (`check_encoded`), so that others cost nothing.

Prompts may come as ids beside their text, from a router that tokenizes for the engine that
described itself under an address. Another engine may have taken its place since, so the ids come
with the fingerprint of their tokenizer, and an engine with another one refuses them
(`refuse_other_tokenizer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from baton.errors import BadRequest, ConfigError, FingerprintMismatch
from baton.server.fields import bad, shown
from baton.server.request.schema import MAX_ITEMS
from baton.server.text.tokenizer import Tokenizer

SHOWN_TOKENS = 8
"""Tokens named in the warning at the start."""
FOREIGN_SHARE = 0.1
"""A tokenizer that has more tokens beyond the model, as a share of its ids, is another model's."""
SHOWN_CHARS = 50
MAX_DIGITS = 12
"""Length of a token id as text, at most: more than any vocabulary needs."""


def refuse_other_tokenizer(stated: str | None, own: str) -> None:
    """Raise FingerprintMismatch for ids that were made for another tokenizer than this engine's."""
    if stated is not None and stated != own:
        raise FingerprintMismatch(
            f"input_ids were made for the tokenizer {stated[:64]}, this engine's is "
            f"{own or 'unknown'}; send the text "
            "alone, or tokenize with this engine's files",
            param="input_ids",
        )


def rows_of_ids(value: Any, count: int, *, many: bool) -> list[Any]:
    """`input_ids` as `count` lists: one list, or an array of lists where the body holds `many`.
    Raises BadRequest.
    """
    rows = value if many else [value]
    if type(rows) is not list or len(rows) != count or count > MAX_ITEMS:
        wanted = (
            f"an array of {min(count, MAX_ITEMS)} arrays of token ids"
            if many
            else "an array of token ids"
        )
        raise bad("input_ids", f"must be {wanted}, the prompts as they are tokenized")
    return rows


class ModelVocabulary:
    """Ids from 0 to `size` - 1, of which the tokenizer may know fewer or more."""

    def __init__(self, size: int, tokenizer: Tokenizer) -> None:
        self.size = size
        self.missing = tokenizer.tokens_from(size)
        """Tokens of the tokenizer that the model has no row for, by id."""
        self._decodable = max(size, tokenizer.vocab_size)

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.size

    def refuse_foreign_tokenizer(self) -> None:
        """Raise ConfigError where so many tokens are missing that the tokenizer is another model's:
        checkpoints whose embedding was not enlarged miss a few added ones."""
        if len(self.missing) > self.size * FOREIGN_SHARE:
            raise ConfigError(
                f"the tokenizer has {len(self.missing)} tokens that the model lacks, whose "
                f"vocabulary has {self.size} ids: it belongs to another model; give "
                "--tokenizer-path the directory of the model's own"
            )

    def check_ids(self, ids: Any, param: str) -> None:
        """Raise BadRequest unless `ids` is an array of ids that the model takes."""
        self._check_range(ids, param, self.size)

    def check_encoded(self, ids: Sequence[int], param: str) -> None:
        """Raise BadRequest if a text contains a token that the model lacks. `ids`: from the
        tokenizer.
        """
        if self.missing and ids and max(ids) >= self.size:
            raise self._refusal(param, max(ids))

    def check_decodable(self, ids: Any, param: str) -> None:
        """Raise BadRequest unless `ids` is an array of ids that the model or the tokenizer
        knows.
        """
        self._check_range(ids, param, self._decodable)

    def read_ids(self, name: str, value: Any, most: int) -> tuple[int, ...]:
        """An id or an array of at most `most` ids, each of which the model takes. Raises
        BadRequest.
        """
        values = [] if value is None else value if type(value) is list else [value]
        if len(values) > most:
            raise bad(name, f"has {len(values)} entries, at most {most} are accepted")
        self.check_ids(values, name)
        return tuple(values)

    def read_bias(self, name: str, table: dict[str, Any]) -> tuple[tuple[int, float], ...]:
        """logit_bias: pairs of an id that the model takes and a number from -100 to 100. Raises
        BadRequest.
        """
        for key, value in table.items():
            if not key.isascii() or not key.isdigit() or len(key) > MAX_DIGITS:
                raise bad(name, f"has the key {key[:SHOWN_CHARS]!r}, which is no token id")
            if int(key) not in self:
                raise self._refusal(name, int(key))
            if type(value) not in (int, float, Decimal) or not -100 <= value <= 100:
                raise bad(name, f"of token {key} must be a number from -100 to 100")
        return tuple((int(key), float(value)) for key, value in table.items())

    def ids_within(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those that the model can generate, in ascending order: no answer ends with another
        one.
        """
        return tuple(sorted({token_id for token_id in ids if token_id in self}))

    def warning(self) -> str | None:
        """Sentence for the log about tokens that the model lacks; None when there are none."""
        if not self.missing:
            return None
        named = [f"{text!r} ({token_id})" for token_id, text in sorted(self.missing.items())]
        more = len(named) - SHOWN_TOKENS
        listed = ", ".join(named[:SHOWN_TOKENS]) + (f" and {more} more" if more > 0 else "")
        return (
            f"the tokenizer has {len(named)} tokens that the model lacks, whose vocabulary has "
            f"{self.size} ids: "
            f"{listed}; requests with them are refused with 400; enlarge the checkpoint's "
            "embedding to serve them"
        )

    def _check_range(self, ids: Any, param: str, end: int) -> None:
        if type(ids) is not list or (ids and set(map(type, ids)) != {int}):
            raise bad(param, f"must be an array of token ids, integers from 0 to {end - 1}")
        if ids and not 0 <= min(ids) <= max(ids) < end:
            raise self._refusal(param, min(ids) if min(ids) < 0 else max(ids), end)

    def _refusal(self, param: str, token_id: int, end: int | None = None) -> BadRequest:
        text = self.missing.get(token_id)
        named = shown(token_id) if text is None else f"{token_id} ({text[:SHOWN_CHARS]!r})"
        limit = self.size if end is None else end
        return bad(
            param,
            f"has the token id {named}, but the model's vocabulary has {limit} ids, 0 to "
            f"{limit - 1}; leave that token "
            "out, or serve a checkpoint whose embedding and tokenizer agree",
        )
