"""Description of a model, layer by layer, without torch.

| module | holds |
|---|---|
| `model` | `ModelSpec`: layers, shares of ranks, the plan of its tensors |
| `attention`, `mla`, `delta_net`, `mlp`, `moe` | the blocks of a layer: sizes, tensors, shares |
| `norm` | norms: kinds, places in a layer, tensors |
| `tensors` | places of a checkpoint's tensors in the model's |
| `rope` | the rotary embedding |
"""
