"""Compile every Triton kernel for a GPU on a machine without one: `python -m tests.compile_kernels`, for an H100.

`python -m tests.compile_kernels 80 89 120` does it for other compute capabilities (A100, RTX 4090, RTX 5090). It fails
if a kernel needs more shared memory than they have, or may read stale data from it. The interpreter accepts what the
compiler does not (types of loop-carried variables, shapes of masks). Launchers run unchanged, on CPU tensors, with a
driver that only names its target; kernels are compiled and never launched.
"""

import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from specdec.backends.triton.attention import tiling
from specdec.backends.triton.experts import products as experts
from specdec.backends.triton.experts import quantised as of_experts
from specdec.backends.triton.linear import fp8, packed, tiles
from specdec.backends.triton.linear import quantised as of_weights
from specdec.backends.triton.recurrent import chunks

SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # per thread block, by compute capability


class CompileOnly:
    """The part of a driver that triton.jit needs before a launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # triton.jit caches the target per device, beside the kernels compiled for it

    def get_current_stream(self, device=None):
        return 0


# Heads of SmolLM2; of an 8B with gpt-oss' and Gemma 2's features; expanded MLA; Qwen3.5; MLA latents; gpt-oss.
LAYERS: Sequence[dict[str, Any]] = (
    {"num_heads": 9, "num_kv_heads": 3, "qk_dim": 64, "v_dim": 64, "scaling": 0.1},
    {"num_heads": 32, "num_kv_heads": 8, "qk_dim": 128, "v_dim": 128, "scaling": 0.1}
    | {"window": 64, "softcap": 30.0, "has_sinks": True},
    {"num_heads": 2, "num_kv_heads": 1, "qk_dim": 192, "v_dim": 128, "scaling": 0.1},
    {"num_heads": 16, "num_kv_heads": 2, "qk_dim": 256, "v_dim": 256, "scaling": 0.1},
    {"num_heads": 20, "num_kv_heads": 1, "qk_dim": 576, "v_dim": 512, "scaling": 0.1, "v_in_k": True},
    {"num_heads": 64, "num_kv_heads": 8, "qk_dim": 64, "v_dim": 64, "scaling": 0.1, "window": 128, "has_sinks": True},
)


def compile_all(capability: int) -> list[str]:
    """Return the names of the compiled kernels."""
    compiled: list[str] = []
    most = SHARED_KB[capability] << 10

    def only_compile(kernel, grid):
        def run(*args, **kwargs):
            kept = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            made, name = kept.metadata, kernel.fn.__name__
            assert not reads_stale(kept.asm["ptx"]), f"{name} lacks a fence between cp.async and wgmma: {kwargs}"
            assert made.target.arch == capability
            is_product = name in ("_quantised_kernel", "_gated_kernel")
            assert not (is_product and capability == 90 and by_warps_in_fp8(kept.asm["ptx"])), f"{name}: {kwargs}"
            assert made.shared <= most, f"{name} takes {made.shared} bytes of shared memory of {most}: {kwargs}"
            compiled.append(name)

        return run

    driver.set_active(CompileOnly(capability))
    for module in (chunks, experts, of_weights, tiles, tiling):
        module.shared_memory = lambda device: most
    JITFunction.__getitem__ = only_compile
    attention(torch.bfloat16, LAYERS[1], range(7))
    attention(torch.bfloat16, LAYERS[0], (0, 1, 4, 5, 6))
    attention(torch.bfloat16, LAYERS[2], (1, 4, 6))
    attention(torch.bfloat16, LAYERS[4], (0, 1, 4))
    attention(torch.float32, LAYERS[1], (1, 4, 6))
    if capability != 90:  # less shared memory: compile the kernels that need the most
        for layer in LAYERS:
            if not ("v_in_k" in layer and most < 104 << 10):  # in fp32 no tile of theirs fits
                attention(torch.float32, layer, (0, 2, 3, 4, 6))
            attention(torch.bfloat16, layer, (0, 2, 3, 4, 6))
    round_kernels()
    sums_over_ranks()
    products_of_experts()
    products_and_norms()
    adapters()
    latents()
    quantised()
    quantised_experts()
    choices_of_routers()
    recurrent_layers()
    flashinfer_tables()
    return compiled


def reads_stale(ptx: str) -> bool:
    """Return whether wgmma may miss what cp.async just copied: they access shared memory by different proxies."""
    copied = r"cp\.async\.wait_group(?:(?!fence\.proxy\.async).)*?wgmma\.mma_async"
    return re.search(copied, ptx, re.DOTALL) is not None


def by_warps_in_fp8(ptx: str) -> bool:
    """Return whether FP8 products use mma.sync: on Hopper, wgmma's bits differ."""
    return re.search(r"mma\.sync\S*e4m3", ptx) is not None


