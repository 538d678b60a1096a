"""`specdec demo` and `generate` on a terminal and in a pipe: drafted tokens are marked, and nothing else is printed."""

import io
import json
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as gguf_reader

from specdec import AcceptanceStats, Engine, RequestOutput, __version__, attach
from specdec.reach.heads.load import save_head
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.commands import main, text
from specdec.tools.commands.choices import Drafting, drafting_of
from specdec.tools.commands.demo import PROMPTS, Marking, exchange, marked, run_demo
from specdec.tools.commands.machine import env as env_command
from specdec.tools.commands.machine import list_backends
from specdec.tools.commands.terminal import quiet_pipes
from specdec.tools.commands.text import run_chat, typed_lines
from specdec.tools.measure.break_even import BreakEven, cpu_break_even
from tests.commands import run
from tests.heads import random_head
from tests.train_models import save_target, tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """target, and a head for it."""
    root = tmp_path_factory.mktemp("demo")
    model = tiny_target()
    save_target(model, root / "target")
    save_head(root / "head", random_head(model), lm_head_from_target=False, dtype=torch.float32)
    return root


def output(tokens: list[int], round_lens: list[int]) -> RequestOutput:
    return RequestOutput([5], tokens, "", "length", AcceptanceStats(), 0.0, 0.0, round_lens)


@pytest.mark.parametrize("settings", [{}, {"topk": 3, "num_draft_tokens": 6}, {"cuda_graph": True}])
def test_rounds_of_an_output_add_up(settings):
    model = tiny_target()
    engine = attach(model, random_head(model), num_steps=2, max_seq_len=64, **settings)
    try:
        out = engine.generate([[5, 6, 7], [8], [9, 10]], max_new_tokens=[17, 1, 9], ignore_eos=True)
    finally:
        engine.detach()
    for r in out.requests:
        assert len(r.tokens) == len(r.is_drafted) == 1 + sum(r.round_lens)
        assert len(r.round_lens) == r.acceptance.num_rounds and sum(r.round_lens) == r.acceptance.num_emitted
        assert sum(r.is_drafted) == sum(r.acceptance.accepted_at) and not r.is_drafted[0]


