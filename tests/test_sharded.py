"""HF's tensor parallelism made plain and restored, in two processes that run all cases; see sharded_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specdec.reach.parallel.deferred_sums import _is_linear
from specdec.reach.parallel.sharded import find_group
from tests.sharded_ranks import MODELS, SIZE
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # of the largest logit: sums of two parts round differently
GATHERED, COLUMN = "Linear ColwiseParallel R R", "Linear ColwiseParallel R S(-1)"
ROW, WHOLE_ROW = "Linear RowwiseParallel S(-1) R", "Linear RowwiseParallel R R"
STYLES = {  # what transformers' plans apply to the models; without these the cases would be empty
    "llama": {GATHERED, COLUMN, ROW},
    "biased": {GATHERED, COLUMN, ROW},
    "tied": {GATHERED, COLUMN, ROW, "Embedding RowwiseParallel R R"},
    "scaled": {GATHERED, COLUMN, ROW, "Gemma3TextScaledWordEmbedding RowwiseParallel R R"},
    "qwen3": {GATHERED, COLUMN, ROW},
    "gemma3": {GATHERED, COLUMN, ROW},
    "phi3": {GATHERED, WHOLE_ROW},
    "fused": {GATHERED, ROW, "Linear PackedColwiseParallel (Replicate(),)"},
    "qwen3_moe": {GATHERED, COLUMN, ROW, "Qwen3MoeExperts MoeExpertsParallel"},
    "qwen3_moe_experts": {"Qwen3MoeTopKRouter EpRouterParallel", "Qwen3MoeExperts MoeExpertsParallel"},
    "deepseek_v3": {GATHERED, COLUMN, ROW, "DeepseekV3Experts MoeExpertsParallel"},
    "latent": {COLUMN, ROW, "Linear MlaKvAProjParallel"},
    "gpt_oss": {GATHERED},
    "gpt_oss_experts": {"GptOssTopKRouter EpRouterParallel", "GptOssExperts MoeExpertsParallel"},
    "qwen3_next": {GATHERED, COLUMN, ROW, "Qwen3NextExperts MoeExpertsParallel"},
    "glm4_moe": {GATHERED, COLUMN, ROW, "Glm4MoeExperts MoeExpertsParallel"},
    "llama4": {GATHERED, COLUMN, ROW, "Llama4TextExperts MoeExpertsParallel"},
}
# all-reduces per forward, where those of a mixture of experts are separate, and where they are merged
SUMS = {"deepseek_v3": (7, 4), "qwen3_next": (12, 8), "glm4_moe": (11, 8), "llama4": (12, 8)}

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the facts of every case, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    few = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(SIZE)}
    shared = {**os.environ, "PYTHONPATH": paths, **few}
    processes = []
    for rank in range(SIZE):
        command = [sys.executable, "-m", "tests.sharded_ranks", str(folder), str(rank)]
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}  # as torchrun sets them, for transformers
        with open(folder / f"{rank}.log", "w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"{rank}.log").read_text()[-2000:] for rank in range(SIZE)]
    assert codes == [0] * SIZE, "\n".join(logs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


def facts_of(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    errors = [facts[case] for facts in ranks if isinstance(facts[case], str)]
    assert not errors, "\n".join(errors)
    return [facts[case] for facts in ranks]


@pytest.mark.parametrize("case", MODELS)
def test_plain_forwards_give_the_whole_models_logits(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = facts_of(ranks, case)
    assert torch.equal(first["logits"], second["logits"])
    assert (first["rank"], second["rank"]) == ((0, SIZE), (1, SIZE))
    difference = (first["logits"] - first["whole"]).abs().max() / first["whole"].abs().max()
    assert difference < TOLERANCE
    assert first["whole"].std() > 0.1  # so that the comparison means something


@pytest.mark.parametrize("case", MODELS)
def test_a_mixture_with_a_shared_expert_sums_once(ranks: list[dict[str, Any]], case: str) -> None:
    for facts in facts_of(ranks, case):
        assert (facts["apart"], facts["sums"]) == SUMS.get(case, (facts["sums"], facts["sums"]))
        difference = (facts["logits_apart"] - facts["logits"]).abs().max() / facts["whole"].abs().max()
        assert difference < TOLERANCE and (case in SUMS or difference == 0)


def test_a_mixture_that_is_not_linear_is_left_alone_and_a_bias_is_added_once(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "deferred"):
        assert facts["error"] < TOLERANCE
        assert (facts["counts"], facts["left"]) == ([2, 2, 1], [])
        assert facts["traced"] == (True, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_small_products_of_fp16_do_not_hide_that_a_block_is_linear(dtype: torch.dtype) -> None:
    """Products that underflow do not scale exactly."""

    class Block(torch.nn.Module):
        def __init__(self, shift: float):
            super().__init__()
            self.experts, self.shared, self.shift = torch.nn.Identity(), torch.nn.Identity(), shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts(x) + x.sigmoid() * self.shared(x.flip(-1)) + self.shift

    x = (torch.randn(1, 8, 512, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    for shift, expected in ((0.0, True), (1e-5, False)):
        block = Block(shift).to(dtype)
        parts = {module: module.forward for module in (block.experts, block.shared)}
        assert _is_linear(block, parts, x, block(x)) is expected


@pytest.mark.parametrize("case", MODELS)
def test_nothing_distributed_is_left_while_plain(ranks: list[dict[str, Any]], case: str) -> None:
    for facts in facts_of(ranks, case):
        assert set(facts["styles"]) == STYLES[case]
        assert facts["left"] == facts["shared_storage"] == facts["hooked"] == []
        assert facts["group_while_plain"] is None


@pytest.mark.parametrize("case", MODELS)
def test_restore_brings_back_what_was_there(ranks: list[dict[str, Any]], case: str) -> None:
    for facts in facts_of(ranks, case):
        assert facts["changed"] == []
        assert facts["same_after"]


def test_weights_written_while_plain_are_kept(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "weights"):
        assert facts["wrong"] == facts["others"] == []
        assert facts["dtypes"] == [torch.float64, torch.float64, torch.float32]
        assert facts["frozen"] == ["in_place"]
        assert facts["stored_once"]
        assert facts["tied"] == [True, True]


def test_unknown_styles_are_all_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "refused"):
        assert facts["message"].startswith("AttachError: cannot attach Qwen3ForCausalLM: ")
        for part in (
            "model.layers.1.mlp (Qwen3MLP) is parallel in an unknown style, PackedRowwiseParallel(",
            "model.layers.2.mlp (Qwen3MLP) is parallel in an unknown style, _OtherStyle(",
            "ColwiseParallel(input_layouts=R, output_layouts=S(-1), use_local_output=False): load it with a tp_plan",
            "model.layers.3.mlp.up_proj.weight is sharded (S(0)), but its forward is not one of HF's",
        ):
            assert part in facts["message"]
        assert facts["changed"] == []


def test_an_error_half_way_leaves_the_model_as_it_was(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "half_way"):
        assert facts["message"] == "RuntimeError: in the middle"
        assert facts["calls"] > 10
        assert facts["changed"] == []


def test_layers_trace_as_one_graph(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "traced"):
        assert facts["equal"] == [True, True]
        assert (facts["graphs"], facts["reduces"], facts["distributed"]) == (1, 4, [])


def test_checkpoints_saved_while_plain_are_whole(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "saved"):
        assert facts["sharded"] == 4 * 7 + 2
        assert facts["equal"]
        assert facts["left"] == []


def test_styles_without_a_model_here(ranks: list[dict[str, Any]]) -> None:
    for facts in facts_of(ranks, "by_hand"):
        assert facts == {"all_reduce": True, "moe_identity_expert": True}


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("flat", "DeviceMesh((dp=1, tp=2)"),
        ("mixed", "distributed over 2 device meshes"),
        ("stages", "DeviceMesh((pp=2)"),
        ("pieces", "DeviceMesh((fsdp=2)"),
    ],
)
def test_other_kinds_of_parallelism_are_refused(ranks: list[dict[str, Any]], case: str, part: str) -> None:
    for facts in facts_of(ranks, "other_ways"):
        assert facts[case].startswith("AttachError: cannot attach ")
        assert part in facts[case]
        assert "DistributedConfig(tp_size=n)" in facts[case]


def test_a_model_on_one_device_has_no_group() -> None:
    assert find_group(tiny_model("llama")) is None
