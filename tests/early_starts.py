"""What kernels that start before the one in front has ended (PDL) compute, beside what they do without."""

import torch

from specdec.backends.triton.launch import relaunch


def check_early_starts(forward, inputs, monkeypatch):
    """Launches and replays of a graph of `forward`, a chain of such kernels, give for each of `inputs` what launches
    give that wait for the kernel in front to end."""
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
