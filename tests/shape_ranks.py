"""Runs on each of two CPU ranks that share a named shape: its weights, drafts for it, and `bench latency`."""

import contextlib
import gc
import io
import json
import re
import sys
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from specdec.tools.commands import main as cli
from specdec.tools.measure import shapes
from specdec.tools.measure.shapes import fewer_layers, make_head, make_nextn, make_target, shard

SHAPE = "tiny-hybrid"  # 8 layers, recurrent and attention, each with routed experts and a shared one
OWN_LAYERS = 4  # so that the other layers repeat their weights
COMMON = ("--new-tokens", 4, "--repeats", 1, "--batches", 1, "--device", "cpu")
DRAFTS = {"eagle3": ("--drafts", "plain,2:2:4"), "nextn": ("--drafts", "2:1:3", "--algo", "nextn")}


@torch.no_grad()
def logits_of(model):
    return model(torch.arange(24).view(2, 12) * 3 + 5, use_cache=False).logits


def found_of_shape():
    """Return facts about the shape, and the rows of its bench."""
    gc.freeze()  # benches collect often: see conftest.py
    with mock.patch.object(shapes, "OWN_LAYERS", OWN_LAYERS):
        model = shard(make_target(SHAPE, "cpu", **fewer_layers(SHAPE, 2)), SHAPE, 2)
        drafts = [make_head(SHAPE, model), make_nextn(model)]
        weights = [p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters()]
        found = {
            "logits": logits_of(model),
            "drafts": [float(sum(p.double().sum() for p in draft.parameters())) for draft in drafts],
            "storages": len({t.untyped_storage().data_ptr() for t in weights}) == len(weights),
            "bytes": (sum(t.nbytes for t in weights), sum(t.untyped_storage().nbytes() for t in weights)),
        }
        return found | {"rows": {algo: rows(*options) for algo, options in DRAFTS.items()}}


def rows(*options):
    """Return the rows that `bench latency` prints with `options`; nothing on ranks other than the first."""
    sys.argv = ["specdec", "bench", "latency", "--json", "--shape", SHAPE, *map(str, (*COMMON, *options))]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    return [json.loads(line)["rows"] for line in printed.getvalue().splitlines()[-1:]]


@torch.no_grad()
def logits_of_one():
    """Return the logits of one process with the same weights, and the bytes of the weights."""
    own, whole = make_target(SHAPE, "cpu", num_hidden_layers=OWN_LAYERS), make_target(SHAPE, "cpu")
    state = own.state_dict()
    layers = {name: weight for name, weight in state.items() if ".layers." in name}
    for name, weight in layers.items():
        state[re.sub(r"\d+", lambda found: str(int(found[0]) + OWN_LAYERS), name, count=1)] = weight
    whole.load_state_dict(state)
    return logits_of(whole), sum(p.nbytes for p in whole.parameters())
