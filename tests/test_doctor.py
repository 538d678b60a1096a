"""`specdec doctor`: good heads pass, and heads broken on purpose are reported with the defect's name."""

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from specdec.api import attach
from specdec.core.draft.head import DraftHead
from specdec.core.text.prompts import tokenizer_match
from specdec.reach.heads.load import load_head, save_head
from specdec.reach.targets.shape import LAST, TargetShape
from specdec.reach.targets.weight_bytes import verify_cost
from specdec.tools.commands.doctor import PROMPTS, print_findings, prompt_ids
from specdec.tools.doctor.examine import examine, measure_verify, verdict, verify_remark
from specdec.tools.doctor.facts import facts_of, untouched_norm, weight_problems
from specdec.tools.doctor.readings import ALTERNATIVES, Trial, doubts, search
from specdec.tools.doctor.rows import NORMED, Agreement, Observed, Reading, agreement, commonest, coverage, observe
from specdec.tools.measure import roofline
from specdec.tools.train.config import TrainConfig
from specdec.tools.train.objectives import HeadObjective
from specdec.tools.train.trainer import Trainer
from tests.commands import run
from tests.heads import random_draft, random_head
from tests.recurrent_models import recurrent_model
from tests.tiny_models import tiny_model
from tests.train_models import VOCAB, fresh, save_target, tiny_corpus, tiny_head, tiny_target

NUM_NEW = 16  # tokens
ALGOS = ("eagle", "eagle3", "nextn")


@pytest.fixture(scope="module")
def model():
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(model):
    return tiny_corpus(model, 32)


@pytest.fixture(scope="module")
def prompts(corpus) -> list[list[int]]:
    """Prompts whose answers the good heads have learnt."""
    pieces = zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True)
    return [corpus.tokens[a:b][~corpus.answer[a:b]].tolist() for a, b in pieces][:8]


@pytest.fixture(scope="module")
def texts(model, corpus) -> list[Observed]:
    out = []
    for a, b in list(zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True))[:24]:
        ids, is_answer = corpus.tokens[a:b], corpus.answer[a:b]
        out.append(observe(model, ids[~is_answer].tolist(), ids[is_answer].tolist()))
    return out


@pytest.fixture(scope="module")
def good(model, corpus) -> dict[str, DraftHead]:
    """A head of each kind, overfitted to the corpus: a few seconds each."""
    heads = {}
    for algo in ALGOS:
        head = tiny_head(model, VOCAB) if algo == "eagle3" else fresh(algo, model)
        settings = TrainConfig(num_steps=2, tokens_per_batch=512, max_steps=80, lr=5e-3, chunk_rows=256, log_every=500)
        Trainer(HeadObjective(model, head, settings), corpus, corpus).fit()
        heads[algo] = head.eval().requires_grad_(False)
    return heads


def swapped(head: DraftHead) -> None:
    names = {"eagle": ["fc"], "nextn": ["mtp.0.eh_proj"]}
    projections = ["q_proj", "k_proj", "v_proj"]
    for name in names.get(head.algo, [f"midlayer.self_attn.{p}" for p in projections]):
        weight = head.get_parameter(f"{name}.weight")
        h = weight.shape[1] // 2
        weight.data = torch.cat([weight[:, h:], weight[:, :h]], 1)


def random_embedding(head: DraftHead) -> None:
    torch.manual_seed(0)
    head.embed_tokens = nn.Embedding(VOCAB, head.hidden_size).requires_grad_(False)


def shuffled_embedding(head: DraftHead, model: Any) -> None:
    random_embedding(head)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    head.embed_tokens.weight.data = model.get_input_embeddings().weight[order].clone()


def other_theta(head: Any) -> None:
    head.config = replace(head.config, layer=replace(head.config.layer, rope_theta=10.0))


def aux_one_higher(head: Any) -> None:
    head.aux_layers = tuple(i + 1 for i in head.aux_layers)


def aux_reversed(head: Any) -> None:
    head.aux_layers = head.aux_layers[::-1]


def absolute_d2t(head: Any) -> None:
    head.d2t = head.hot_ids.clone()


