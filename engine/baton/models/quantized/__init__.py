"""Quantized checkpoints: what config.json says of them, which tensors there must be, what they
mean.

| module | holds |
|---|---|
| `forms` | how the matrix of one module is stored: tensors, shapes, types (no torch) |
| `methods/` | `quantization_config` of config.json, a file per method (no torch) |
| `scheme` | the form of each module, and which modules are excluded (no torch) |
| `stored` | a matrix of the model and its tensors in the files; contradictions (no torch) |
| `readers/` | a share of a stored matrix as codes, scales and zeros, a file per packing |
| `grouped` | such a share as numbers |
| `kv_scales` | scales of the KV cache (no torch) |
| `kept` | matrices that stay quantized in memory, for a kernel |

Every packing is one formula: W[n, k] = (code[n, k] - zero[n, group(k)]) * scale[n, group(k)]. It is
computed in float32 and rounded once, to the type that the model computes in. Activations stay in
that type whatever the checkpoint says of them.
"""
