"""Products that sum K in order and never split it, and norms of one row a program."""
