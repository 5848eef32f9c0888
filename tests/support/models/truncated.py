"""A checkpoint with fewer layers: it often answers what the whole one does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def truncate_checkpoint(source: Path, target: Path, layers: int) -> Path:
    """Write the first `layers` layers of a checkpoint of one weight file to directory `target`;
    returns it.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if (found := _LAYER.search(name)) is None or int(found[1]) < layers
    }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target
