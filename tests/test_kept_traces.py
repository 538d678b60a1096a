"""Traces are kept between processes by all that they depend on; one that does not fit is traced anew, and never used.

Pieces are left as they are: that Inductor finds them by a kept trace is in test_kept.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._pytree import tree_map
from transformers.models.llama import modeling_llama

import specdec
from specdec.backends.op import attention, attention_scope
from specdec.config import EngineConfig
from specdec.graphs import kept, pieces
from specdec.graphs import trace as tracing
from specdec.graphs.kept import Record
from specdec.graphs.structure import structure
from specdec.graphs.trace import trace
from specdec.targets import checked
from specdec.targets.checked import Subject, trace_checked
from specdec.targets.compiled import compile_layers
from specdec.targets.echo import Echo
from specdec.targets.hf import HFTarget
from tests.heads import random_draft
from tests.tiny_models import tiny_model

SIN = (torch.ops.aten.sin.default,)
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]


class Stack(nn.Module):
    """Layers of two joined products; the scales are equal."""

    def __init__(self, factor=2.0, num=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(num))
        self.register_buffer("scale", torch.rand(8))
        self.factor = factor

    def forward(self, x):
        for q, k in self.layers:
            x = (x + torch.ops.aten.sin(q(x) + k(x)) * self.factor).to(torch.float32)[..., None, :].mean(dim=-2)
        return torch.stack([x * self.scale, -x], dim=0).sum(dim=(0,))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "kept"))
    return tmp_path


@pytest.fixture
def walks(monkeypatch):
    """An entry for every graph that Dynamo traces."""
    seen, live = [], tracing._walk
    monkeypatch.setattr(tracing, "_walk", lambda *args: seen.append(1) or live(*args))
    return seen


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def traced(model, folder, keep=True):
    result = trace(model, (torch.randn(16, 8),), SIN, "eager", record=Record(folder / "it.json", tensors_of(model)))
    if keep and result.text:
        Record(folder / "it.json", {}).keep(result.text)
    return result


def test_a_kept_trace_serves_models_of_one_structure_bit_by_bit(cache, walks):
    first, second = Stack(), Stack()
    results = [traced(first, cache), traced(second, cache)]
    assert len(walks) == 1 and [r.was_kept for r in results] == [False, True]
    assert [(r.num_pieces, r.num_compiled) for r in results] == [(3, 3)] * 2
    again = Stack()
    again.load_state_dict(first.state_dict())
    same = traced(again, cache)
    for num in (1, 5, 33):
        x = torch.randn(num, 8)
        assert torch.equal(same(x)[0], results[0](x)[0])
        torch.testing.assert_close(results[1](x)[0], second(x))
    weights = second.layers[0]
    assert weights[0].weight.data_ptr() + 8 * 8 * 4 == weights[1].weight.data_ptr()  # joined
    results[1].release()
    assert weights[0].weight.untyped_storage().nbytes() == 8 * 8 * 4


@pytest.mark.parametrize("damage", ["{", '{"args": []}', "layers.1", "_operator:add"])
def test_what_cannot_be_read_is_traced_anew(cache, walks, damage):
    traced(Stack(), cache)
    file = cache / "it.json"
    whole = file.read_text()
    file.write_text(damage if damage.startswith("{") else whole.replace(damage, "no.such.thing"))
    assert file.read_text() != whole
    model = Stack()
    result = traced(model, cache)
    assert len(walks) == 2 and not result.was_kept and file.read_text() == whole
    torch.testing.assert_close(result(torch.ones(3, 8))[0], model(torch.ones(3, 8)))


def test_what_reads_a_tensor_without_a_name_is_not_kept(cache):
    secret = torch.rand(8)

    class Reads(Stack):
        def forward(self, x):
            return super().forward(x) * secret

    model = Reads()
    result = traced(model, cache)
    assert not result.text and not (cache / "it.json").exists()
    torch.testing.assert_close(result(torch.ones(3, 8))[0], model(torch.ones(3, 8)))


def test_a_folder_that_cannot_be_written_to_keeps_nothing(cache):
    (cache / "file").write_text("")
    Record(cache / "file" / "it.json", {}).keep("text")
    assert Record(cache / "file" / "it.json", {}).text() == ""
    Record(cache / "file" / "it.json", {}).forget()


def halved(x):
    return x / 2


def doubled(x):
    return x * 2


def digest(model, facts=""):
    return structure(model.forward, {"": model}, tensors_of(model), (torch.ones(16, 8),), facts)


def test_equal_structures_have_one_digest():
    model = Stack()
    expected = digest(model)
    assert expected == digest(Stack()) and len(expected) == 32
    changes = [
        lambda m: setattr(m, "factor", 3.0),
        lambda m: m.double(),
        lambda m: m.eval(),
        lambda m: m.requires_grad_(False),
        lambda m: setattr(m.layers[0][1], "weight", m.layers[0][0].weight),
        lambda m: setattr(m.layers[0][0], "weight", nn.Parameter(torch.rand(16, 8)[::2])),
        lambda m: m.layers[1][0].register_forward_hook(lambda module, args, out: out * 2),
        lambda m: setattr(m.layers[1][0], "forward", halved),
        lambda m: setattr(m.layers[1][0], "forward", doubled),
    ]
    others = []
    for change in changes:
        model = Stack()
        change(model)
        others.append(digest(model))
    others += [digest(Stack(num=3)), digest(Stack(), "fact")]
    assert len({expected, *others}) == 1 + len(others)


def told(model):
    return structure(type(model).forward, {"model": model}, tensors_of(model), (torch.ones(16, 8),), "")


def test_code_that_a_forward_reaches_is_part_of_the_digest(monkeypatch):
    expected = told(tiny_model("llama"))
    assert told(tiny_model("llama", seed=1)) == expected
    model = tiny_model("llama")
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-3
    assert told(model) != expected
    rotate = modeling_llama.rotate_half
    for change in ((modeling_llama, "rotate_half", lambda x: -rotate(x)), (modeling_llama.LlamaMLP, "forward", halved)):
        with monkeypatch.context() as patched:
            patched.setattr(*change)
            assert told(tiny_model("llama")) != expected
    assert told(tiny_model("llama")) == expected


@pytest.fixture
def uncompiled(monkeypatch):
    """Pieces are kept as they are, and their folder is in use."""
    monkeypatch.setattr(pieces, "_compile", lambda module, *rest: module.forward)


def short_model(seed=0):
    model = tiny_model("llama", seed)
    model.config.num_hidden_layers = 2
    model.model.layers = model.model.layers[:2]
    return model


def attached(seed=0):
    """Texts of a fresh engine, what the report says, and whether the traces of target and head were kept."""
    model = short_model(seed)
    engine = specdec.attach(model, random_draft(model, "eagle"), compile=True, max_batch=2, max_seq_len=64)
    (target,) = set(engine._core.target.compiled.values())
    heads = list(engine._core.round.worker.compiled.values())
    tokens = [engine.generate([p], max_new_tokens=6).tokens[0] for p in PROMPTS]
    words = engine.report().compiled
    engine.detach()
    return tokens, words, [t.was_kept for t in (target, *heads)]


def test_engines_keep_the_traces_of_target_and_head(uncompiled, walks):
    tokens, words, were_kept = attached()
    assert were_kept == [False, False] and "the trace" not in words
    again, words, were_kept = attached()
    assert again == tokens and were_kept == [True, True] and "kept from before; the trace, too" in words
    other, _, were_kept = attached(seed=1)
    plain = specdec.attach(short_model(1), max_seq_len=64)
    assert were_kept == [True, True] and other == [plain.generate([p], max_new_tokens=6).tokens[0] for p in PROMPTS]
    (facts,) = kept.kept()
    assert len(walks) == 2 == facts.num_traces


def compiled():
    """What the layers of a model give, whether their trace was kept, and how they came to run as they do."""
    target = HFTarget(short_model())
    words = compile_layers(target, EngineConfig(compile=True), "off").told
    (traced,) = target.compiled.values()
    ids = torch.arange(9)
    with torch.inference_mode(), attention_scope(Echo()):
        return traced(ids, ids)[0], traced.was_kept, words


def test_a_trace_that_computes_something_else_is_thrown_away(uncompiled, walks):
    expected, was_kept, _ = compiled()
    (file,) = kept.folder(torch.device("cpu")).rglob("*.json")
    whole = file.read_text()
    for was, instead in (("1e-06", "0.5"), ("_operator:mul", "_operator:matmul")):  # wrong, and not possible
        file.write_text(whole.replace(was, instead))
        again, was_kept, words = compiled()
        assert torch.equal(again, expected) and not was_kept and "the trace" not in words
        assert file.read_text() == whole
    assert len(walks) == 3 and compiled()[1]


class Attending(nn.Module):
    """Two pieces around one attention call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x).unflatten(-1, (2, 4))
        return (attention(q, q, q, 0).flatten(1) * 2,)


