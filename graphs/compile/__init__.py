"""Traces of layers, split into pieces that Inductor compiles."""
