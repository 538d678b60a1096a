"""Draft heads: the computation of each kind, and how its checkpoints are read, built and written."""