def recycles_otherwise(head: Any) -> None:
    """Scale the norm's channels and undo that in lm_head: same logits, but states before and after the norm differ."""
    scale = torch.logspace(-1, 1, head.hidden_size)[torch.randperm(head.hidden_size)]
    head.norm.weight.data = head.norm.weight * scale
    head.lm_head.weight.data = head.lm_head.weight / scale
    head.recycles_normed = True


BREAKS: list[tuple[str, Callable[..., None], str]] = [
    ("eagle", swapped, "embedding and feature swapped"),
    ("eagle3", swapped, "embedding and feature swapped"),
    ("nextn", swapped, "embedding and feature swapped"),
    ("eagle", random_embedding, "the target's embedding"),
    ("eagle3", shuffled_embedding, "the target's embedding"),
    ("nextn", random_embedding, "the target's embedding"),
    ("eagle3", other_theta, "the target's rope"),
    ("eagle3", aux_one_higher, "aux layers one lower"),
    ("eagle3", aux_reversed, "aux layers high to low"),
    ("eagle3", absolute_d2t, "d2t holds absolute ids"),
    ("eagle3", recycles_otherwise, "state recycled after the other norm"),
]


def broken(head: DraftHead, change: Callable[..., None], model: Any) -> DraftHead:
    head = copy.deepcopy(head)
    change(head, model) if change is shuffled_embedding else change(head)
    return head


@pytest.mark.parametrize(("algo", "change", "name"), BREAKS, ids=[f"{a}-{c.__name__}" for a, c, _ in BREAKS])
def test_the_defect_is_named(good, model, texts, algo, change, name):
    base, trials, repairs = search(broken(good[algo], change, model), model, texts)
    assert [t.alternative.name for t in repairs] == [name]
    assert repairs[0].agreement.score > base.score + 0.05
    expected = agreement(Reading.of(good[algo]), model, texts)
    assert abs(repairs[0].agreement.first - expected.first) < 0.02, "the repair gives the good head back"
    assert name in [t.alternative.name for t in trials]


@pytest.mark.parametrize("algo", ALGOS)
def test_nothing_is_named_for_good_heads(good, model, texts, algo):
    base, trials, repairs = search(good[algo], model, texts)
    assert base.first > 0.7 and not repairs
    names = {t.alternative.name for t in trials}
    assert ("un-normed features" in names) is (algo != "eagle3")
    assert ("aux layers one lower" in names) is (algo == "eagle3")
    assert ("state recycled after the other norm" in names) is (algo != "eagle")


def moved(rows: torch.Tensor, by: int) -> torch.Tensor:
    return rows[(torch.arange(len(rows)) + by).clamp(0, len(rows) - 1)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # wrong training inputs, as the doctor sees them: off by one row
        ("features one earlier", lambda t: replace(t, normed=moved(t.normed, 1))),
        ("tokens not shifted", lambda t: replace(t, ids=moved(t.ids, 1))),
        ("tokens one ahead", lambda t: replace(t, ids=moved(t.ids, -1))),
        (
            "features one ahead",
            lambda t: replace(t, normed=moved(t.normed, -1), stream=(*t.stream[:-1], moved(t.stream[-1], -1))),
        ),
        ("un-normed features", lambda t: replace(t, normed=t.normed * 3, stream=(*t.stream[:-1], t.normed))),
    ],
)
def test_shifts_and_norms_are_named(good, model, texts, name, change):
    head = good["eagle"]
    _, _, repairs = search(head, model, [change(text) for text in texts])
    assert [t.alternative.name for t in repairs] == [name]


def test_two_defects_are_named_one_after_the_other(good, model, texts):
    head = broken(broken(good["eagle3"], aux_one_higher, model), random_embedding, model)
    _, _, repairs = search(head, model, texts)
    assert {t.alternative.name for t in repairs} == {"aux layers one lower", "the target's embedding"}
    assert repairs[1].agreement.score > repairs[0].agreement.score


