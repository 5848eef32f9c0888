"""Handlers of what a node says about itself: its models, its configuration, its API."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from aiohttp import web

from baton import DISTRIBUTION
from baton.config import SECRETS, EngineConfig
from baton.sched.setup.from_config import resolve_policy
from baton.server.http.http_utils import encode_json, json_body_response, json_response
from baton.server.http.lifecycle import ServerLifecycle
from baton.server.observability.fingerprint import fingerprint, tokenizer_hash
from baton.server.request.grammar.checks.reader import grammar_fingerprint
from baton.server.request.validation import RequestValidator
from baton.server.text.answer_format import AnswerFormat
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import native_extension
from baton.server.worker.client import RankSet

ANTHROPIC_VERSION_HEADER = "anthropic-version"
"""Clients of Anthropic's API send it."""
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Policy of the page of /docs, which has a style of its own and nothing else."""
FEATURES = {
    "null": ["resume"],
    "prefill": ["local_answer", "reopen", "resume"],
    "decode": ["local_prefill", "resume"],
}
"""By mode, what a router may rely on (docs/protocol.md §2)."""


def version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


@dataclass(slots=True)
class NodeDescription:
    """Facts of this node for clients and routers."""

    config: EngineConfig
    facts: ModelFacts
    answer_format: AnswerFormat
    ranks: RankSet
    lifecycle: ServerLifecycle
    validator: RequestValidator
    incarnation: str
    started_at: int = field(default_factory=lambda: int(time.time()))
    _tokenizer_hash: str = field(init=False)

    def __post_init__(self) -> None:
        self._tokenizer_hash = tokenizer_hash(self.facts.tokenizer_path)

    def fingerprint(self) -> dict[str, str]:
        """Empty until a rank has reported its layout."""
        layout = self.ranks.ranks[0].info.get("layout")
        if not isinstance(layout, dict):
            return {}
        grammar = grammar_fingerprint(self.config)
        answer_format = self.answer_format.canonical
        return fingerprint(self.facts, self._tokenizer_hash, layout, answer_format, grammar)

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.facts.name,
            "object": "model",
            "created": self.started_at,
            # Routers of this family decide by this word how to dispatch to a P/D pair: smg 1.13
            # sends both legs at once to "sglang", which is our protocol, and vLLM's sequential form
            # to everything else.
            "owned_by": "sglang",
            "root": self.facts.name,
            "parent": None,
            "max_model_len": self.validator.limits.context_length,
        }

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": str(self.facts.path),
            "tokenizer_path": str(self.facts.tokenizer_path),
            "served_model_name": self.facts.name,
            "is_generation": True,
            "model_type": self.facts.model_type,
            "architectures": self.facts.architectures,
            "context_length": self.validator.limits.context_length,
            "has_chat_template": self.facts.chat_template is not None,
        }

    def server_info(self) -> dict[str, Any]:
        config = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in SECRETS}
        config["model_path"] = str(self.facts.path)
        config["served_model_name"] = self.facts.name
        config["served_model_names"] = self.validator.model_names
        if self.lifecycle.bootstrap is not None:
            config["disaggregation_bootstrap_port"] = self.lifecycle.bootstrap.port
        ranks = self.ranks.ranks
        now = self.lifecycle.condition()
        if own_fingerprint := self.fingerprint():
            config["fingerprint"] = own_fingerprint
        return {
            **config,
            **ranks[0].info,  # max_total_num_tokens, dtype, layout: equal on all ranks
            # A rank's pool may hold less than the rank says.
            "context_length": self.validator.limits.context_length,
            "max_prompt_chars": self.validator.limits.max_prompt_chars,
            "engine": "baton",
            "incarnation": self.incarnation,
            "tokenizer_fingerprint": self.facts.tokenizer_fingerprint,
            "chat_template_caps": self.facts.template_caps,
            "tool_parser": self.answer_format.tool_parser,
            "reasoning_parser": self.answer_format.reasoning_parser,
            "schedule_policy_resolved": resolve_policy(self.config),
            "baton_features": FEATURES.get(self.config.disaggregation_mode, []),
            "state": now.state.value,
            "status": now.state.value,  # SGLang's name
            "load_progress": self.lifecycle.load_progress,
            "version": version(),
            "priority_order": "lower first"
            if self.config.schedule_low_priority_values_first
            else "higher first",
            "internal_states": [
                {"dp_rank": r.dp_rank, "ready": r.ready, "dead": r.dead, **r.info} for r in ranks
            ],
        }


@dataclass(frozen=True, slots=True)
class ApiDescription:
    """Makes the description of the API, when a client asks for it."""

    make_document: Callable[[], dict[str, Any]]
    make_page: Callable[[], str]


NODE: web.AppKey[NodeDescription] = web.AppKey("node", NodeDescription)
API: web.AppKey[ApiDescription] = web.AppKey("api", ApiDescription)


async def list_models(request: web.Request) -> web.Response:
    card = request.app[NODE].model_card()
    return _models_response(request, {"object": "list", "data": [card]})


async def show_model(request: web.Request) -> web.Response:
    node = request.app[NODE]
    name = request.match_info["id"]
    if name != node.facts.name:
        raise node.facts.not_served(name)
    return _models_response(request, node.model_card())


def _models_response(request: web.Request, models: dict[str, Any]) -> web.Response:
    """The answer in the form of the client's API. `models`: a list in OpenAI's form, or one of
    it.
    """
    body = encode_json(models)
    if ANTHROPIC_VERSION_HEADER in request.headers:
        body = native_extension().anthropic_models(body)
    return json_body_response(body)


async def show_version(request: web.Request) -> web.Response:
    # Routers take a server without server info that answers this path for vLLM's.
    return json_response({"version": version(), "engine": "baton"})


async def show_model_info(request: web.Request) -> web.Response:
    return json_response(request.app[NODE].model_info())


async def show_server_info(request: web.Request) -> web.Response:
    return json_response(request.app[NODE].server_info())


async def show_document(request: web.Request) -> web.Response:
    return json_response(request.app[API].make_document())


async def show_page(request: web.Request) -> web.Response:
    headers = {"content-security-policy": CONTENT_SECURITY_POLICY}
    page = request.app[API].make_page()
    return web.Response(text=page, content_type="text/html", headers=headers)
