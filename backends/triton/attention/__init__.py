"""Kernels of attention over the paged pool."""
