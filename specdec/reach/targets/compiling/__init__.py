"""Traces and compiles layers of a live target or draft, and compares them with the live ones before they are used.

`graphs.compile.layers` walks one layer of each kind (`Kind.graph`), `graphs.compile.trace` writes all layers out into
one graph; `checked.rewrite` puts kernels of ours into that one, before it is cut at attention and compiled.
"""
