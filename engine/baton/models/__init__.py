"""Models: checkpoint files, how they are loaded, how the model is computed.

| module | holds |
|---|---|
| `spec/` | description of a model, layer by layer (no torch) |
| `config_file`, `families/`, `spec_reader` | config.json, read once for limits and arithmetic (no torch) |
| `weight_files`, `checkpoint` | which files and tensors there must be, checked before the start (no torch) |
| `blocks/` | attention, MLP and mixture of experts with their weights |
| `decoder` | forward pass: one loop over layers made of blocks |
| `head_reader`, `draft_head` | heads that draft from hidden states of a decoder |
| `load` | files to a ready decoder |
| `demo/` | the model inside the package |
"""
