"""A new kind of head: class and format in one file (this one), and one row in the table."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import specdec
from specdec.reach.heads import formats
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.eagle_format import EAGLE, read
from specdec.reach.heads.format import Layout, same
from specdec.reach.heads.load import detect_algo, inspect, load_head, save_head
from specdec.reach.targets.shape import TargetShape
from specdec.tools.train import config
from specdec.tools.train.fit import train
from tests.heads import noisy
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model
from tests.train_models import save_target, tiny_corpus, tiny_target


class ToyHead(EagleHead):
    """EAGLE's arithmetic on half of the feature."""

    algo = "toy"

    def fuse(self, features):
        return super().fuse(features) / 2


def fresh_toy(model):
    width, vocab = model.config.hidden_size, model.config.vocab_size
    return noisy(ToyHead(EagleConfig(LayerConfig(width, 48, 4, 2, 16), vocab)))


TOY = replace(
    EAGLE,
    algo="toy",
    # its fc has another name in files
    layouts=(Layout("toy", "toy", r"toy_fc\.", (("toy_fc.", "fc."), *same("layers.", "embed_tokens."))),),
    read=partial(read, head_class=ToyHead),
    fresh=lambda model, shape, seed, hot_ids: fresh_toy(model).train(),
    written=lambda head: ("toy",),
    training=replace(EAGLE.training, name="Toy head", recipe={"num_steps": 2, "feature_weight": 1.0}),
)


@pytest.fixture(autouse=True)
def row(monkeypatch):
    """Add the one row that a new kind of head needs."""
    monkeypatch.setattr(formats, "ROWS", (TOY, *formats.ROWS))


def test_it_is_trained_and_has_a_card(tmp_path):
    model = tiny_target()
    save_target(model, tmp_path / "target")
    tiny_corpus(model, 12, 0).save(tmp_path / "corpus.safetensors")
    short = config.recipe("toy", max_steps=3, tokens_per_batch=256, chunk_rows=64, compile=False)
    report = train(
        [tmp_path / "corpus.safetensors"], tmp_path / "out", short, algo="toy", target=str(tmp_path / "target"),
        dtype="float32", device="cpu",
    )  # fmt: skip
    assert report["algo"] == detect_algo(tmp_path / "out") == "toy" and report["steps"] == 3
    assert "# Toy head for" in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_it_is_saved_loaded_and_drafts(tmp_path):
    model, prompts = tiny_model("llama"), ragged_prompts()[:3]
    head = fresh_toy(model)
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
