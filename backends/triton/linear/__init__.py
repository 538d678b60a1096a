"""Kernels of products and norms; a row's bits depend on no other row."""
