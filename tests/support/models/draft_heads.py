"""Tiny heads that draft, in the files that they are published in, and what they draft: computed by
transformers' layers over all tokens at once, by the formulas of EAGLE-3 (arXiv 2503.01840) and
DeepSeek V3 (arXiv 2412.19437).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from tests.support.models.checkpoints import fill_noise, make_checkpoint, reference_model

DRAFT_VOCAB = 200
EAGLE3_LAYERS = 8
"""Of a model: the head reads in front of layers 2, 4 and 5."""


class HeadReference(ABC):
    """What a head drafts for a model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], count: int, missing: Collection[int] = ()) -> list[int]:
        """A chain of drafts behind the tokens.

        Args:
            missing: positions whose entries are left out, beside the first.
        """
        states = self.read_states(torch.tensor([list(tokens[:-1])]))
        places = [place for place in range(len(states)) if place + 1 not in missing]
        ids = torch.tensor(tokens[1:])[places]
        states = states[places]
        positions = torch.tensor(places)
        drafts: list[int] = []
        for _ in range(count):
            token, state = self.predict(ids, states, positions)
            drafts.append(token)
            ids = torch.cat((ids, torch.tensor([token])))
            states = torch.cat((states, state[None]))
            positions = torch.cat((positions, positions[-1:] + 1))
        return drafts

    @abstractmethod
    def read_states(self, ids: Tensor) -> Tensor:
        """States of the model, as an entry is made of them: [T, hidden]."""

    @abstractmethod
    def predict(self, ids: Tensor, states: Tensor, positions: Tensor) -> tuple[int, Tensor]:
        """The token behind the last entry, and the state of the next entry."""


def causal_mask(entries: int) -> Tensor:
    return torch.full((entries, entries), float("-inf")).triu(1)[None, None]


