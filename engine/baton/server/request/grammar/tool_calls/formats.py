"""The format of each name."""

from __future__ import annotations

from collections.abc import Mapping

from baton.server.request.grammar.tool_calls.call_format import CallFormat
from baton.server.request.grammar.tool_calls.gpt_oss_calls import GptOssFormat
from baton.server.request.grammar.tool_calls.header_calls import (
    DeepseekV3Format,
    DeepseekV31Format,
    KimiK2Format,
    MistralV13Format,
)
from baton.server.request.grammar.tool_calls.json_calls import (
    GraniteFormat,
    HermesFormat,
    Llama3Format,
    MistralFormat,
    Phi4Format,
    UnmarkedFormat,
)
from baton.server.request.grammar.tool_calls.pythonic_calls import PythonicFormat
from baton.server.request.grammar.tool_calls.tag_calls import (
    DeepseekV32Format,
    Glm45Format,
    Glm47Format,
    Qwen3CoderFormat,
)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "llama3": Llama3Format(),
    "pythonic": PythonicFormat(),
    "mistral": MistralFormat(),
    "mistral_v13": MistralV13Format(),
    "deepseek_v3": DeepseekV3Format(),
    "deepseek_v31": DeepseekV31Format(),
    "deepseek_v32": DeepseekV32Format(),
    "gpt_oss": GptOssFormat(),
    "glm45": Glm45Format(),
    "glm47": Glm47Format(),
    "kimi_k2": KimiK2Format(),
    "granite": GraniteFormat(),
    "phi4": Phi4Format(),
    "json": UnmarkedFormat(),
}
"""By the names of --tool-parser."""
