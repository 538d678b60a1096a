"""Traces and compiles layers of a live target or draft, and compares them with the live ones before they are used.

`graphs.compile.layers` traces one layer of each kind (`Kind.graph`), `graphs.compile.trace` expands all layers into one
graph; `checked.rewrite` puts our kernels into that graph, before it is split at attention and compiled.
"""
