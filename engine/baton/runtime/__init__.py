"""Executes steps: model runner, sampler, graphs, and the loop that joins them to the scheduler.

| module | holds |
|---|---|
| `build` | a rank's model, pool and engine, from `EngineConfig` |
| `engine_loop` | plan, launch, commit |
| `runner/` | a plan as tensors, on the CPU and on a GPU; CUDA graphs of decode steps |
| `sampling/` | tokens from logits |
| `memory/` | warm-up steps, and the size of the KV pool that they leave room for |
| `communicators/` | KV pages through gloo and NCCL |
| `simulated/` | a device that only takes time (`--simulate`) |
| `device`, `priority_hook` | choice of the device; priorities from a user's function |
| `expert_load` | how evenly tokens spread over the experts of a model |
"""
