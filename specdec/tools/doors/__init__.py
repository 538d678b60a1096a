"""Doors: what people already call, answered by an engine."""
