"""Triton kernels, each with a torch twin that is its specification. CUDA, or any device under TRITON_INTERPRET=1."""
