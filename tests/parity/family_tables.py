"""`python -m tests.parity.family_tables`: the tables of docs/models.md, made of the registry of families and of what
this suite compares with transformers."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from baton.layers.spec import AttentionSpec, LatentSpec, LayerAttention
from baton.models.families import FAMILIES
from baton.models.spec.model import ModelSpec
from baton.models.spec_reader import read_spec
from tests.parity.test_matrix import CASES, FORM_FLAGS, SURROUNDINGS
from tests.parity.test_tensor_parallel import FAMILIES as DIVIDED
from tests.parity.test_transformers_backend import OFTEN
from tests.support.models.checkpoints import VARIANTS
from tests.support.models.foreign_checkpoints import FOREIGN, REFUSED
from tests.support.models.published import PUBLISHED, published_config


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def read_published(name: str, **changes: object) -> ModelSpec:
    """A published model, with changes of its config.json."""
    config = published_config(name) | changes
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return read_spec(folder, load_format="dummy")


def _variants_by_architecture() -> dict[str, list[str]]:
    names = defaultdict(list)
    for name, (family, _) in VARIANTS.items():
        names[f"{family}ForCausalLM"].append(name)
    return names


def families_table() -> str:
    """Families with blocks of our own."""
    variants = _variants_by_architecture()
    sizes = defaultdict(set)
    for name, size in DIVIDED:
        sizes[f"{VARIANTS[name][0]}ForCausalLM"].add(str(size))
    header = (
        "architecture", "`model_type`", "attention", "feed-forward", "context [tokens]",
        "compared with transformers as", "divided by",
    )  # fmt: skip
    rows = []
    for architecture, family in FAMILIES.items():
        names = variants[architecture]
        rows.append(
            (
                f"`{architecture}`",
                f"`{family.model_type}`",
                family.attention,
                family.feed_forward,
                str(family.max_position),
                ", ".join(names),
                ", ".join(sorted(sizes[architecture])),
            )
        )
    return _table(header, rows)


def matrix_table() -> str:
    """How many families each form meets an event with, and on which nodes."""
    values = [value for axis in ("event", "nodes") for value in SURROUNDINGS[axis]]
    rows = []
    for form, flags in FORM_FLAGS.items():
        cases = [case for case in CASES if case["form"] == form]
        counts = Counter(case[axis] for case in cases for axis in ("event", "nodes"))
        judge = "one process, one by one" if flags else "transformers"
        rows.append((form, judge, *(str(counts[value]) for value in values), str(len(cases))))
    return _table(("weights and cache", "answers are those of", *values, "all"), rows)


def windows_of(spec: ModelSpec) -> list[int]:
    """Windows of the layers that have one."""
    with_heads = [layer for layer in spec.attention if isinstance(layer, AttentionSpec)]
    return [layer.window for layer in with_heads if layer.window]


def chunks_of(spec: ModelSpec) -> list[int]:
    """Chunks of the layers that have them."""
    with_heads = [layer for layer in spec.attention if isinstance(layer, AttentionSpec)]
    return [layer.chunk for layer in with_heads if layer.chunk]


def _kept_of_token(layer: LayerAttention) -> tuple[str, str]:
    """How many heads of K and V a layer keeps, and their size."""
    if isinstance(layer, LatentSpec):
        return "latent", f"{layer.latent_dim} + {layer.key_dim}"
    return str(layer.num_kv_heads), str(layer.head_dim)


def kv_table() -> str:
    """Bytes of KV that a token of published models takes."""
    header = (
        "model", "architecture", "layers", "KV heads", "head size", "bytes per token",
        "windows", "bytes of windows", "bytes of states",
    )  # fmt: skip
    rows = []
    for name in PUBLISHED:
        spec = read_published(name)
        windows = Counter(windows_of(spec))
        chunks = Counter(chunks_of(spec))
        shown = ", ".join(
            [f"{count} of {size}" for size, count in sorted(windows.items())]
            + [f"{count} with chunks of {size}" for size, count in sorted(chunks.items())]
        )
        kv_heads, head_dim = _kept_of_token(spec.attention[0])
        kv = spec.kv_spec(16).divide(spec.attention)
        blocks = sum(rule.most_blocks(16, 1) * rule.width for rule in kv.rules)
        rows.append(
            (
                name,
                f"`{spec.architecture}`",
                str(spec.num_layers),
                kv_heads,
                head_dim,
                f"{kv.token_bytes:,}".replace(",", " "),
                shown or "none",
                f"{blocks * kv.page_bytes:,}".replace(",", " "),
                f"{sum(each.state_bytes(spec.dtype) for each in spec.states.values()):,}".replace(
                    ",", " "
                ),
            )
        )
    return _table(header, rows)


def foreign_table() -> str:
    """Families that transformers' own class serves, or cannot."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    native = {family.model_type for family in FAMILIES.values()}
    header = ("`model_type`", "transformers' class", "served", "compared")
    rows = []
    for model_type in sorted(FOREIGN):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        served = "with `--model-impl transformers`" if model_type in native else "yes"
        often = "each run" if model_type in OFTEN else "slow tests"
        rows.append((f"`{model_type}`", architecture, served, often))
    for model_type, (_, _, words) in sorted(REFUSED.items()):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        blocks = "; blocks of our own serve it" if model_type in native else ""
        rows.append((f"`{model_type}`", architecture, f"no: {words}{blocks}", "refusal"))
    return _table(header, rows)


TABLES = (families_table, matrix_table, kv_table, foreign_table)

if __name__ == "__main__":
    print("\n".join(table() for table in TABLES), end="")
