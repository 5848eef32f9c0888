"""Flags about the model and what is read from its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    HEADING: ClassVar = "model"

    model_path: str = opt(
        "demo",
        "Hugging Face model directory, owner/name of one in the Hugging Face cache, or 'demo' for "
        "the built-in model",
        also=("--model",),
        simulated=False,
    )
    tokenizer_path: str | None = opt(
        None,
        "directory or cached hub id with the tokenizer's files (default: the model's)",
        also=("--tokenizer",),
        simulated=False,
    )
    served_model_name: str | None = opt(
        None,
        "name in /v1/models and responses (default: the directory's name)",
        simulated=False,
    )
    load_format: str = opt(
        "auto",
        "auto: safetensors files; dummy: random weights of the config's shape",
        choices=("auto", "dummy"),
        on_device=True,
    )
    model_impl: str = opt(
        "auto",
        "native: blocks of this engine; transformers: the class of transformers, on the CPU and in "
        "one process (docs/models.md); auto: native where the family has blocks, else "
        "transformers",
        choices=("auto", "native", "transformers"),
        on_device=True,
    )
    dtype: str = opt(
        "auto",
        "compute type; auto: the checkpoint's; on the CPU bfloat16 for float16, which torch "
        "computes slowly there",
        choices=("auto", "float32", "bfloat16", "float16"),
        on_device=True,
    )
    quantization: str | None = opt(
        None,
        "int8 or int4: quantize the plain matrices of a checkpoint's layers at load; "
        "answers differ from the checkpoint's (docs/checkpoints.md). A quantized checkpoint needs "
        "no flag",
        choices=("int8", "int4"),
        on_device=True,
    )
    kv_cache_dtype: str = opt(
        "auto",
        "type of the KV cache; auto: the compute type; fp8_e4m3: a byte per number, with the "
        "checkpoint's scales (docs/checkpoints.md)",
        choices=("auto", "fp8_e4m3"),
        on_device=True,
    )
    simulate: str | None = opt(
        None,
        "no model: steps take the time of this device, reference or h200-8b; then name=number, "
        "separated by commas, for speed, length_scale and single numbers of the device "
        "(docs/simulate.md)",
        simulated=False,
    )
    context_length: int | None = opt(
        None,
        "longest prompt + answer accepted (default: the model's) [tokens]",
        also=("--max-model-len",),
        ge=1,
        simulated=False,
    )
    chat_template: str | None = opt(
        None,
        "file with a Jinja chat template that replaces the model's",
        simulated=False,
    )
    tool_parser: str = opt(
        "auto",
        "format in which the model writes tool calls, such as hermes or llama3; auto: found in its "
        "chat template, else by its model_type; none: calls are not read",
        also=("--tool-call-parser",),
        simulated=False,
    )
    unknown_tool_calls: str = opt(
        "text",
        "calls of tools that a request does not have; text: they are content; forward: they are "
        "calls, which clients answer with an error",
        choices=("text", "forward"),
        simulated=False,
    )
    reasoning_parser: str = opt(
        "auto",
        "markers between which the model reasons, such as think_tags; auto: found in its chat "
        "template, else by its model_type; none: reasoning is part of the content",
        simulated=False,
    )
    reasoning_field: str = opt(
        "reasoning_content",
        "member of chat answers that holds the reasoning",
        choices=("reasoning_content", "reasoning", "both"),
        simulated=False,
    )
    grammar: str = opt(
        "on",
        "structured output (docs/guide/structured-output.md); off: requests with a schema or "
        "grammar are refused, and the memory of the tokenizer's trie is saved, 0.03 to 0.5 GB per "
        "rank",
        choices=("on", "off"),
        simulated=False,
    )
    grammar_check_secs_per_minute: float = opt(
        10.0,
        "CPU time per minute that a client may use for checks of schemas and grammars that take "
        "longer than usual; later ones get 429; 0: no limit [seconds]",
        ge=0,
        simulated=False,
    )
    structured_whitespace: str = opt(
        "bounded",
        "white space between the parts of constrained JSON; bounded: one space, or a line break "
        "and at most 40 blanks; any: unlimited, with which some models write blanks until "
        "max_tokens; none: compact JSON",
        choices=("bounded", "any", "none"),
        simulated=False,
    )
