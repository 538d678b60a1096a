"""CUDA graphs: what runs (runners) and how it is captured (captures); today the counters of every path.

Captures callables; knows neither models nor draft algorithms.
"""
