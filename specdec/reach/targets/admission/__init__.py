"""Decides whether a live model can be attached: from a recorded forward, where its weights are, and equal logits."""
