"""Files of checkpoints: where they are, what is in them, and how they are replaced without losing anything."""
