"""Models: checkpoint files, how they are loaded, how the model is computed.

| module | holds |
|---|---|
| `config_file`, `rope_config`, `spec_reader` | config.json, read once for limits and arithmetic (no torch) |
| `weight_files`, `weights`, `checkpoint` | which files and tensors there must be, checked before the start (no torch) |
| `load` | files to a ready decoder |
| `decoder`, `rope` | forward pass of the dense families, tables of the rotary embedding |
| `demo/` | the model inside the package |
"""
