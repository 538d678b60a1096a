"""Named shapes with random weights: their sizes, what their forwards read, and `bench latency` of a tiny hybrid."""

import pytest
import torch

from specdec.reach.heads.nextn import NextNHead
from specdec.reach.targets.admission.probe import probe
from specdec.reach.targets.weight_bytes import ExpertBytes, distinct_experts
from specdec.tools.measure.latency.cases import random_subject
from specdec.tools.measure.latency.timing import hf_rows
from specdec.tools.measure.roofline import ShapeFloors
from specdec.tools.measure.shapes import SHAPES, fewer_layers, make_head, make_nextn, make_target, recurrent_layers
from tests.test_bench import last_line

COMMON = ("latency", "--shape", "tiny-hybrid", "--new-tokens", 4, "--repeats", 1, "--modes", "graph", "--batches", 1)


@pytest.fixture(scope="module")
def hybrid():
    return make_target("tiny-hybrid", "cpu")


def test_a_shape_keeps_what_the_probe_finds(hybrid):
    assert probe(hybrid).recurrent == recurrent_layers("tiny-hybrid")
    assert len(recurrent_layers("35b-a3b")) == 2 * 30 and len(recurrent_layers("mamba2-2.7b")) == 2 * 64
    assert recurrent_layers("8b") == () and recurrent_layers("30b-a3b") == ()


def test_random_weights_stay_finite_far_into_a_text(hybrid):
    with torch.inference_mode():
        logits = hybrid(torch.randint(0, 96, (1, 512), generator=torch.Generator().manual_seed(0))).logits
    assert logits.isfinite().all() and logits.std() > 0


def test_tokens_of_a_random_mixture_choose_as_if_at_random():
    sizes = dict(num_hidden_layers=12, hidden_size=128, num_attention_heads=4, head_dim=32, vocab_size=500)
    model = make_target("30b-a3b", "cpu", **sizes, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=32)
    text = torch.randint(0, 500, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    uniform = ExpertBytes(num_experts=32, per_token=4, num_layers=12, num_bytes=0, num_weights=0)
    for num in (4, 16):
        assert distinct_experts(model, [(text[:32], text[32:])], num) == pytest.approx(uniform.distinct(num), rel=0.05)


def test_drafts_fit(hybrid):
    head, layer = make_head("tiny-hybrid", hybrid), make_nextn(hybrid)
    assert head.target_hidden_size == 32 and head.hot_ids.numel() == 48
    assert isinstance(layer, NextNHead) and layer.weight.dtype == hybrid.dtype
    experts = [p for name, p in layer.named_parameters() if "experts." in name and p.dim() == 3]
    assert experts and all(0.01 < p.std() < 0.03 and p.isfinite().all() for p in experts)
    options = dict(num_hidden_layers=8, hidden_size=64, num_heads=2, vocab_size=64)
    mamba = make_target("mamba2-2.7b", "cpu", **options)
    assert mamba.lm_head.weight is mamba.get_input_embeddings().weight
    assert random_subject("tiny-hybrid", "cpu", None, None, algo="nextn").algo == "nextn"


def test_distinct_experts():
    experts = ExpertBytes(num_experts=128, per_token=8, num_layers=48, num_bytes=0, num_weights=0)
    assert [round(experts.distinct(n), 1) for n in (1, 4, 8, 32)] == [8.0, 29.1, 51.6, 111.8]


def test_floors_of_a_mixture_of_experts():
    """Qwen3-30B-A3B: 48 layers of q, k, v, o, a router and experts of 3 * 2048 * 768; an output head."""
    dense = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128) + 151936 * 2048
    expert = 48 * 3 * 2048 * 768
    assert ShapeFloors("30b-a3b").target.read() == dense + 8 * expert
    four = 128 * (1 - (1 - 8 / 128) ** 4)
    assert ShapeFloors("30b-a3b").round_ms(0, tokens=4) == round(2 * (dense + four * expert) / 4.24e9, 3) == 3.691
    assert ShapeFloors("30b-a3b").kv_bytes == 2 * 2 * 49 * 4 * 128
    head = 2 * 2048 * (4096 + 2 * 512) + 4096 * 2048 + 3 * 2048 * 6144 + 32000 * 2048
    whole = 2 * (dense + four * expert + 3 * head + 3 * 2048**2) / 4.24e9
    assert ShapeFloors("30b-a3b").round_ms(3, tokens=4) == pytest.approx(whole, abs=6e-4)