def test_drafted_tokens_are_marked(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    out = output([7, 8, 9, 10, 11, 12], [3, 1, 1])
    assert out.is_drafted == [False, True, True, False, False, False]
    piped = Marking.of(Console(file=io.StringIO()))
    shown = marked(out, tokenizer, piped, 1000)
    assert re.sub(r"\s", "", shown.plain) == "w7[w8w9]w10w11w12" and "[drafted and accepted]" in piped.legend.plain
    assert marked(out, tokenizer, piped, 8).plain.endswith(" ...")
    terminal = {"force_terminal": True, "legacy_windows": False, "_environ": {"TERM": "xterm"}}
    colour = Marking.of(Console(file=io.StringIO(), color_system="standard", **terminal))
    shown = marked(out, tokenizer, colour, 1000)
    assert "[" not in shown.plain and [shown.plain[s.start : s.end].replace(" ", "") for s in shown.spans] == ["w8w9"]
    assert "green" in colour.style
    (span,) = colour.legend.spans
    assert not colour.legend.style and colour.legend.plain[: span.end] == "drafted and accepted", "no more than that"
    assert Marking.of(Console(file=io.StringIO(), no_color=True, **terminal)).style == "underline"


def test_demo_prints_each_text_once(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    model, tokenizer = tiny_target(), AutoTokenizer.from_pretrained(folder / "target")
    prompts = ("w5 w9 w17", "w20 w21")
    drafting = Drafting(folder / "head", "auto", {"num_steps": 2})
    result = run_demo(model, tokenizer, drafting, max_new_tokens=12, prompts=prompts)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert result["equal"] and printed.err == ""
    assert [line.removeprefix("prompt").strip() for line in lines if line.startswith("prompt")] == list(prompts)
    assert sum(line.startswith("answer") for line in lines) == len(prompts)
    assert len(lines) - len(prompts) * 3 == 1 + 7 + 1  # legend, table, verdict; blank, prompt, answer


@pytest.mark.parametrize("file", [io.StringIO(), None])
def test_demo_fits_a_screen(folder, file):
    """At 100 columns and 50 lines, with the longest prompts and answers of any length."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    console = Console(file=file or io.StringIO(), force_terminal=file is None, width=100)
    out = output([7, 8, 9] * 80, [2, 3, 1] * 39 + [1] * 5)
    heights = [
        len(console.render_lines(exchange(p, out, tokenizer, Marking.of(console), 100), pad=False)) for p in PROMPTS
    ]
    assert 4 * len(PROMPTS) < sum(heights) and sum(h + 1 for h in heights) + 1 + 7 + 1 + 1 < 50


def test_generate_in_a_pipe_prints_the_text_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(gguf_reader, "tqdm", gguf_reader.tqdm)  # so that monkeypatch restores it
    common = ("--target", folder / "target", "--draft", folder / "head", "--max-new-tokens", "8", "--device", "cpu")
    code, lines, errors = run(capsys, monkeypatch, "generate", "w5 w9", *common, "--seed", 3)
    assert not code
    assert re.fullmatch(r"(\s*w\d+)+", "\n".join(lines)) and re.fullmatch(r"\[\d+ tokens, .*\]\n", errors)
    assert "on this CPU a round of S=" in errors  # and so whether drafting pays, or that there is no draft


def test_options_that_need_sampling_name_the_option_that_samples(folder, capsys, monkeypatch):
    code, _, errors = run(capsys, monkeypatch, "generate", "w5", "--target", folder / "target", "--top-k", 5)
    assert code == 2 and "top_k=5 does nothing" in errors and errors.endswith("on the command line, --temperature 1\n")


@pytest.mark.parametrize("option", ["--temperature", "--max-new-tokens"])
def test_a_chat_does_not_begin_with_options_that_every_line_would_refuse(option, capsys, monkeypatch):
    code, _, errors = run(capsys, monkeypatch, "chat", "--target", "bundled", option, "-1")
    assert code == 2 and f"Invalid value for '{option}'" in errors


def test_a_chat_remembers_starts_again_and_survives_what_does_not_fit(folder, capsys):
    model, tokenizer = load_pretrained(folder / "target")
    engine = attach(model, folder / "head", tokenizer=tokenizer, max_seq_len=64)
    seen, stream = [], engine.stream

    def watched(messages, **options):
        seen.append([dict(m) for m in messages])
        return stream(messages, **options)

    engine.stream = watched
    lines = ["w5 w9", "w7", "", "w4 " * 80, "w6"]
    messages = run_chat(engine, lines, max_new_tokens=6, do_sample=False)
    printed = capsys.readouterr()
    assert [[m["role"] for m in s] for s in seen][:2] == [["user"], ["user", "assistant", "user"]]
    assert messages[0]["content"] == "w6" and len(messages) == 2, "the long line was dropped"
    assert "exceed max_seq_len=64" in printed.err and printed.err.count("tokens/s, tau") == 3
    assert seen[1][1]["content"] == printed.out.splitlines()[0]

    def interrupted(messages, **options):
        yield "w8"
        raise KeyboardInterrupt

    engine.stream = interrupted
    said = run_chat(engine, ["w5"], system="w3")
    assert [m["role"] for m in said] == ["system", "user", "assistant"] and said[-1]["content"] == "w8"
    engine.check_integrity()
    engine.detach()


def test_a_line_that_is_not_utf8_ends_no_chat(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8"))
    assert list(typed_lines()) == ["a\udcff", "b"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate hi --device cuda:99", r"device='cuda:99': PyTorch .* sees \d+ CUDA devices here; use cpu or auto"),
        ("demo --device tpu", "device='tpu': expected auto, cpu, cuda"),
        ("bench latency --device tpu", "device='tpu': expected auto, cpu, cuda"),
        ("chat --device nosuch", "device='nosuch': expected auto, cpu, cuda"),
        ("generate hi --target nosuch", "target 'nosuch' cannot be loaded: expected 'bundled', a folder .*says: "),
        ("serve nosuch", "target 'nosuch' cannot be loaded"),
        ("doctor nosuch shipped", "target 'nosuch' cannot be loaded"),
        ("generate hi --target {file}", "target '{file}' is a file: expected the folder that holds it"),
        ("generate hi --target {empty}", "target '{empty}' cannot be loaded"),
        ("demo --target {empty} --draft lookup", "target '{empty}' cannot be loaded"),
    ],
)
def test_a_device_or_a_target_that_is_not_there_is_one_line(command, message, tmp_path, capsys, monkeypatch):
    if command.startswith("serve"):
        pytest.importorskip("specdec.tools.serve.server")
    command, message = (text.format(empty=tmp_path, file=__file__) for text in (command, message))
    code, lines, errors = run(capsys, monkeypatch, *command.split())
    assert code == 2 and not lines
    assert re.fullmatch(f"specdec: {message}.*\n", errors), errors


def test_env_says_what_bug_reports_need(capsys):
    env_command(json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["torch"] == torch.__version__ or torch.__version__.startswith(found["torch"])
    assert found["backends"]["torch"] is None and found["devices"]


def test_tables_show_brackets(capsys, monkeypatch):
    monkeypatch.setattr(
        "specdec.tools.commands.machine.unusable", lambda name, device: "pip install 'specdec-toolkit[flashinfer]'"
    )
    monkeypatch.setenv("COLUMNS", "200")
    env_command()
    table = capsys.readouterr().out.splitlines()
    assert "torch: pip install 'specdec-toolkit[flashinfer]'" in "".join(table)
    list_backends()
    assert "'specdec-toolkit[flashinfer]'" in capsys.readouterr().out


def test_bars_are_for_terminals(capsys, monkeypatch):
    monkeypatch.setattr(gguf_reader, "tqdm", gguf_reader.tqdm)
    quiet_pipes()
    assert list(gguf_reader.tqdm(range(3), desc="x")) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_help_imports_no_torch():
    """Slow imports wait until a command is called."""
    code = "import sys; from specdec.tools.commands.main import main; sys.argv = ['specdec', sys.argv[1]]\n"
    code += "try: main()\nfinally: print('LOADED', sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    for option, said in (("--help", "doctor"), ("--version", __version__)):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
        assert said in done.stdout and done.stdout.rstrip().endswith("LOADED []")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_list_of_commands_says_what_they_say(name):
    shown = main.load(name).help
    assert main.COMMANDS[name][1] in " ".join(shown.split())


def test_a_prompt_comes_from_stdin(folder, capsys, monkeypatch):
    common = {"target": str(folder / "target"), "draft": "none", "max_new_tokens": 4, "device": "cpu", "raw": True}
    said = []
    for prompt, typed in (("w5 w9", ""), ("-", "w5 w9\n")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        text.generate(prompt=prompt, **common)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    prompts, stream = [], Engine.stream
    monkeypatch.setattr(
        Engine, "stream", lambda self, asked, **more: prompts.append(asked) or stream(self, asked, **more)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("  w5\n w9 \n"))
    text.generate(prompt="-", **common)
    assert prompts == ["  w5\n w9 "], "--raw continues it as it is, but for the end of the last line"
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ValueError, match="stdin is empty"):
        text.generate(prompt="-", **common)


def test_a_chat_says_what_answers_and_how_to_leave(folder, capsys, monkeypatch):
    monkeypatch.setattr(text, "typed_lines", lambda: [])
    text.chat(target=str(folder / "target"), draft=str(folder / "head"), steps="2", device="cpu")
    said = capsys.readouterr().err
    assert re.search(r"LlamaForCausalLM on cpu, eagle3, S=2, up to 1 request of [\d,]+ tokens, KV pool \d+ MiB", said)
    assert text.LEAVE in said


@pytest.mark.parametrize(
    ("growth", "batch", "steps"),
    [
        (lambda rows: 1.0, 32, 3),  # rows are free, as on a GPU: the deepest shape
        (lambda rows: 1.0 if rows < 3 else 2.0, 1, 1),  # three rows cost twice as much as one
        (lambda rows: float(rows), 1, 0),  # each row costs the same: no shape pays
        (lambda rows: max(1.0, rows / 4), 1, 3),
        (lambda rows: max(1.0, rows / 4), 4, 0),
    ],
)
def test_a_cpu_drafts_where_it_pays(growth, batch, steps, folder, monkeypatch):
    found = BreakEven(growth, 0.02)
    assert found.best_steps(batch) == steps
    monkeypatch.setattr("specdec.tools.commands.choices.cpu_break_even", lambda model, draft: found)
    model, name = tiny_target(), str(folder / "head")
    drafting = drafting_of(name, model, batch)
    assert drafting.settings == ({"num_steps": steps} if steps else {}) and (drafting.algo is None) is (steps == 0)
    assert "plain steps" in drafting.note
    assert ("--max-batch 3;" in drafting.note) is (steps == 0 and batch == 4)
    assert drafting_of(name, model, batch, steps=4).settings == {"num_steps": 4}, "what is named is honoured"


def test_a_round_costs_a_plain_step_at_least():
    """Whatever times a busy host measures."""
    assert BreakEven(lambda rows: 1.0 / rows, 0.0).cost(3, 1) == 1.0


def test_forwards_are_timed_for_the_break_even():
    model = tiny_target()
    found = cpu_break_even(model, random_head(model))
    assert found.cost(1, 1) > 0 and 0 < found.draft_share < 1
    assert found.seconds(2) == found.seconds(2), "timed once"