class Eagle3Reference(nn.Module, HeadReference):
    def __init__(self, model: Any, config: LlamaConfig) -> None:
        nn.Module.__init__(self)
        hidden = config.hidden_size
        config._attn_implementation = "eager"
        attention = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * hidden, rows, bias=False))
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": attention,
                "mlp": LlamaMLP(config),
                "hidden_norm": LlamaRMSNorm(hidden, config.rms_norm_eps),
                "input_layernorm": LlamaRMSNorm(hidden, config.rms_norm_eps),
                "post_attention_layernorm": LlamaRMSNorm(hidden, config.rms_norm_eps),
            }
        )
        self.fc = nn.Linear(3 * model.config.hidden_size, hidden, bias=False)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, DRAFT_VOCAB, bias=False)
        fill_noise(self, seed=5)
        rng = torch.Generator().manual_seed(6)
        chosen = torch.randperm(config.vocab_size, generator=rng)[:DRAFT_VOCAB].sort().values
        self.register_buffer("d2t", chosen - torch.arange(DRAFT_VOCAB))
        self.register_buffer("t2d", torch.isin(torch.arange(config.vocab_size), chosen))
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "rotary", LlamaRotaryEmbedding(config))

    def read_states(self, ids: Tensor) -> Tensor:
        layers = self.model.config.num_hidden_layers
        # transformers gives the input of each layer.
        inputs = self.model(ids, output_hidden_states=True).hidden_states
        read = [inputs[layer][0] for layer in (2, layers // 2, layers - 3)]
        reduced: Tensor = self.fc(torch.cat(read, dim=-1))
        return reduced

    def predict(self, ids: Tensor, states: Tensor, positions: Tensor) -> tuple[int, Tensor]:
        layer = self.midlayer
        embedded = layer["input_layernorm"](self.model.get_input_embeddings()(ids))
        x = torch.cat((embedded, layer["hidden_norm"](states)), dim=-1)[None]
        attended, _ = layer["self_attn"](
            x,
            position_embeddings=self.rotary(x, positions[None]),
            attention_mask=causal_mask(len(ids)),
        )
        stream = states + attended[0]
        stream = stream + layer["mlp"](layer["post_attention_layernorm"](stream))
        row = int(self.lm_head(self.norm(stream))[-1].argmax())
        return row + int(self.d2t[row]), stream[-1]


def make_eagle3(model_path: Path, path: Path, **changes: Any) -> Eagle3Reference:
    """Write a head of EAGLE-3 for a model to directory `path`."""
    model = reference_model(model_path)
    target = model.config
    config = LlamaConfig(
        **{
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    head = Eagle3Reference(model, config)
    config.save_pretrained(path)
    file = path / "config.json"
    values = json.loads(file.read_text())
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    file.write_text(json.dumps(values))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return head


class MtpReference(HeadReference):
    def __init__(
        self, model: Any, deeper: Any, extra: dict[str, Tensor], *, adds_one: bool = False
    ) -> None:
        """
        Args:
            deeper: the model and its MTP layer, as one more layer.
            extra: the tensors that this layer alone has, by the end of their names in DeepSeek V3.
            adds_one: norms multiply by 1 + weight.
        """
        super().__init__(model)
        self._layer = deeper.model.layers[-1]
        self._rotary = deeper.model.rotary_emb
        self._extra = extra
        self._offset = 1.0 if adds_one else 0.0

    def read_states(self, ids: Tensor) -> Tensor:
        states: Tensor = self.model.model(ids).last_hidden_state[0]
        return states

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        weight = self._extra[name] + self._offset
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def predict(self, ids: Tensor, states: Tensor, positions: Tensor) -> tuple[int, Tensor]:
        embedded = self.model.get_input_embeddings()(ids)
        both = torch.cat(
            (self._norm(embedded, "enorm.weight"), self._norm(states, "hnorm.weight")), dim=-1
        )
        x = (both @ self._extra["eh_proj.weight"].T)[None]
        out = self._layer(
            x,
            attention_mask=causal_mask(len(ids)),
            position_ids=positions[None],
            position_embeddings=self._rotary(x, positions[None]),
        )
        out = out[0] if isinstance(out, tuple) else out
        normed = self._norm(out[0], "shared_head.norm.weight")
        return int(self.model.lm_head(normed)[-1].argmax()), normed[-1]


OF_QWEN3_NEXT = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}
"""Names of tensors that an MTP layer alone has."""


def make_qwen3_next_mtp(path: Path, variant: str = "qwen3-next") -> MtpReference:
    """As `make_mtp`, for Qwen3-Next and Qwen3.5: a layer with states, one with attention, and the
    MTP layer."""
    layers = 2
    types = ["linear_attention", "full_attention", "full_attention"]
    changes = {"full_attention_interval": 2, "tie_word_embeddings": False}
    make_checkpoint(variant, path, num_hidden_layers=layers + 1, layer_types=types, **changes)
    file = path / "model.safetensors"
    tensors = load_file(file)
    hidden = tensors["model.norm.weight"].shape[0]
    deeper = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    rng = torch.Generator().manual_seed(7)
    extra = {name: torch.randn(hidden, generator=rng) * 0.15 for name in OF_QWEN3_NEXT}
    extra["eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=rng) * 0.15
    last = f"model.layers.{layers}."
    renamed = {
        f"mtp.layers.0.{name.removeprefix(last)}" if name.startswith(last) else name: tensor
        for name, tensor in tensors.items()
    }
    renamed |= {OF_QWEN3_NEXT[name]: tensor for name, tensor in extra.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": types[:layers]}
    (path / "config.json").write_text(json.dumps(config))
    return MtpReference(reference_model(path), deeper.eval(), extra, adds_one=True)


def make_mtp(variant: str, path: Path, *, echoes: bool = False, **changes: Any) -> MtpReference:
    """Write `variant` with an MTP layer behind its layers to directory `path`.

    Args:
        echoes: no layer changes the residual stream, and the MTP layer passes the token on: what it
            drafts is what the model draws.
        changes: fields of its config with other values.
    """
    layers = 2
    make_checkpoint(
        variant, path, num_hidden_layers=layers + 1, tie_word_embeddings=False, **changes
    )
    file = path / "model.safetensors"
    tensors = load_file(file)
    hidden = tensors["model.norm.weight"].shape[0]
    rng = torch.Generator().manual_seed(7)
    extra = {
        "eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=rng) * 0.15,
        "enorm.weight": 1 + torch.randn(hidden, generator=rng) * 0.15,
        "hnorm.weight": 1 + torch.randn(hidden, generator=rng) * 0.15,
        "shared_head.norm.weight": 1 + torch.randn(hidden, generator=rng) * 0.15,
    }
    if echoes:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj")):
                tensor.zero_()
        extra["eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
        extra["enorm.weight"].fill_(1.0)
        extra["shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    prefix = f"model.layers.{layers}."
    shared = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    deeper = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    tensors |= {prefix + name: tensor for name, tensor in (extra | shared).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    for per_layer in ("mlp_layer_types", "layer_types"):
        if per_layer in config:
            config[per_layer] = config[per_layer][:layers]
    (path / "config.json").write_text(json.dumps(config))
    return MtpReference(reference_model(path), deeper.eval(), extra)
