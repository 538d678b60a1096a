"""Checkpoint files: finds them, reads and checks them, and replaces them without losing anything."""
