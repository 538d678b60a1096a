"""Draft heads: what each kind computes, and how its checkpoints are read, built and written."""