def test_floors_of_a_hybrid():
    """Qwen3.5-35B-A3B, from the sizes of 30 delta-rule layers, 10 attention layers, 256 experts and a shared one."""
    delta = 2048 * (8192 + 4096 + 64) + 8192 * 4 + 4096 * 2048
    attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    mixture = 2048 * 256 + 3 * 2048 * 512 + 2048
    dense = 30 * delta + 10 * attention + 40 * mixture + 248320 * 2048
    assert ShapeFloors("35b-a3b").target.read() == dense + 8 * 40 * 3 * 2048 * 512
    reads = [ShapeFloors("35b-a3b").round_ms(0, tokens=n) for n in (1, 4, 8, 32, 128)]
    assert [round(ms, 2) for ms in reads] == [1.39, 2.73, 4.32, 10.61, 15.85]
    state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert ShapeFloors("35b-a3b").state_bytes == state and ShapeFloors("35b-a3b").kv_bytes == 2 * 2 * 11 * 2 * 256
    plain = 1000 * 2 * 2 * 11 * 2 * 256 + 2 * state
    assert ShapeFloors("35b-a3b").token_ms(0, 1, 1, 1000, 1.0) == pytest.approx(reads[0] + plain / 4.24e9, abs=1e-4)


def test_floors_of_a_nextn_draft():
    """A pass reads its own layer, with the experts of one token, and the target's output head."""
    layer = 2 * 2048 * 2048 + 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048 + 2048 * 256 + 9 * 3 * 2048 * 512 + 2048
    extra = ShapeFloors("35b-a3b", algo="nextn").round_ms(3) - ShapeFloors("35b-a3b").round_ms(0)
    assert extra == pytest.approx(3 * 2 * (layer + 248320 * 2048) / 4.24e9, abs=2e-3)
    narrow = ShapeFloors("35b-a3b", algo="nextn", vocab=32768).round_ms(3) - ShapeFloors("35b-a3b").round_ms(0)
    assert narrow == pytest.approx(3 * 2 * (layer + 32768 * 2048) / 4.24e9, abs=2e-3)


def test_floors_of_mamba():
    weights = 64 * (2560 * (5120 + 5376 + 80) + 5376 * 4 + 5120 * 2560) + 50288 * 2560
    assert ShapeFloors("mamba2-2.7b").target.read() == weights
    assert ShapeFloors("mamba2-2.7b").state_bytes == 64 * (80 * 128 * 64 * 4 + 3 * 5376 * 2)
    assert ShapeFloors("mamba2-2.7b").kv_bytes == 2 * 2 * 5 * 128, "of the draft alone"


def test_floors_of_llamas_are_what_they_were():
    assert ShapeFloors("8b").target.read() == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert (ShapeFloors("8b").round_ms(3), ShapeFloors("8b").round_ms(0)) == (4.093, 3.54)
    narrow = ShapeFloors("8b", vocab=8000).round_ms(3)  # of 32,000 rows of 4,096, three times
    assert ShapeFloors("8b").round_ms(3) - narrow == pytest.approx(2 * 3 * 24000 * 4096 / 4.24e9, abs=1e-3)
    half = (ShapeFloors("8b").round_ms(3) + ShapeFloors("8b").round_ms(0)) / 2
    assert ShapeFloors("8b", draft_bytes=1).round_ms(3) == pytest.approx(half, abs=1e-3)
    assert ShapeFloors("8b").token_ms(3, 4, 8, 1000.5, 2.3) == 1.8905
    assert ShapeFloors("8b").first_ms(2, 777) == 29.925
    assert (ShapeFloors("8b", 2).round_ms(0), ShapeFloors("8b", 2).first_ms(2, 777)) == (1.77, 14.963)


def test_shapes_that_ranks_cannot_share():
    known = "135m, 8b, 70b, tiny, 30b-a3b, (gpt-oss-20b, )?35b-a3b, qwen3-next-12, tiny-hybrid"  # GPT-OSS from 5.24 on
    with pytest.raises(ValueError, match=rf"'mamba2-2.7b' on 2 ranks: .* a mamba2 model; leave .* one of {known}$"):
        fewer_layers("mamba2-2.7b", 2)
    with pytest.raises(ValueError, match=r"'35b-a3b' on 4 ranks: expected .* divides its 2 key/value heads; give"):
        fewer_layers("35b-a3b", 4)
    assert all(fewer_layers(shape, 1) == {} for shape in SHAPES)
    layers = {"30b-a3b": 16, "35b-a3b": 16, "qwen3-next-12": 12, "tiny-hybrid": 8, "70b": 16}
    assert {shape: fewer_layers(shape, 2)["num_hidden_layers"] for shape in layers} == layers


def test_latency_of_a_hybrid_and_of_transformers(capsys, monkeypatch):
    monkeypatch.setattr("specdec.tools.measure.latency.run.HF_S", 100.0)  # on a busy machine
    rows = last_line(capsys, monkeypatch, *COMMON, "--drafts", "plain,2:1:3", "--algo", "nextn", "--hf")["rows"]
    theirs = [row for row in rows if row["mode"] == "hf"]
    assert [row["what"] for row in theirs] == ["hf_ttft", "hf_token"] and all(row["ms"] > 0 for row in theirs)
    assert {row.get("algo") for row in rows if row["steps"]} == {"nextn"}
    assert {row.get("algo") for row in rows if not row["steps"]} == {None}
    assert all(row["tau"] > 1 for row in rows if row["what"] == "tpot" and row["steps"])