@pytest.mark.parametrize("algo", ALGOS)
def test_untrained_heads_are_told_from_misread_ones(model, prompts, algo):
    found = examine(model, fresh(algo, model, seed=5).eval(), prompts, max_new_tokens=NUM_NEW, gb_s=10.0)
    if found["tau"] < 1.25:
        assert found["defects"] == ["untrained or random"], found["remarks"]
    else:  # a fresh head passes its feature on, which is right wherever the target repeats itself
        assert not found["defects"]


def test_norms_that_a_few_steps_of_training_moved_are_untouched(model):
    """A barely trained head passes its input through, which agrees more often with a later layer's features."""
    head = fresh("eagle3", model).requires_grad_(False)
    norms = [p for name, p in head.named_parameters() if "norm" in name]
    for norm in norms:
        norm += 0.005 * torch.rand(norm.shape)
    assert untouched_norm(head) == "midlayer.input_layernorm.weight"
    for norm in norms:
        norm += 0.05 * torch.rand(norm.shape)
    assert untouched_norm(head) is None


def test_a_gain_that_may_be_chance_is_a_remark():
    rows = torch.arange(40)
    base = Agreement(torch.stack([rows < 20, rows < 20]))
    better = Trial(ALTERNATIVES[0], Agreement(torch.stack([rows < 23, rows < 20])))  # three rows more
    (said,) = doubts([better], base)
    assert (
        better.alternative.name in said
        and "rows are too few to tell" in said
        and not doubts([better], better.agreement)
    )


def test_rounds_timed_below_a_plain_step_are_doubted():
    """Times from a busy machine: a round includes a plain step."""
    said = verdict(1.09, 0.69)
    assert "the times are not to be trusted; run it again" in said and "it pays" not in said
    assert verdict(1.09, 1.05) == "a round costs 1.05 plain steps and yields 1.09: it pays (1.04x)"


def test_noise_is_untrained_or_random():
    model = tiny_model("llama")
    found = examine(model, random_head(model), [[5, 6, 7], [9, 8], [40, 41, 42, 43]], max_new_tokens=24, gb_s=10.0)
    assert found["defects"] == ["untrained or random"] and found["tau"] < 1.25
    assert any("no more than chance" in remark for remark in found["remarks"])


def test_a_copy_of_the_target_is_as_good_as_a_draft_can_be(model, prompts):
    facts = examine(model, copy.deepcopy(model), prompts, num_steps=3, max_new_tokens=13, gb_s=10.0)
    assert (
        facts["tau"] > 3.7
        and facts["accept_at"][0] > 0.97
        and facts["agreement"] == [1.0, 1.0]
        and facts["equal"]
        and facts["defects"] == []
    )
    assert facts["floor_break_even"] == 4.0, "three passes of a draft as heavy as the target"
    assert facts["break_even"] == pytest.approx(facts["round_ms"] / facts["plain_ms"], rel=1e-2)
    assert facts["pays"] is (facts["tau"] > facts["break_even"])
    json.dumps(facts, allow_nan=False)


def test_a_good_head_through_the_engine(good, model, prompts, capsys):
    facts = examine(model, good["eagle3"], prompts, max_new_tokens=NUM_NEW, gb_s=10.0)
    assert facts["tau"] > 2 and facts["equal"] and not facts["defects"] and facts["coverage"] == 1.0
    assert facts["tau"] == pytest.approx(1 + sum(facts["accept_at"]), abs=1e-3)
    assert facts["shape"]["hidden"] == 64 and facts["draft_vocab"] == VOCAB and facts["own"] == []
    print_findings(Console(width=100), facts)
    printed = capsys.readouterr().out
    assert "as loaded" in printed and "no defect found" in printed and "break-even tau" in printed


