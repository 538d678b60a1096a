"""Attention by FlashInfer's kernels; importable without it, which only `kernels` imports, inside functions."""
