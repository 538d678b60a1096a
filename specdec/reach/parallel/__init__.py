"""Replaces transformers' tensor parallelism by plain tensors and collectives of ours while an engine is attached."""
