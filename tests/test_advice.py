"""The drafting shape that a draft's folder recommends: used on a GPU if the user gives none."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from specdec import shipped
from specdec.core.config import EngineConfig
from specdec.core.errors import CheckpointError
from specdec.reach.assembly.arguments import advised, engine_config
from specdec.reach.assembly.assemble import resolve_draft
from specdec.reach.checkpoints.advice import ADVICE, follow_advice, read_advice
from specdec.tools.commands import choices, demo
from specdec.tools.commands import main as cli
from specdec.tools.measure.break_even import BreakEven

TREE = {"num_steps": 4, "topk": 2, "num_draft_tokens": 6}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / ADVICE).write_text(json.dumps({"max_batch": 4, **TREE}))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "is_followed"),
    [
        ({}, False),  # the default batch is larger
        ({"max_batch": 4}, True),
        ({"max_batch": 1, "max_seq_len": 64}, True),
        ({"max_batch": 4, "topk": 1}, False),
        ({"max_batch": 4, "num_steps": 3}, False),
        ({"max_batch": 4, "synthetic_acceptance": (0.5, 0.2, 0.1)}, False),
    ],
)
def test_advice_is_followed_where_the_user_names_none(folder, settings, is_followed):
    assert follow_advice(folder, settings, default_batch=8) == {**settings, **(TREE if is_followed else {})}
    assert follow_advice(folder.parent, settings, default_batch=8) == settings


@pytest.mark.parametrize("max_batch", ["4", None, 2.5, [4], True])
def test_a_max_batch_that_is_no_number_is_named(folder, max_batch):
    with pytest.raises(ValueError, match=f"max_batch={re.escape(repr(max_batch))}: expected an integer of at least 1"):
        EngineConfig(**follow_advice(folder, {"max_batch": max_batch}, default_batch=8))


@pytest.mark.parametrize(
    "text", ['{"num_steps": 3}', '{"max_batch": 1, "num_steps": 0, "topk": 1, "num_draft_tokens": 1}']
)
def test_wrong_advice_names_the_file(folder, text):
    (folder / ADVICE).write_text(text)
    with pytest.raises(
        CheckpointError, match=r"speculation.json holds .* expected whole numbers above 0 for max_batch"
    ):
        follow_advice(folder, {"max_batch": 1}, default_batch=8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_shipped_draft_advises_on_a_gpu_only(device):
    class Target:
        config = None

    Target.device = type("Device", (), {"type": device})
    draft = shipped.path()
    settings = advised(Target, draft, resolve_draft(draft, "auto")[1], {"max_seq_len": 64})
    config = engine_config(Target, "eagle3", settings)
    assert (config.verify_width > 4) == (device == "cuda")
    assert read_advice(draft)["num_steps"] == (config.num_steps if device == "cuda" else 5)


class Attached(Exception):
    """Raised instead of making an engine, with the config that it would have."""


@pytest.fixture
def run(monkeypatch):
    """Run a command with a target on a device that need not exist; return the exception that ended it."""

    def attach(model, draft, algo, tokenizer=None, max_new_tokens=None, **settings):
        name, source = resolve_draft(draft, algo)
        config = engine_config(model, name, advised(model, draft, source, settings))
        own = () if config.draft_weights is None else (config.draft_weights,)
        raise Attached((config.num_steps, config.topk, config.num_draft_tokens, *own))

    def ended(device, command):
        ends = SimpleNamespace(eos_token_id=2)
        target = SimpleNamespace(device=torch.device(device), config=LlamaConfig(), generation_config=ends)
        for module in (choices, demo):
            monkeypatch.setattr(module, "load", lambda *args: (target, None))
        return CliRunner().invoke(cli.app, command.split()).exception

    monkeypatch.setattr(choices, "attach", attach)
    monkeypatch.setattr(choices, "draft_module", lambda *_: None)
    monkeypatch.setattr(choices, "cpu_break_even", lambda *_: BreakEven(lambda rows: rows**0.5, 0.0))  # S=2 is fastest
    monkeypatch.setattr(demo, "run_demo", lambda model, _, drafting, **settings: drafting.attach(model, None))
    return ended


@pytest.mark.parametrize(
    ("command", "on_cpu", "on_cuda"),
    [
        ("demo", (2, 1, 3), (5, 4, 24)),
        ("generate w5", (2, 1, 3), (5, 4, 24)),
        ("chat", (2, 1, 3), (5, 4, 24)),
        ("serve bundled --max-batch 8", (2, 1, 3), (5, 4, 24)),
        ("serve bundled", (2, 1, 3), (3, 1, 4)),  # its batch is larger than the recommendation allows
        ("demo --draft lookup", (2, 1, 3), (3, 1, 4)),
        ("chat --steps 4", (4, 1, 5), (4, 1, 5)),
        ("serve bundled --steps auto", (5, 1, 6), (5, 1, 6)),
        ("generate w5 --topk 2", (2, 2, 7), (3, 2, 11)),
        ("demo --topk 1", (2, 1, 3), (3, 1, 4)),
        ("serve bundled --draft-weights fp8", (2, 1, 3, "fp8"), (3, 1, 4, "fp8")),
        ("serve bundled --max-batch 8 --steps 3 --topk 4 --draft-tokens 16", (3, 4, 16), (3, 4, 16)),
        ("generate w5 --draft none", (0, 1, 1), (0, 1, 1)),
        ("chat --draft none", (0, 1, 1), (0, 1, 1)),
        ("serve bundled --draft none", (0, 1, 1), (0, 1, 1)),
        ("generate w5 --target other", (0, 1, 1), (0, 1, 1)),  # the shipped draft is for the bundled target only
        ("chat --target other", (0, 1, 1), (0, 1, 1)),
        ("serve other", (0, 1, 1), (0, 1, 1)),
        ("generate w5 --target other --draft lookup", (2, 1, 3), (3, 1, 4)),
    ],
)
def test_commands_leave_to_the_draft_what_is_not_given(run, command, on_cpu, on_cuda):
    if command.startswith("serve"):
        pytest.importorskip("specdec.tools.serve.server")
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        ended = run(device, command)
        assert isinstance(ended, Attached) and ended.args == (expected,), (device, ended)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_demo_without_a_draft_is_refused(run, device):
    for command in ("demo --draft none", "demo --target other"):
        ended = run(device, command)
        assert isinstance(ended, ValueError) and "name a draft" in str(ended)


def test_steps_that_are_no_number_are_refused(run):
    ended = run("cpu", "chat --steps fast")
    assert isinstance(ended, ValueError) and "--steps 'fast': expected a whole number, or auto" in str(ended)


@pytest.mark.parametrize("command", ["generate w5 --target other", "chat --draft none", "serve other"])
def test_settings_of_drafting_without_a_draft_are_refused(run, command):
    if command.startswith("serve"):
        pytest.importorskip("specdec.tools.serve.server")
    for option, name in (("--steps 3", "num_steps"), ("--draft-weights fp8", "draft_weights")):
        ended = run("cpu", f"{command} {option}")
        assert isinstance(ended, ValueError) and f"{name}: plain decoding drafts nothing" in str(ended)


def test_draft_weights_that_are_no_kind_are_refused(run):
    ended = run("cpu", "chat --draft-weights int3")
    assert isinstance(ended, ValueError) and "draft_weights='int3': expected" in str(ended)
