"""A kind of head that nobody has heard of: class and format in one file (this one), and a row in each of two tables."""

from types import MappingProxyType

import torch

import specdec
from specdec.draft import algorithms
from specdec.draft.algo_spec import AlgoSpec
from specdec.heads import formats
from specdec.heads.base import LayerConfig
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.eagle_format import EagleFormat
from specdec.heads.layouts import Layout, same
from specdec.heads.load import detect_algo, inspect, load_head, save_head
from specdec.targets.shape import TargetShape
from tests.heads import noisy
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model


class ToyHead(EagleHead):
    """EAGLE's arithmetic on half of the feature."""

    algo = "toy"

    def fuse(self, features):
        return super().fuse(features) / 2


class ToyFormat(EagleFormat):
    """Its fc goes by another name in files."""

    algo = "toy"
    written = ("toy",)
    layouts = (Layout("toy", "toy", r"toy_fc\.", (("toy_fc.", "fc."), *same("layers.", "embed_tokens."))),)

    def make(self, config, target):
        return ToyHead(config)


def test_a_new_kind_of_head_is_one_file_and_its_rows(tmp_path, monkeypatch):
    row = algorithms.Algorithm(AlgoSpec("toy", features="last", id_shift=1), algorithms.ALGORITHMS["eagle"].make)
    monkeypatch.setattr(formats, "ROWS", (ToyFormat(), *formats.ROWS))
    monkeypatch.setattr(algorithms, "ALGORITHMS", MappingProxyType({**algorithms.ALGORITHMS, "toy": row}))
    model, prompts = tiny_model("llama"), ragged_prompts()[:3]
    width, vocab = model.config.hidden_size, model.config.vocab_size
    head = noisy(ToyHead(EagleConfig(LayerConfig(width, 48, 4, 2, 16), vocab)))
    save_head(tmp_path / "toy", head, dtype=torch.float32)
    assert detect_algo(tmp_path / "toy") == inspect(tmp_path / "toy").algo == "toy"
    back = load_head(tmp_path / "toy", TargetShape.of(model), torch.float32, torch.device("cpu"))
    assert type(back) is ToyHead
    for name, tensor in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    engine = specdec.attach(model, tmp_path / "toy", num_steps=3, max_batch=3, cuda_graph=True)
    out = engine.generate(prompts, max_new_tokens=16)
    assert out.tokens == [greedy(model, p, 16) for p in prompts]
    assert engine.report().draft["algo"] == "toy" and engine.report().runners["round"]["replays"]
    engine.detach()
