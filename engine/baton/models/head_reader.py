"""Reader of the config of a head that drafts (models.spec.head). No torch here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton.errors import ConfigError
from baton.models.config_file import ModelConfig, read_model_config
from baton.models.families import FAMILIES
from baton.models.families.llama import LlamaFamily
from baton.models.quantized.methods import read_quantization
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.head import HeadSpec, MtpNames
from baton.models.spec.model import ModelSpec, StreamSpec
from baton.models.weight_files import find_tensor

_EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
"""Published heads have either in `architectures`, those for Qwen 3 too."""
_LEAST_LAYERS = 7
"""Of a model whose layers 2, L // 2 and L - 3 are three."""


def read_eagle3_head(root: Path, target: ModelSpec, load_format: str) -> ModelSpec:
    """The head in a directory, for a model. Raises ConfigError for one that does not fit it."""
    config = read_model_config(root)
    names = config.read_names("architectures", [])
    if not set(names) & set(_EAGLE3_NAMES):
        config.refuse("architectures", names, f"supported: {_EAGLE3_NAMES[0]}")
    if (layers := config.read_integer("num_hidden_layers", 1)) != 1:
        config.refuse("num_hidden_layers", layers, "supported: 1")
    if config.read_flag("norm_before_residual", False):
        config.refuse("norm_before_residual", True, "supported: false")
    hidden = config.read_integer("hidden_size")
    _check_sizes(config, target, hidden)
    has_embedding = load_format != "dummy" and find_tensor(root, "embed_tokens.weight") is not None
    if hidden != target.hidden_size and not has_embedding:
        config.refuse(
            "hidden_size",
            hidden,
            f"without embed_tokens.weight it must be that of the model ({target.hidden_size})",
        )
    family = LlamaFamily()
    (layer,) = family.read_layers(config)
    assert isinstance(layer.attention, AttentionBlockSpec), "as all layers of Llama"
    places = _read_state_layers(config, target.num_layers)
    head = HeadSpec(
        "midlayer.",
        places,
        len(places) * target.hidden_size,
        config.read_integer("draft_vocab_size", target.vocab_size),
        has_embedding=has_embedding,
    )
    return replace(
        target,
        architecture=_EAGLE3_NAMES[0],
        hidden_size=hidden,
        layers=(replace(layer, attention=replace(layer.attention, inputs=2)),),
        norm=family.read_norm(config),
        stream=StreamSpec(),
        tied=False,
        quantization=read_quantization(config, root),
        form_on_load=None,
        kv_scales=(),
        head=head,
    )


def _check_sizes(config: ModelConfig, target: ModelSpec, hidden: int) -> None:
    vocab = config.read_integer("vocab_size")
    if vocab != target.vocab_size:
        config.refuse(
            "vocab_size", vocab, f"the model has {target.vocab_size} token ids; give a head for it"
        )
    states = config.read_integer("target_hidden_size", hidden)
    if states != target.hidden_size:
        config.refuse(
            "target_hidden_size" if "target_hidden_size" in config.values else "hidden_size",
            states,
            f"the model's hidden_size is {target.hidden_size}; give a head for it",
        )


def _read_state_layers(config: ModelConfig, layers: int) -> tuple[int, ...]:
    """Layers in front of which the residual stream is read; config.json names those behind which it
    is."""
    values = config.read_checked("eagle_config", {}, "an object", lambda v: type(v) is dict)
    eagle = ModelConfig(config.path, values)
    field = "eagle_aux_hidden_state_layer_ids"
    given = eagle.get(field)
    if given is None:
        if layers < _LEAST_LAYERS:
            raise ConfigError(
                f"{config.path}: the head reads three layers of a model with {_LEAST_LAYERS} or "
                f"more, and this one has {layers}; give the model that it was made for"
            )
        return (2, layers // 2, layers - 3)
    is_rising = (
        type(given) is list
        and all(type(layer) is int for layer in given)
        and given == sorted(set(given))
    )
    if not is_rising or not given or given[0] < 0 or given[-1] > layers - 2:
        eagle.refuse(field, given, f"layers of the model from 0 to {layers - 2} are needed")
    return tuple(layer + 1 for layer in given)


def read_mtp_head(root: Path, target: ModelSpec, load_format: str) -> ModelSpec:
    """The layer of a checkpoint that predicts one token more. Raises ConfigError where there is
    none."""
    config = read_model_config(root).text_part()
    number = target.num_layers
    prefix = f"model.layers.{number}."
    names = MtpNames(
        f"{prefix}eh_proj", f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}shared_head.norm"
    )
    module = FAMILIES[target.architecture].draft_module
    if module:
        prefix = f"{module}layers.0."
        names = MtpNames(
            f"{module}fc",
            f"{module}pre_fc_norm_embedding",
            f"{module}pre_fc_norm_hidden",
            f"{module}norm",
        )
        # Of these families config.json does not say whether the files have the layer.
        matrix = f"{names.join}.weight"
        if load_format != "dummy" and find_tensor(root, matrix) is None:
            raise ConfigError(
                f"--speculative-algorithm NEXTN: the files in {root} hold no layer that drafts "
                f"({matrix}); use NGRAM, or a draft model with STANDALONE"
            )
    elif not target.has_draft_layers or not config.read_index("num_nextn_predict_layers", 0):
        raise ConfigError(
            f"--speculative-algorithm NEXTN: {config.path} names no layers that draft "
            "(num_nextn_predict_layers); use NGRAM, or a draft model with STANDALONE"
        )
    head = HeadSpec(prefix, (number,), target.hidden_size, target.vocab_size, mtp=names)
    # Families make it as their last layer with attention.
    *_, layer = (
        layer for layer in target.layers if not isinstance(layer.attention, DeltaBlockSpec)
    )
    return replace(target, layers=(layer,), form_on_load=None, kv_scales=(), head=head)