def sums_over_ranks() -> None:
    """The sum over two ranks."""
    from specdec.backends.triton.sums import PushedSum

    summed = PushedSum(torch.zeros(PushedSum.num_bytes(2, 1 << 18), dtype=torch.uint8), [0, 0], 0, 1 << 18)
    for dtype in (torch.float32, torch.bfloat16):
        summed(torch.zeros(3000, dtype=dtype))


def products_of_experts() -> None:
    """Few rows of many experts, more, and so many that they are sorted first; both layouts, with and without bias."""
    from specdec.backends.triton.experts.products import grouped_linear

    many = [(num_tokens, torch.bfloat16) for num_tokens in (1, 50, 300, 500, 1000)]
    for num_tokens, dtype in [*many, (1, torch.float32), (300, torch.float32)]:
        x, ids = torch.zeros(num_tokens, 64, dtype=dtype), torch.zeros(num_tokens, 2, dtype=torch.int64)
        is_transposed = num_tokens in (50, 500)
        bias = torch.zeros(16, 96, dtype=dtype) if is_transposed else None
        weight = torch.zeros(16, *((64, 96) if is_transposed else (96, 64)), dtype=dtype)
        for activation in ("", "swigluoai" if is_transposed else "silu"):
            grouped_linear(x, ids, weight, bias, is_transposed, activation)


def adapters() -> None:
    """LoRA products of plain steps, rounds and prefills, at every rank; odd sizes."""
    from specdec.backends.linear.lora import RANKS
    from specdec.backends.triton.linear import adapted
    from specdec.backends.triton.linear.lora import lora

    for num_rows, K, sizes in ((32, 4096, (4096, 1024, 1024)), (128, 14336, (4096,)), (2048, 4096, (99,))):
        for rank in RANKS:
            x, y = (torch.zeros(num_rows, size, dtype=torch.bfloat16) for size in (K, sum(sizes)))
            a = [torch.zeros(3, rank, K, dtype=torch.bfloat16) for _ in sizes]
            b = [torch.zeros(3, size, rank, dtype=torch.bfloat16) for size in sizes]
            lora(x, y, a, b, [torch.zeros(3)] * len(sizes), torch.zeros(num_rows, dtype=torch.int64))
    few = ((1, 14336, (4096,), ""), (32, 4096, (4096, 1024, 1024), ""), (64, 4096, (14336,) * 2, "silu"))
    for num_rows, K, sizes, activation in few:
        for rank in RANKS:
            x, weight = (torch.zeros(size, K, dtype=torch.bfloat16) for size in (num_rows, sum(sizes)))
            a = [torch.zeros(3, rank, K, dtype=torch.bfloat16) for _ in sizes]
            given = a, [torch.zeros(3, size, rank, dtype=torch.bfloat16) for size in sizes], [torch.zeros(3)] * len(a)
            own = torch.zeros(num_rows, dtype=torch.int64)
            assert adapted.lora_linear(x, weight, None, *given, activation, own) is not None


def latents() -> None:
    """MLA products of queries and of values, with few and many rows."""
    from specdec.backends.triton.linear.latents import latent_queries, latent_values

    weight = torch.zeros(20 * (192 + 256), 512, dtype=torch.bfloat16)
    for num_rows in (1, 40, 300):
        latent_queries(torch.zeros(num_rows, 20, 256, dtype=torch.bfloat16), weight, 64)
        latent_values(torch.zeros(num_rows, 20, 512, dtype=torch.bfloat16), weight, 192)