def test_latency_of_a_hybrid_with_eagle3(capsys, monkeypatch):
    rows = last_line(capsys, monkeypatch, *COMMON, "--drafts", "2:2:4@30")["rows"]
    assert [row["what"] for row in rows] == ["attach", "ttft", "tpot"] and "algo" not in rows[0]
    assert {row["draft_vocab"] for row in rows} == {30}


def test_a_block_head_is_read_once_a_round():
    """Each layer has q, k, v, o and an MLP; five features are projected; 32,000 rows and a Markov term of rank 128."""
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    rest = 5 * 4096 * 4096 + 32000 * (4096 + 128)
    for algo, num_layers in (("block", 2), ("block:5", 5)):
        own = ShapeFloors("8b", algo=algo).round_ms(7) - ShapeFloors("8b").round_ms(0)
        assert own == pytest.approx(2 * (num_layers * layer + rest) / 4.24e9, abs=2e-3)


def test_latency_of_a_block_head(capsys, monkeypatch):
    options = ("latency", "--shape", "tiny", "--modes", "graph", "--batches", "1", "--tokens", "8", "--new-tokens", "9")
    rows = last_line(capsys, monkeypatch, *options, "--algo", "block:1", "--drafts", "2:1:3")["rows"]
    assert {row["algo"] for row in rows} == {"block:1"} and rows[-1]["what"] == "tpot"


def test_floors_of_a_hybrid_that_two_ranks_share():
    """A rank reads half of experts, projections, convolutions and output head, but all routers and gates of shared
    experts, and whole drafts, which use its half of the output head."""
    delta = 2048 * (8192 + 4096 + 64) + 8192 * 4 + 4096 * 2048
    attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    head, expert, routers = 248320 * 2048, 40 * 3 * 2048 * 512, 40 * (2048 * 256 + 2048)
    dense = (30 * delta + 10 * attention + expert + head) / 2 + routers
    assert dense == 980336640 and ShapeFloors("35b-a3b", 2).target.read() == dense + 8 * expert / 2
    reads = {n: 2 * (dense + 256 * (1 - (1 - 8 / 256) ** n) * expert / 2) / 4.24e9 for n in (1, 4)}
    assert [ShapeFloors("35b-a3b", 2).round_ms(0, n) for n in reads] == [round(ms, 3) for ms in reads.values()]
    assert [round(ms, 3) for ms in reads.values()] == [0.7, 1.368]
    token, state = 2 * 2 * (10 * 2 * 256 // 2 + 2 * 256), 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) // 2
    assert ShapeFloors("35b-a3b", ranks=2).kv_bytes == token and ShapeFloors("35b-a3b", 2).state_bytes == state
    kept = (1000 * token + 2 * state) / 4.24e9
    assert ShapeFloors("35b-a3b", 2).token_ms(0, 1, 1, 1000, 1.0) == pytest.approx(reads[1] + kept, abs=6e-4)
    layer = 2 * 2048 * 2048 + 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048 + 2048 * 256 + 9 * 3 * 2048 * 512 + 2048
    whole = reads[4] + 3 * 2 * (layer + head / 2) / 4.24e9
    assert ShapeFloors("35b-a3b", 2, algo="nextn").round_ms(3, 4) == pytest.approx(whole, abs=6e-4)
    products = 2 * ((dense - head / 2 + 8 * expert / 2) * 8192 + head / 2) + 2 * 10 * 16 * 256 * 8192**2 / 2
    assert ShapeFloors("35b-a3b", 2).first_ms(1, 8192) == pytest.approx(products / 0.79e12, abs=6e-4)


def test_floors_of_states_that_ranks_do_not_share():
    """3 ranks cannot share 16 heads: each has whole recurrent layers, of which only projections are split."""
    assert ShapeFloors("35b-a3b", 3).state_bytes == ShapeFloors("35b-a3b").state_bytes
    assert ShapeFloors("8b", 2).state_bytes == 0


def test_transformers_is_timed_no_longer_than_asked(hybrid):
    assert [row["what"] for row in hf_rows(hybrid, [5, 6, 7], 8, seconds=0.0)] == ["hf_ttft"]
    timed = list(hf_rows(hybrid, [5, 6, 7], 6, seconds=20.0, widths=(1, 3)))[1]
    assert timed["hf_new_tokens"] == 6 and timed["experts_in_use"][1] == 2.0 <= timed["experts_in_use"][3] <= 4.0
