"""Replaces transformers' tensor parallelism by plain tensors and our collectives while an engine is attached."""