def quantised() -> None:
    """Few and many rows, gated, of one and of three weights; odd numbers of blocks; quantised results."""
    for num_rows, K, dtype in ((1, 4096, torch.bfloat16), (20, 384, torch.float16), (64, 4096, torch.bfloat16)):
        compile_quantised(num_rows, K, dtype)
    compile_quantised(500, 384, torch.bfloat16)
    if driver.active.get_current_target().arch >= 89:
        for K, dtype, bias in ((4096, torch.bfloat16, []), (384, torch.float16, [torch.zeros(14336).half()] * 2)):
            N = 14336
            weights = [torch.zeros(N, K, dtype=torch.float8_e4m3fn)] * 2, [torch.zeros(N // 128, K // 128)] * 2
            fp8.gated_linear_fp8(*fp8.quantise(torch.zeros(4, K, dtype=dtype), False), *weights, bias, dtype, "silu")


def quantised_experts() -> None:
    """MXFP4 and FP8 experts with few, more and many rows; partial blocks, and whole pairs of blocks."""
    for num_tokens, K, activation in ((1, 160, "swigluoai"), (20, 256, ""), (50, 160, ""), (300, 160, "swigluoai")):
        x, ids = torch.zeros(num_tokens, K, dtype=torch.bfloat16), torch.zeros(num_tokens, 4, dtype=torch.int64)
        words, exponents = (torch.zeros(16, 2, 96, *rest, dtype=torch.int32) for rest in ((16,), ()))
        of_experts.grouped_mxfp4(x, ids, words, exponents, torch.zeros(16, 96), activation)
        if driver.active.get_current_target().arch >= 89:
            x, row_scales = torch.zeros(num_tokens, 384, dtype=torch.float8_e4m3fn), torch.zeros(num_tokens, 3)
            weight, scales = torch.zeros(16, 160, 384, dtype=x.dtype), torch.zeros(16, 2, 3)
            gate = "silu" if activation else ""
            of_experts.grouped_fp8(x, row_scales, ids, weight, scales, torch.bfloat16, gate)


def compile_quantised(num_rows: int, K: int, dtype: torch.dtype) -> None:
    for activation, sizes in (("", (96, 32, 32)), ("silu", (96, 96)), ("", (96,))):
        x = torch.zeros(num_rows, K, dtype=dtype)
        bias = [torch.zeros(N, dtype=dtype) for N in sizes] if len(sizes) > 1 else []
        for group in (128, 32, K):
            words = [torch.zeros(K // 128, N, 16, dtype=torch.int32) for N in sizes]
            packed.packed_linear(
                x, words, [torch.zeros(K // group, N, dtype=torch.int32) for N in sizes], bias, activation
            )
        packed.packed_linear(x, words, [torch.zeros(K // 64, N) for N in sizes], bias, activation)
        weights = [torch.zeros(N, K, dtype=torch.float8_e4m3fn) for N in sizes]
        if driver.active.get_current_target().arch >= 89:
            for by_channel in (False, True):
                scales = [torch.zeros(N) if by_channel else torch.zeros(1, K // 128) for N in sizes]
                fp8.fp8_linear(*fp8.quantise(x, by_channel), weights, scales, bias, dtype, activation)


def products_and_norms() -> None:
    """Products of few and many rows, with and without TMA, gate and bias; norms of layers and of heads."""
    from specdec.backends.triton.linear import gates, inputs, norms, products

    for num_rows, N, K, dtype in (
        (1, 960, 576, torch.bfloat16),
        (1, 6144, 4096, torch.bfloat16),
        (20, 28672, 4096, torch.bfloat16),
        (60, 2048, 2048, torch.float16),
        (100, 4096, 1024, torch.bfloat16),
        (300, 4096, 1024, torch.bfloat16),
        (3, 1000, 1001, torch.bfloat16),
        (300, 1000, 1001, torch.float16),
    ):
        x, weight, bias = (torch.zeros(*shape, dtype=dtype) for shape in ((num_rows, K), (N, K), (N,)))
        products.product(x, weight, None, None)
        products.product(x, weight, None, None, torch.float32)
        for activation in ("silu", "gelu", "gelu_tanh"):
            products.product(x, weight, bias, activation)
    gates.gate(torch.zeros(3, 2000, dtype=torch.bfloat16), "silu")
    rows = torch.zeros(3, 8192, dtype=torch.bfloat16)
    for x in (rows, rows[:, :576].half(), rows.view(3, 64, 128)[:, :8], rows[:, :35]):
        norms.rms_norm(x, rows[0, : x.shape[-1]], 1e-5, 1.0, True)
        norms.add_rms_norm(x, x, rows[0, : x.shape[-1]], 1e-5, 0.0, False)
    for H, R, is_late in ((8192, 128, True), (96, 16, False)):
        states, tables, ids = rows[:, :H].contiguous(), torch.zeros(9, 2, R, dtype=rows.dtype), torch.zeros(3).long()
        inputs.joined_inputs(ids, states, states, ids, tables, states[0], states[1], 1e-5, 0.0, is_late)
    gates.apply_gate(rows[:, :512], rows[:, 512:1024], "silu")
    gates.apply_gate(rows[:, :512].view(3, 2, 256), rows[:, :512], "sigmoid")
    norms.gated_rms_norm(rows[:1].view(-1, 128), rows[:, 8:4104].view(3, 32, 128)[:2], rows[0, :128], 1e-5)
    if driver.active.get_current_target().arch >= 89:
        for by_row in (False, True):
            norms.add_rms_norm_fp8(rows[:, :4096], rows[:, :4096], rows[0, :4096], 1e-5, 0.0, False, by_row)
            norms.rms_norm_fp8(rows[:, :384].half(), rows[0, :384].half(), 1e-5, 0.0, False, by_row)


def choices_of_routers() -> None:
    """One warp per row, and four; sums over the chosen experts."""
    from specdec.backends.triton.experts.choices import experts_rms_norm, top_scores, weighted_sum

    for num, dtype in ((256, torch.float32), (512, torch.bfloat16), (1000, torch.float32)):
        for softmax in ("", "all", "chosen"):
            top_scores(torch.zeros(3, num, dtype=dtype), 8, softmax, torch.bfloat16)
        weighted_sum(torch.zeros(3 * 8, num, dtype=dtype), torch.zeros(3, 8), torch.bfloat16)
    x = torch.zeros(3 * 8, 2048, dtype=torch.bfloat16)
    for gate in (None, x[:3, :1]):
        experts_rms_norm(x, x[:3, :8], None if gate is None else x[:3], gate, x[:3], x[0], 1e-6, 1.0, True)


def recurrent_layers() -> None:
    """Every kind of recurrent layer, in chains, trees of one and two words, prefills, plain steps and commits."""
    from specdec.backends.metadata import TORCH_METADATA
    from specdec.backends.recurrent.state_pool import ConvInputs, ConvSpec, ScanInputs, ScanSpec, StatePool
    from specdec.backends.triton.recurrent import units
    from specdec.backends.triton.recurrent.ops import TRITON_RECURRENT
    from specdec.core.batch import ForwardMode

    specs = (
        ScanSpec(32, 16, 128, 128, "head", is_corrected=True),
        ScanSpec(32, 32, 128, 128, "key", is_corrected=True),
        ScanSpec(80, 8, 128, 64, "head", is_corrected=False),
        ScanSpec(1, 1, 16, 8192, "state", is_corrected=False),
        ScanSpec(8, 8, 96, 192, "key", is_corrected=False),
        ScanSpec(4, 2, 10, 12, "head", is_corrected=False),
        ConvSpec(8192, 4),
        ConvSpec(2048, 3),
    )
    units.delta_gates(*torch.zeros(2, 3, 32, dtype=torch.bfloat16), *torch.zeros(2, 32))
    pool = StatePool(specs, 3, 8, torch.bfloat16, torch.device("cpu"), TRITON_RECURRENT)
    table, rows, lens = torch.ones(3, 600, dtype=torch.int32), torch.arange(2), torch.full((2,), 500)
    bits = torch.ones(2, 8, 1, dtype=torch.int64)
    plans = [TORCH_METADATA.prefill(table, rows, [500, 3], [90, 7])] + [
        TORCH_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=8, max_prefix=512, ancestor_bits=b)
        for b in (None, bits, bits.expand(-1, -1, 2))
    ]
    plans += [TORCH_METADATA.uniform(ForwardMode.DECODE, table, rows, lens, q_len=1, max_prefix=512)]
    for number, plan in enumerate(plans):
        t = plan.positions.numel()
        for i, spec in enumerate(specs):
            if number == 3 and i in (1, 2, 4, 5):
                continue  # like 0 and 3
            if isinstance(spec, ConvSpec):
                x = torch.zeros(t, spec.channels, dtype=torch.bfloat16)
                weight = x.new_zeros(spec.channels, spec.kernel)
                pool.conv(ConvInputs(x, weight, x[0] if i == 6 else None, i == 6), i, plan)
                continue
            q, v = torch.zeros(t, spec.key_heads, spec.k_dim), torch.zeros(t, spec.heads, spec.v_dim)
            q, g = q.bfloat16(), torch.zeros(t, *spec.decay_shape)
            v = v.bfloat16() if spec.decay == "key" else v  # as in models
            beta = v[:, :, 0] if spec.is_corrected else None
            pool.scan(ScanInputs(q, q, v, g, beta, pool.layers[i].rates, 0.1 if i < 2 else None), i, plan)
    pool.committer(None)(table, rows, lens, torch.zeros(2, 5, dtype=torch.int64))


def attention(dtype: torch.dtype, shape: dict[str, Any], which: Sequence[int]) -> None:
    """The attention kernel and its helper kernels in forwards `which`: 0 plain decode, 1 tree, 2 tree of two words,
    3 chain, 4 prefill, 5 prefill with images, 6 prefill of prompts without cached tokens."""
    from specdec.backends import AttentionCall, LayerSpec
    from specdec.backends.base import HeadNorms, NormedRope
    from specdec.backends.rope import rope_table
    from specdec.backends.triton.attention.metadata import TRITON_METADATA
    from specdec.backends.triton.backend import TritonBackend
    from specdec.core.batch import ForwardMode
    from specdec.core.cache.pool import KVPool

    table, rows, lens = torch.ones(3, 600, dtype=torch.int32), torch.arange(2), torch.full((2,), 500)
    depths, bits = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, 1, dtype=torch.int64)
    trees = {"depths": depths, "tail_depths": depths, "ancestor_bits": bits}
    wide = {**trees, "ancestor_bits": bits.expand(-1, -1, 2)}
    plans = [
        TRITON_METADATA.uniform(ForwardMode.DECODE, table, rows, lens, q_len=1, max_prefix=512),
        TRITON_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=8, max_prefix=512, **trees),
        TRITON_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=8, max_prefix=512, **wide),
        TRITON_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=32, max_prefix=512),
        TRITON_METADATA.prefill(table, rows, [500, 3], [40, 7]),
    ]
    plans.append(replace(plans[4], limits=plans[4].positions))
    plans.append(TRITON_METADATA.packed(table, rows, lens * 0, lens, 1024, 0))
    TRITON_METADATA.uniform(ForwardMode.DECODE, table, rows, lens, q_len=1, max_prefix=512, rope_deltas=lens)
    layer = LayerSpec(**shape)
    pool = KVPool([layer.shape], 700, dtype, torch.device("cpu"))
    sinks = torch.zeros(layer.num_heads, dtype=dtype) if layer.has_sinks else None
    for plan in [plans[i] for i in which]:
        t = plan.positions.numel()
        q, k = torch.zeros(t, layer.num_heads, layer.qk_dim), torch.zeros(t, layer.num_kv_heads, layer.qk_dim)
        v, out = torch.zeros(t, layer.num_kv_heads, layer.v_dim), torch.zeros(t, layer.num_heads, layer.v_dim)
        backend = TritonBackend()
        backend.plan(plan)
        rope = rope_table(torch.arange(t), 64, 1e4, dtype) if layer.has_sinks else None
        if rope is not None and plan is not plans[0]:
            weight = torch.zeros(layer.qk_dim, dtype=dtype)
            rope = NormedRope(*rope, HeadNorms(weight, weight, 1e-6, 1.0, plan is plans[4]))
        backend.run(AttentionCall(*(x.to(dtype) for x in (q, k, v, out)), pool, 0, layer, sinks, rope))


def flashinfer_tables() -> None:
    """The plan that FlashInfer's kernels read."""
    from specdec.backends.flashinfer.tables import Shapes, write_tables

    table, rows, lens = torch.ones(3, 600, dtype=torch.int32), torch.arange(2), torch.full((2,), 500)
    for q_len in (1, 64):
        write_tables(Shapes(2, q_len, 32, 8, 128, 33), lens, q_len, rows, table)


def round_kernels() -> None:
    """Trees, verification, sampling, row updates, commit and the end of a round."""
    from specdec.backends.triton.round import admit, chain, imposed, lookup, rows, spine, tree, trim, walk
    from specdec.backends.triton.sampling import bitmask, draws, law, processors, top
    from specdec.backends.triton.sampling import uniform as sampling
    from specdec.core.cache.pool import KVPool, LayerShape
    from specdec.core.functional.sampling import Guide, SamplingBatch, SamplingParams
    from specdec.core.round.state import EngineState

    ids, floats = torch.zeros(2, 40, dtype=torch.int64), torch.zeros(2, 40)
    tree.build(ids[:, 0].clone(), ids, floats, ids, ids[0].clone(), num_draft_tokens=32, num_steps=5)
    many, scores = torch.zeros(2, 300, dtype=torch.int64), torch.zeros(2, 300)
    chain.chain(ids[:, 0], ids[:, 1:])
    for k, words in ((8, 1), (16, 4)):
        names, bits = many[:, :k].clone(), torch.zeros(2, k, words, dtype=torch.int64)
        log_probs, children = torch.zeros(2, k, k), many[:, : k * k].clone()
        for keeps_first in (False, True):
            tree.grow(log_probs, children, scores[:, :k].clone(), names, bits, bits[0].clone(), 8, keeps_first)
    tree.build(many[:, 0].clone(), many, scores, many, many[0].clone(), num_draft_tokens=200, num_steps=8)
    for dtype in (torch.bfloat16, torch.float32):
        top.top_tokens(torch.zeros(3, 9000, dtype=dtype), 8, torch.arange(9000))
        top.best_token(torch.zeros(3, 9000, dtype=dtype), None)
    nodes, laws = ids[:, :8].contiguous(), torch.zeros(2, 8, 5000)
    uniforms = sampling.uniform(ids[:, 0].clone(), ids[:, 0].clone(), 64, 8)
    for names in (None, torch.arange(5000)):
        draws.sample(laws[:, 0], uniforms[:, 1], names)
    for own in (None, floats[:, 0].clone()):
        spine.put_first(ids[:, 0].clone(), ids[:, :8], floats[:, :8], own, (-0.5, -1.0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for params in (SamplingParams(1.0), SamplingParams(1.0, top_k=5)):
            law.law(laws.to(dtype), SamplingBatch.stack([params] * 2, "cpu"))
        bitmask.constrain(laws.to(dtype), torch.full((*laws.shape[:2], 1), -1, dtype=torch.int32))
        for step in (0, 1):
            guide = Guide(ids[:, :3].contiguous(), torch.full((2, 200), -1, dtype=torch.int32))
            bitmask.guided(laws.to(dtype), guide, step, torch.arange(5000))
    walk.verify_greedy(laws.bfloat16(), nodes, nodes, 5)
    verified = walk.verify_tree(laws, nodes, nodes, 5, uniforms)
    verified = trim.trim(verified, nodes[0, :2].clone(), ids, ids[:, 0].clone())
    for moves in (True, False):
        trim.emit(verified, nodes[0, :2].clone(), *[ids[:, 0].clone() for _ in range(3)], ids.int(), moves)
    trim.mail(ids, ids.clone())
    walk.verify_chain(laws, laws[:, :7].contiguous(), nodes, uniforms)
    spine.verify_spine(laws, laws[:, :5].contiguous(), nodes, nodes, nodes, 5, uniforms)
    rows.gather_rows(laws, nodes)
    rows.keep_last(laws.bfloat16(), nodes[:, 0].clone(), nodes[:, 1].clone(), laws[0].bfloat16())
    rows.starts(ids[:, 0].clone(), ids[:, 1].clone(), nodes[0, :2].clone())
    imposed.impose(verified, nodes, torch.zeros(5, dtype=torch.float64), uniforms[:, 0].clone())
    pool = KVPool([LayerShape(2, 16, 8)], 50, torch.bfloat16, torch.device("cpu"))
    rows.committer(pool)(ids.int(), ids[:, 0].clone(), ids[:, 0].clone(), nodes)
    state = EngineState.empty(3, 600, torch.device("cpu"))
    admit.admit(ids, state.columns, torch.zeros(3, 600, dtype=torch.int32), 1)
    found, lengths = lookup.look_up(ids.int(), nodes[0, :2].clone(), nodes[0, :2].clone(), 5, 4)
    lookup.merge(many, scores, many, found, lengths)
    for dtype in (torch.bfloat16, torch.float32):
        processors.process(laws.to(dtype), nodes, nodes, nodes, nodes, *[nodes[0, :2].clone()] * 2, state.processors)


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:] or ["90"]):
        print(f"sm_{capability}", triton.__version__, *sorted(set(compile_all(capability))))
