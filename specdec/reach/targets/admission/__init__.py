"""Decides whether a live model can be attached: what a recorded forward does, where its weights are, equal logits."""
