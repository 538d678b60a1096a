"""Kernels of probabilities, draws and selection."""
