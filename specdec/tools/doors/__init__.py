"""Adapters that answer the interfaces of other libraries with an engine."""
