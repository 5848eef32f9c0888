"""Blocks of a layer with their weights: each has `to`, `pack`, and computes.

| module | holds |
|---|---|
| `attention`, `rope` | projections, norms and rotation around an attention backend; tables of the rotation |
| `mla` | the same with latents in the pages |
| `delta_net` | delta nets, on states of sequences |
| `mlp` | the gated MLP |
| `norm` | norms of rows and of heads |
| `moe`, `router` | the mixture of experts, and the choice of a token's experts |
| `tensors` | tensors of a block as a whole |
"""
