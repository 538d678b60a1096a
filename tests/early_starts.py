"""Compares kernels that start before the previous kernel ends (PDL) with the same kernels without PDL."""

import torch

from specdec.backends.triton.launch import relaunch


def check_early_starts(forward, inputs, monkeypatch):
    """Check that launches and graph replays of `forward`, a chain of such kernels, equal launches that wait for the
    previous kernel to end, for each of `inputs`."""
    with monkeypatch.context() as patched:
        patched.setattr(relaunch, "PDL", False)
        expected = [forward(x) for x in inputs]
    graph, static = torch.cuda.CUDAGraph(), inputs[0].clone()
    forward(static)
    with torch.cuda.graph(graph):
        out = forward(static)
    for x, theirs in zip(inputs, expected, strict=True):
        static.copy_(x)
        graph.replay()
        assert out.equal(theirs)
        assert forward(x).equal(theirs)
