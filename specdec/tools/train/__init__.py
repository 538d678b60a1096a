"""Trains drafts: target-regenerated data, training-time test and distillation, export in layouts of other tools."""
