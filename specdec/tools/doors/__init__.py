"""Adapters that implement the interfaces of other libraries on an engine."""
