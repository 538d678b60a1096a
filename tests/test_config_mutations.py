"""For any config.json, the draft loads and runs, or CheckpointError says what is wrong; nothing else happens."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.core.errors import CheckpointError
from specdec.reach.heads.configs import SCHEMA
from specdec.reach.heads.load import inspect
from specdec.reach.heads.nextn_format import KEYS
from specdec.reach.targets.pretrained import load_draft
from tests import layout_models as lm
from tests.layout_heads import DEEPSEEK_NORMS, LLAMA3, MIMO_NORMS, Played, combine_tensors, load, target, under
from tests.tiny_models import tiny_model

JUNK = (
    *(None, True, False, 0, 1, 2, 3, 7, 32, 96, 4096, -1, -4, 2**31, 2**63, 10**30, 10**400),
    *(0.5, -1.0, 1e-300, 1e308, float("nan"), float("inf"), "", "yes", "32", "llama3", "\ud800"),
    *([], [1], [1, 2, 7], [-1], ["a"], [[1]], [None], [0.5], [10**30], {}, {"a": 1}, {"factor": 2.0}),
    *({"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 0}, {"type": ["linear"]}, [[]] * 3),
)


def _mimo_like(at: str, **layer: Any) -> lm.Tensors:
    names = tuple(f"{at}.{name}" for name in MIMO_NORMS)
    norm = {f"{at}.input_layernorm.weight": lm.gain(lm.HIDDEN, 92)}
    return combine_tensors(names) | lm.layer_tensors(at, **layer) | norm  # type: ignore[arg-type]


def _described(family: str, **more: Any) -> dict[str, Any]:
    return {**json.loads(target(family).config.to_json_string(use_diff=False)), **more}


def _nextn() -> tuple[str, dict[str, Any], lm.Tensors]:
    at = f"model.layers.{lm.LAYERS}"
    tensors = under(at, combine_tensors(DEEPSEEK_NORMS)) | lm.layer_tensors(at, bias=True)
    return "qwen2", _described("qwen2"), tensors | {f"{at}.input_layernorm.weight": lm.gain(lm.HIDDEN, 96)}


def _qwen_mtp() -> tuple[str, dict[str, Any], lm.Tensors]:
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    layer = under("mtp.layers.0", lm.hf_layer_tensors(target("qwen3"), 91))
    return "qwen3", {"text_config": _described("qwen3")}, combine_tensors(names) | layer


def _eagle3() -> tuple[str, dict[str, Any], lm.Tensors]:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}
    return "llama", lm.official_config(rope_scaling=LLAMA3, eagle_config=ids), lm.eagle3_tensors("midlayer")


LAYOUTS = {
    "eagle": lambda: ("llama", lm.eagle_config(bias=False, rope_theta=1e4), lm.eagle_tensors(fc_bias=False)),
    "eagle3": _eagle3,
    "speculators": lambda: ("llama", lm.speculators_config(), lm.eagle3_tensors("layers.0")),
    "nextn": _nextn,
    "qwen_mtp": _qwen_mtp,
    "mimo": lambda: ("qwen2", _described("qwen2"), _mimo_like("model.mtp_layers.0", bias=True)),
    "speculators_mtp": lambda: (
        "qwen3",
        {"transformer_layer_config": _described("qwen3"), "num_nextn_predict_layers": 1},
        _mimo_like("mtp_layers.0", qk_norm=True),
    ),
}
made = cache(lambda layout: LAYOUTS[layout]())


def _objects(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all objects in `config`."""
    yield at
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _objects(value, (*at, key))


@st.composite
def mutations(draw: st.DrawFn, config: dict[str, Any], read: tuple[str, ...]) -> dict[str, Any]:
    """`config` with one or two values replaced, added or removed, at any depth. read: keys that loaders read."""
    config = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(sorted(_objects(config))))
        held = config
        for key in path:
            held = held[key]
        key = draw(st.sampled_from(read if draw(st.booleans()) else sorted(held) or ["a"]))
        if draw(st.integers(0, 9)) == 0:
            held.pop(key, None)
        else:
            held[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return config


@torch.no_grad()
def runs(folder: Path, family: str) -> bool:
    """Return whether the head loads; if so, it must run too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            inspect(folder)
            head = load(folder, family)
        except CheckpointError as error:
            assert error.problems and all(error.problems)
            return False
    rows = torch.zeros(3, head.hidden_size)
    features = torch.zeros(3, len(head.aux_layers) * head.target_hidden_size)
    assert Played(head).append(rows, head.fuse(features)).shape == rows.shape
    return True


QUIET = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mutated_config_loads_or_is_refused(tmp_path: Path, layout: str) -> None:
    family, config, tensors = made(layout)
    folder = lm.write(tmp_path, config, tensors)
    assert runs(folder, family) and inspect(folder).layout == layout
    seen = set()

    @settings(QUIET, max_examples=40)
    @given(mutations(config, tuple(SCHEMA) if family == "llama" else KEYS))
    def check(mutated: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(mutated))
        seen.add(runs(folder, family))

    check()
    assert seen == {True, False}


def test_a_mutated_config_of_a_whole_model_loads_or_is_refused() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model("llama").save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        seen = set()

        @settings(QUIET, max_examples=20)
        @given(mutations(config, tuple(SCHEMA)))
        def check(mutated: dict[str, Any]) -> None:
            (folder / "config.json").write_text(json.dumps(mutated))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    load_draft(folder, dtype=torch.float32, device="cpu")
                    seen.add(True)
                except CheckpointError as error:
                    assert error.problems
                    seen.add(False)

        check()
        assert seen == {True, False}
