"""Building blocks of models: tensors in, tensors out; no requests, no scheduling.

| module | holds |
|---|---|
| `spec`, `shard` | sizes that kernels, backends and pool need; the share of a tensor-parallel rank |
| `ops`, `ops_cpu`, `ops_cuda` | norms, rotation, activation: plain torch, CPU kernels, flashinfer |
| `attention/` | attention backends over the paged KV pool |
| `kv_spec` | page groups: what the pages of a pool hold, by logical coordinates |
| `kv_pool` | memory of all slots |
| `collectives` | sums and gathers between tensor-parallel ranks |
| `kernels/` | Triton kernels: drawing tokens, norm and rotation of heads |
| `cuda/` | streams, CUDA IPC, pages of a device pool |
| `flashinfer_loader` | the flashinfer library, or the reason why it cannot be used |
"""