def test_pieces_that_fail_although_kept_are_compiled_anew(monkeypatch, walks):
    """In a folder that holds `damage`, Inductor would find pieces that run but compute something else."""
    device, found, model = torch.device("cpu"), [], Attending()
    where = kept.folder(device)
    examples = [[(torch.rand(num, 8),)] for num in (32, 7, 1)]
    subject = Subject(model.forward, examples, lambda _: nullcontext(), 1, 1, 64, {"": model}, {})

    def find_or_compile(module, *rest):
        if not (Path(cache_dir()) / "damage").exists():
            return module.forward
        found.append(module)
        return lambda *args: tree_map(torch.zeros_like, module.forward(*args))

    def were_kept():
        traced = trace_checked(subject, EngineConfig(), device)
        with torch.inference_mode(), attention_scope(Echo()):
            torch.testing.assert_close(traced(*examples[0][0]), model(*examples[0][0]))
        return traced.was_kept

    monkeypatch.setattr(pieces, "_compile", find_or_compile)
    monkeypatch.setattr(checked, "num_found", lambda: len(found))
    assert not were_kept()
    (where / "damage").touch()
    assert not were_kept() and len(found) == 4  # of what was kept, and of a new trace; then none of them
    assert not (where / "damage").exists() and list(where.parent.iterdir()) == [where]
    assert were_kept() and len(walks) == 3 and len(found) == 4