def test_rows_of_the_targets_output_head_are_not_the_heads_own(model, tmp_path):
    head = tiny_head(model)
    save_head(tmp_path / "head", head, dtype=torch.float32, lm_head_from_target=True, num_layers=5)
    tensors = load_file(tmp_path / "head" / "model.safetensors").values()
    stored = sum(t.numel() for t in tensors if t.is_floating_point())
    loaded = load_head(tmp_path / "head", TargetShape.of(model), torch.float32, torch.device("cpu"))
    facts = facts_of(loaded, model)
    assert facts["own"] == [] and facts["from_target"] == ["embedding", "64 rows of the output head"]
    assert (facts["draft_parameters"], facts["draft_bytes"]) == (stored, 4 * stored)
    loaded.lm_head.weight.data[3] += 1  # as after training it
    facts = facts_of(loaded, model)
    assert facts["own"] == ["output head"] and facts["from_target"] == ["embedding"]
    assert facts["draft_parameters"] == stored + loaded.lm_head.weight.numel()
    assert facts_of(fresh("eagle", model), model)["from_target"] == ["embedding", "output head"]


def test_a_broken_head_through_the_engine(good, model, prompts, capsys):
    found = examine(model, broken(good["eagle"], swapped, model), prompts, max_new_tokens=NUM_NEW, gb_s=10.0)
    assert found["tau"] < 1.25 and found["defects"] == ["embedding and feature swapped"]
    print_findings(Console(width=100), found)
    assert "likely defect: embedding and feature swapped" in capsys.readouterr().out


def test_weights_and_maps_that_cannot_run_are_told(good, model, prompts):
    head = copy.deepcopy(good["eagle3"])
    head.fc.weight.data[0, 0] = math.nan
    found = examine(model, head, prompts[:4], max_new_tokens=8, gb_s=10.0)
    assert "tau" not in found and found["defects"] == ["broken weights"] and "fc.weight" in found["remarks"][0]
    head = copy.deepcopy(good["eagle3"])
    absolute_d2t(head)
    (problem,) = weight_problems(head, model)
    assert problem == f"d2t leads to target ids 0 to {2 * VOCAB - 2}; the target has 0 to {VOCAB - 1}"
    found = examine(model, head, prompts, max_new_tokens=NUM_NEW, gb_s=10.0)
    assert "tau" not in found and found["defects"] == ["d2t holds absolute ids"]
    head.d2t = torch.zeros_like(head.d2t) - torch.arange(VOCAB)
    assert weight_problems(head, model) == [f"d2t leads to 1 distinct target ids; expected {VOCAB}"]


def test_rows_are_what_a_head_sees(model, texts):
    text = texts[0]
    out = model(text.ids.unsqueeze(0), output_hidden_states=True)
    assert torch.equal(text.best, out.logits[0].argmax(-1)) and len(text.stream) == 6
    torch.testing.assert_close(model.lm_head(text.normed), out.logits[0])
    torch.testing.assert_close(model.model.norm(text.stream[5]), text.normed)
    torch.testing.assert_close(text.features((1, NORMED)), torch.cat([out.hidden_states[1][0], text.normed], -1))
    assert Reading.of(fresh("eagle", model)).sources == (NORMED,) and fresh("eagle", model).aux_layers == (LAST,)
    assert Reading.of(tiny_head(model)).sources == (1, 2, 4)
    said = [t for x in texts for t in x.best[x.num_prompt :].tolist()]
    assert commonest(texts) == max(map(said.count, said)) / len(said)
    assert coverage(torch.tensor(said[:1]), texts) == pytest.approx(said.count(said[0]) / len(said))


def test_floor_counts_what_is_read():
    model = tiny_model("llama")
    body = roofline.num_bytes(model) - 4 * model.get_input_embeddings().weight.numel()
    own = random_head(model)
    found = roofline.floor(model, own, 3, 100.0)
    assert (found.target_bytes, found.draft_bytes) == (body, roofline.num_bytes(own))
    assert found.plain_ms == pytest.approx(body / 100e9 * 1e3)
    assert found.round_ms == pytest.approx(found.plain_ms + 3 * roofline.num_bytes(own) / 100e9 * 1e3)
    model.lm_head.weight = model.get_input_embeddings().weight  # tied weights: the output head reads it
    assert roofline.floor(model, own, 3, 100.0).target_bytes == roofline.num_bytes(model)
    assert roofline.measure_bandwidth(torch.device("cpu")) > 0.1


def test_alternatives_have_a_name_and_a_cure_each():
    names = [a.name for a in ALTERNATIVES]
    assert len(set(names)) == len(names) and all(len(a.defect) > 40 for a in ALTERNATIVES)
    assert {a.name for a in ALTERNATIVES if a.leaks} == {"tokens one ahead", "features one ahead"}


