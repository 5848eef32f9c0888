"""Readers that the checks of all forms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from baton.config import EngineConfig
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.item_maker import ItemMaker
from baton.server.request.prompt.reader import PromptReader
from baton.server.request.shared_fields import SharedReader
from baton.server.request.unsupported_fields import find_ignored
from baton.server.text.answer_format import AnswerFormat
from baton.server.text.model_info import ModelFacts


@dataclass(frozen=True)
class ValidationParts:
    """Readers of the parts of a body, in the order in which a check uses them."""

    config: EngineConfig
    facts: ModelFacts
    answer_format: AnswerFormat
    shared: SharedReader
    grammars: GrammarReader
    prompts: PromptReader
    items: ItemMaker

    @cached_property
    def model_names(self) -> list[str]:
        """Names by which a request may ask for the model."""
        facts = self.facts
        return sorted({facts.name, self.config.model_path, str(facts.path), "default"})

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            raise self.facts.not_served(model)

    @cached_property
    def _unused_fields(self) -> frozenset[str]:
        return frozenset(self.shared.tenancy.unused_fields)

    def find_ignored(
        self,
        body: Mapping[str, Any],
        refused: Mapping[str, tuple[Any, ...]],
        *schemas: type[msgspec.Struct],
        prefix: str = "",
    ) -> list[str]:
        """Fields of the body that have no effect. Raises UnsupportedParameter for one of
        `refused`.
        """
        return find_ignored(body, refused, *schemas, prefix=prefix, unused=self._unused_fields)
