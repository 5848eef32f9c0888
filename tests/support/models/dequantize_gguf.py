"""A GGUF file as a directory that transformers writes, its weights in float32. Runs in the environment
`real-weights` of tests/clients/setup.sh.

    python dequantize_gguf.py PACKAGE DIRECTORY

PACKAGE is an installed package that holds the file, or its parts with a function `assemble`. The last
line printed is a JSON object with the number of tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_file(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None, package
    # Not imported: one package is a plugin of a program that is not installed here.
    for folder in found.submodule_search_locations or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    return Path(importlib.import_module(package).assemble())


def main() -> None:
    package = sys.argv[1]
    directory = Path(sys.argv[2])
    file = find_file(package)
    directory.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # It names GGUF, which the weights written here are not.
    del model.config.quantization_config
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tied = set(model.all_tied_weights_keys)
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    print(json.dumps({"tensors": len(tensors)}))


if __name__ == "__main__":
    main()
