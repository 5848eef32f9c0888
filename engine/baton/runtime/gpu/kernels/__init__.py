"""Kernels of our own, in Triton, which comes with torch's CUDA builds: `draw` for the sampler."""