class Words:
    chat_template = None

    def __init__(self, **vocab: int):
        self.vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_tokenizers_are_compared():
    assert tokenizer_match(Words(a=1), None) is None and tokenizer_match(Words(a=1), Words(a=1)) == "equal"
    assert tokenizer_match(Words(a=1, b=2), Words(a=1, c=2)) == "2 entries differ, first 'b' = 2"
    assert prompt_ids(["ab c"], Words()) == [[2, 1]] and len(PROMPTS) > 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, good, model) -> Path:
    """target, head (good), swapped (broken), other (another target's), twin (of the target), prompts.jsonl."""
    root = tmp_path_factory.mktemp("doctor")
    save_target(model, root / "target")
    save_target(model, root / "twin")
    save_head(root / "head", good["eagle3"], dtype=torch.float32)
    save_head(root / "swapped", broken(good["eagle3"], swapped, model), dtype=torch.float32)
    save_head(root / "other", random_head(tiny_model("llama")), lm_head_from_target=False, dtype=torch.float32)
    questions = [f"w{i} w{i + 7} w{i + 21}" for i in range(10, 40, 2)]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    return root


def doctor(capsys, monkeypatch, root: Path, draft: str, *more: object) -> tuple[int, list[str], str]:
    arguments = ("--json", "--prompts", root / "prompts.jsonl", "--max-new-tokens", 16, "--device", "cpu", *more)
    return run(capsys, monkeypatch, "doctor", root / "target", root / draft, *arguments)


def test_the_command(folders, capsys, monkeypatch):
    code, lines, _ = doctor(capsys, monkeypatch, folders, "twin", "--steps", 2, "--bandwidth-gb-s", 50, "--limit", 4)
    facts = json.loads(lines[-1])
    assert (
        code == 0 and facts["algo"] == "standalone" and facts["tokenizer"] == "equal" and facts["bandwidth_gb_s"] == 50
    )
    assert facts["tau"] > 2 and facts["accept_at"][0] == 1.0
    code, lines, _ = doctor(capsys, monkeypatch, folders, "head", "--limit", 3)
    facts = json.loads(lines[-1])
    assert facts["layout"] == "eagle3" and any("rope theta 5000" in note for note in facts["notes"])
    assert facts["aux_layers"] == [0, 1, 3] and facts["tokenizer"] is None and len(facts["readings"]) > 8


def test_the_command_on_a_draft_of_another_target(folders, capsys, monkeypatch):
    code, lines, _ = doctor(capsys, monkeypatch, folders, "other")
    facts = json.loads(lines[-1])
    assert code == 1 and facts["defects"] == ["cannot be loaded"] and len(facts["remarks"]) == 1
    assert "made for a vocabulary of 128" in facts["remarks"][0]
    assert any("cannot be loaded" in line for line in lines)


def test_the_command_on_weights_and_tokenizers_that_are_broken(folders, capsys, monkeypatch, tmp_path):
    twin, head = tmp_path / "twin", tmp_path / "head"
    for path in (twin, head):
        shutil.copytree(folders / path.name, path)
    weights = load_file(str(twin / "model.safetensors"))
    name = next(n for n in sorted(weights) if "up_proj" in n)
    weights[name][:] = float("inf")
    save_file(weights, str(twin / "model.safetensors"), metadata={"format": "pt"})
    code, lines, _ = doctor(capsys, monkeypatch, folders, twin, "--limit", 2)
    facts = json.loads(lines[-1])
    assert (
        code == 1 and facts["defects"] == ["broken weights"] and f"{name} holds NaN or infinity" in facts["remarks"][0]
    )
    (head / "tokenizer.json").write_text("{broken")  # a head drafts without a tokenizer
    code, lines, _ = doctor(capsys, monkeypatch, folders, head, "--limit", 2)
    facts = json.loads(lines[-1])
    assert code == 0 and "its tokenizer (tokenizer.json) cannot be read" in facts["tokenizer"]


