"""Kernels of a round between its forwards."""
