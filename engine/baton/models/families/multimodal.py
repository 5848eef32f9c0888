"""Checkpoints of several parts whose text part is a family of ours. No torch here.

Their config.json has the fields of the text part in `text_config`; tensors of other parts are not
read (`models.weight_files.text_name`). Images are refused with the request.
"""

from __future__ import annotations

from typing import NamedTuple


class Multimodal(NamedTuple):
    """What transformers' class of all parts adds to the family of `text_config`."""

    model_type: str
    tied: bool
    """Default of tie_word_embeddings, which counts outside of `text_config`."""


MULTIMODAL = {
    "Gemma3ForConditionalGeneration": Multimodal("gemma3", tied=True),
    "KimiK25ForConditionalGeneration": Multimodal("kimi_k25", tied=True),
    # What transformers writes; published files have the other.
    "Kimi_K25ForConditionalGeneration": Multimodal("kimi_k25", tied=True),
    "Llama4ForConditionalGeneration": Multimodal("llama4", tied=False),
    "Mistral3ForConditionalGeneration": Multimodal("mistral3", tied=True),
    "Qwen3_5ForConditionalGeneration": Multimodal("qwen3_5", tied=False),
    "Qwen3_5MoeForConditionalGeneration": Multimodal("qwen3_5_moe", tied=False),
}
"""By the name in `architectures` of config.json."""