@pytest.mark.parametrize(
    ("draft", "more", "message"),
    [
        ("missing", (), "no such folder"),
        ("head", ("--bandwidth-gb-s", -1), "expected a positive number"),
        ("head", ("--bandwidth-gb-s", "nan"), "expected a positive number"),
        ("head", ("--steps", 0), "--steps 0: expected at least 1"),
        ("head", ("--prompts", "missing.jsonl"), "no such file"),
        ("head", ("--algo", "eagle"), "head' is a draft for 'eagle3'"),
    ],
)
def test_mistakes_are_one_line(folders, capsys, monkeypatch, draft, more, message):
    code, _, errors = doctor(capsys, monkeypatch, folders, draft, *more)
    assert code == 2 and len(errors.strip().splitlines()) == 1 and message in errors


def test_lookup_has_no_checkpoint_to_inspect(capsys, monkeypatch):
    code, _, errors = run(capsys, monkeypatch, "doctor", "bundled", "lookup")
    assert code == 2 and "`specdec bench acceptance --draft lookup` measures it" in errors


def test_a_verify_of_a_mixture_of_experts_is_counted():
    model = tiny_model("qwen3_moe")
    texts = [([5, 6, 7], [9, 8, 40, 41, 42]), ([3], [8, 9])]
    found = measure_verify(model, texts, 3)
    assert measure_verify(tiny_model("llama"), texts, 3) is None
    chosen = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda *a: chosen.append(a[2][-1])) for layer in model.model.layers]
    model(torch.tensor([[5, 6, 7, 9, 8, 40, 41, 42]]))
    for hook in hooks:
        hook.remove()
    counts = [len(set(ids[t : t + 3].flatten().tolist())) for ids in chosen for t in range(3, 6)]
    assert found.distinct == pytest.approx(sum(counts) / len(counts)) and 2 <= found.distinct <= 4
    expert = sum(p.nbytes for p in model.model.layers[0].mlp.experts.parameters())  # 4 in one layer, or 1 in each of 4
    everything = roofline.num_bytes(model) - 4 * model.get_input_embeddings().weight.numel()
    assert found.dense_bytes == everything - 4 * expert and found.facts["expert_bytes"] == expert
    assert found.step_bytes == found.dense_bytes + 2 * expert
    assert found.ratio == pytest.approx((found.dense_bytes + found.distinct * expert) / found.step_bytes)


def test_floor_of_a_mixture_of_experts_counts_what_is_chosen():
    model = tiny_model("qwen3_moe")
    head, verify = random_draft(model, "nextn"), verify_cost(model, 4)
    found = roofline.floor(model, head, 3, 100.0, verify)
    assert found.target_bytes == verify.step_bytes
    experts = sum(p.numel() * 4 for name, p in head.named_parameters() if "experts." in name)
    assert found.draft_bytes == roofline.num_bytes(head) + roofline.num_bytes(model.lm_head) - experts // 2
    assert found.break_even == pytest.approx(verify.ratio + 3 * found.draft_bytes / found.target_bytes)
    assert "of this depth cannot pay" in verify_remark(verify, 4.5) and "cannot pay below tau 1.90" in verify_remark(
        verify, 1.9
    )
    assert "of this depth" not in verify_remark(verify, 1.9)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_doctor_and_report_say_what_verification_costs(name):
    model = tiny_model(name) if name == "qwen3_moe" else recurrent_model(name)
    found = examine(model, random_draft(model, "nextn"), [[5, 6, 7], [9, 8]], max_new_tokens=8, gb_s=10.0)
    facts = found["experts"]
    assert (facts["num_experts"], facts["per_token"], facts["layers"], facts["verify_tokens"]) == (4, 2, 4, 4)
    assert facts["distinct_if_random"] == 3.75 and 2 <= facts["distinct"] <= 4
    assert any(f"{facts['distinct']:.1f} of 4 experts a layer" in text for text in found["remarks"])
    engine = attach(model, None)
    try:
        report = engine.report()
        assert report.experts["verify_over_step"] == 1.0 and "experts    num_experts=4" in str(report)
    finally:
        engine.detach()
