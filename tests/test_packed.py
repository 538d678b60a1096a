"""Products with quantised weights: ops, twins, kernels, and bits that depend on a row alone."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec.backends.experts import quantised as experts
from specdec.backends.gates import gate_twin
from specdec.backends.linear import fp8, packed
from specdec.backends.triton.experts.quantised import grouped_fp8, grouped_mxfp4
from specdec.backends.triton.linear import few, gated_fp8, norms
from specdec.backends.triton.linear import fp8 as fp8_kernels
from specdec.backends.triton.linear import packed as packed_kernels
from specdec.reach.targets.adapters.quantised import _read_nf4
from tests.early_starts import check_early_starts
from tests.test_linear import random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = 2**-5  # of several roundings; the interpreter rounds bf16 to zero


def int4(N, K, group, dtype, has_zeros, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values, zeros = (torch.randint(0, 16, (N, k), generator=generator).to(DEVICE) for k in (K, K // group))
    scales = random(N, K // group, dtype=dtype, seed=seed).abs() * 0.1
    return values, scales, zeros if has_zeros else None


@pytest.mark.parametrize(("group", "dtype"), [(128, torch.bfloat16), (32, torch.float16), (256, torch.float16)])
def test_packed_weights_are_what_was_packed(group, dtype):
    values, scales, zeros = int4(48, 512, group, dtype, has_zeros=group != 256)
    words, packed_scales = packed.pack(values, scales, zeros)
    zero = 8 if zeros is None else zeros.repeat_interleave(group, 1)
    expected = ((values - zero).float() * scales.float().repeat_interleave(group, 1)).to(dtype)
    assert packed.unpack(words, packed_scales, dtype).equal(expected)
    x = torch.eye(512, dtype=dtype, device=DEVICE).view(2, 256, 512)
    assert packed.packed_linear(x, [words], [packed_scales], []).equal(F.linear(x, expected))


def test_nf4_is_what_bitsandbytes_reads():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = random(16, 256, dtype=torch.float32)
    for is_nested in (False, True):
        data, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=is_nested)
        layer = SimpleNamespace(weight=SimpleNamespace(data=data, quant_state=state), out_features=16, in_features=256)
        theirs = functional.dequantize_4bit(data, state)
        torch.testing.assert_close(packed.unpack(*_read_nf4(layer), torch.float32), theirs, rtol=1e-6, atol=1e-6)


def close(ours, theirs, bits):
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=bits, atol=bits * float(theirs.float().std()))


@pytest.mark.parametrize(
    ("num_rows", "K", "group", "dtype", "activation"),
    [
        (1, 384, 128, torch.bfloat16, ""),
        (2, 2304, 128, torch.bfloat16, ""),
        (12, 640, 128, torch.bfloat16, "silu"),
        (12, 640, 128, torch.bfloat16, ""),
        (3, 640, 64, torch.bfloat16, "silu"),
        (8, 256, 32, torch.float16, ""),
        (20, 256, 64, torch.float16, "silu"),
        (130, 256, 32, torch.float16, ""),
    ],
)
def test_packed_products_equal_their_twin(num_rows, K, group, dtype, activation):
    check_packed(num_rows, K, group, dtype, activation)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_packed_products_in_eight_splits_equal_their_twin(num_rows, monkeypatch):
    """With splits of one or two blocks; a K that is long enough takes the interpreter 20 s."""
    monkeypatch.setattr(few, "splits_of", lambda num_blocks: 8)
    check_packed(num_rows, 1152, 128, torch.bfloat16, "")


def check_packed(num_rows, K, group, dtype, activation):
    sizes = (48, 48) if activation else (48, 16, 80)
    layers = [int4(N, K, group, dtype, has_zeros=True, seed=N + i) for i, N in enumerate(sizes)]
    words, scales = zip(*(packed.pack(*layer) for layer in layers), strict=True)
    if group == 64:
        words, scales = zip(*(packed.pack_nf4(*layer[:2]) for layer in layers), strict=True)
    bias = [random(N, dtype=dtype) for N in sizes]
    x = random(num_rows, K, dtype=dtype)
    for added in ([], bias):
        ours = packed_kernels.packed_linear(x, words, scales, added, activation)
        close(ours, packed.packed_linear.twin(x, words, scales, added, activation), BITS)
    alone = packed_kernels.packed_linear(x[-1:], words, scales, bias, activation)
    assert alone.equal(packed_kernels.packed_linear(x, words, scales, bias, activation)[-1:])


def blocks(N, K, seed=0):
    weight = random(N, K, seed=seed).float().to(torch.float8_e4m3fn)
    return weight, random(-(-N // 128), K // 128, dtype=torch.float32, seed=seed).abs() + 0.1


def channels(N, K, seed=0):
    return blocks(N, K, seed)[0], random(N, dtype=torch.float32, seed=seed).abs() + 0.1


@pytest.mark.parametrize("of", [blocks, channels])
@pytest.mark.parametrize(("num_rows", "K", "activation"), [(1, 384, ""), (20, 256, "silu"), (130, 256, "")])
def test_fp8_products_equal_their_twin(num_rows, K, activation, of):
    sizes = (144, 144) if activation else (144, 16, 256)
    weights, scales = zip(*(of(N, K, N + i) for i, N in enumerate(sizes)), strict=True)
    bias = [random(N) for N in sizes]
    x, row_scales = fp8.quantise.twin(random(num_rows, K), of is channels)
    for added in ([], bias):
        args = (weights, scales, added, torch.bfloat16, activation)
        close(fp8_kernels.fp8_linear(x, row_scales, *args), fp8.fp8_linear.twin(x, row_scales, *args), BITS)
    ours = fp8_kernels.fp8_linear(x, row_scales, *args)
    assert ours[-1:].equal(fp8_kernels.fp8_linear(x[-1:], row_scales[-1:], *args))


@pytest.mark.parametrize("K", [384, 1024, 1152])
def test_gated_fp8_products_of_few_rows_have_the_bits_of_others(K, monkeypatch):
    """Quarters of K that are short, of whole steps, and of an odd number of blocks; columns for 1.5 programs."""
    calls = Mock(side_effect=gated_fp8.gated_fp8)
    monkeypatch.setattr(fp8_kernels, "gated_fp8", calls)
    monkeypatch.setattr(gated_fp8, "LEAST_BUSY", 0)
    weights, scales = zip(*(blocks(192, K, i) for i in range(2)), strict=True)
    x, row_scales = fp8.quantise.twin(random(17, K), False)
    args = weights, scales, [random(192, seed=i) for i in range(2)], torch.bfloat16, "silu"
    many = fp8_kernels.fp8_linear(x, row_scales, *args)
    close(many, fp8.fp8_linear.twin(x, row_scales, *args), BITS)
    assert not calls.called
    for rows in (1, 4, 16):
        assert fp8_kernels.fp8_linear(x[:rows], row_scales[:rows], *args).equal(many[:rows])
    assert calls.called == gated_fp8.takes(1, 192, scales, "silu")


def test_gated_fp8_products_quantise_what_they_give(monkeypatch):
    """In one launch if rows are few, with the bits of two launches."""
    weights, scales = zip(*(blocks(256, 384, i) for i in range(2)), strict=True)
    x, row_scales = fp8.quantise.twin(random(17, 384), False)
    args = weights, scales, [random(256, seed=i) for i in range(2)], torch.bfloat16, "silu"
    values, of_values = fp8_kernels.quantise(fp8_kernels.fp8_linear(x, row_scales, *args), False)
    close(of_values, fp8.quantise.twin(fp8.fp8_linear.twin(x, row_scales, *args), False)[1], BITS)
    calls = Mock(side_effect=fp8_kernels.quantise)
    monkeypatch.setattr(fp8_kernels, "quantise", calls)
    monkeypatch.setattr(gated_fp8, "LEAST_BUSY", 0)
    for rows in (1, 4, 16, 17):
        ours = fp8_kernels.gated_linear_fp8(x[:rows], row_scales[:rows], *args)
        assert ours[0].float().equal(values[:rows].float()) and ours[1].equal(of_values[:rows])
        assert calls.called != gated_fp8.takes(rows, 256, scales, "silu")


@pytest.mark.parametrize(("N", "is_taken"), [(14336, True), (16896, True), (8192, False), (17408, False)])
def test_gated_fp8_products_keep_most_multiprocessors_busy(N, is_taken, monkeypatch):
    monkeypatch.setattr(gated_fp8, "INTERPRETED", False)
    monkeypatch.setattr(gated_fp8, "capability", lambda: 90)
    scales = [torch.ones(1, 1)]
    assert gated_fp8.takes(16, N, scales, "silu") == is_taken
    assert not gated_fp8.takes(17, N, scales, "silu") and not gated_fp8.takes(16, N, scales, "")


@pytest.mark.parametrize("by_row", [False, True])
def test_rows_are_quantised_as_their_twin_does(by_row):
    x = random(3, 2304)
    x[1] = 0
    (ours, scales), (theirs, twins) = fp8_kernels.quantise(x, by_row), fp8.quantise.twin(x, by_row)
    assert scales.equal(twins) and not ours[1].float().any()
    num_equal = (ours.float() == theirs.float()).sum().item()
    assert num_equal >= (0.98 if DEVICE.type == "cpu" else 1) * x.numel()  # the interpreter rounds a few wrongly


@pytest.mark.parametrize("by_row", [False, True])
def test_norms_quantise_what_they_give(by_row):
    x, y, weight = random(5, 384), random(5, 384, seed=1), random(384, seed=2)
    settings = weight, 1e-3, 0.0, False
    normed, total = norms.add_rms_norm(x, y, *settings)
    values, scales = fp8_kernels.quantise(normed, by_row)
    ours = norms.add_rms_norm_fp8(x, y, *settings, by_row)
    assert ours[0].float().equal(values.float()) and ours[1].equal(scales) and ours[2].equal(total)
    again = norms.rms_norm_fp8(total[:2], *settings, by_row)
    assert again[0].float().equal(values[:2].float()) and again[1].equal(scales[:2])


@pytest.mark.parametrize("of", [blocks, channels])
def test_ops_gate_and_take_any_shape(of):
    weight, scale = of(32, 256)
    x, row_scales = fp8.quantise(random(2, 3, 256), of is channels)
    joined = fp8.fp8_linear(x, row_scales, [weight, weight], [scale, scale], [], torch.bfloat16)
    gated = fp8.fp8_linear(x, row_scales, [weight, weight], [scale, scale], [], torch.bfloat16, "silu")
    assert joined.shape == (2, 3, 64) and gate_twin(joined, "silu").equal(gated)
    weight, scale = of(128, 256)
    args = x, row_scales, [weight, weight], [scale, scale], [], torch.bfloat16, "silu"
    ours, theirs = fp8.gated_linear_fp8(*args), fp8.quantise(fp8.fp8_linear(*args), False)
    assert ours[0].float().equal(theirs[0].float()) and ours[1].equal(theirs[1]) and ours[1].shape == (2, 3, 1)


def mxfp4(E, N, K):
    generator = torch.Generator().manual_seed(N)
    blocks = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    scales = torch.randint(118, 124, (E, N, K // 32), dtype=torch.uint8, generator=generator).to(DEVICE)
    return blocks, scales


def test_mxfp4_is_what_transformers_reads():
    blocks, scales = mxfp4(2, 16, 160)
    theirs = convert_moe_packed_tensors(blocks.view(2, 16, 5, 16), scales)
    packs = [experts.pack_mxfp4(*of_one) for of_one in zip(blocks, scales, strict=True)]
    ours = torch.stack([experts.unpack_mxfp4(*pack)[:, :160] for pack in packs])
    assert ours.equal(theirs.transpose(1, 2).float())


@pytest.mark.parametrize(("num_tokens", "activation"), [(3, "swigluoai"), (60, ""), (150, "swigluoai")])
def test_products_with_experts_in_mxfp4_equal_their_twin(num_tokens, activation):
    """Programs find rows, or rows are sorted first; 160 features are a block and a part; the last id has no expert."""
    packs = [experts.pack_mxfp4(*of_one) for of_one in zip(*mxfp4(4, 48, 160), strict=True)]
    words, exponents = map(torch.stack, zip(*packs, strict=True))
    x, bias = random(num_tokens, 160), random(4, 48, dtype=torch.float32)
    ids = torch.arange(2 * num_tokens, device=DEVICE).view(-1, 2) % 5
    ours = grouped_mxfp4(x, ids, words, exponents, bias, activation)
    close(ours, experts.grouped_mxfp4.twin(x, ids, words, exponents, bias, activation), BITS)
    assert ours[:2].equal(grouped_mxfp4(x[:1], ids[:1], words, exponents, bias, activation))


def few_rows(K, activation, has_bias):
    """Return arguments with 17 rows of one expert, 9 of another, 2 of none, and experts without rows."""
    packs = [experts.pack_mxfp4(*of_one) for of_one in zip(*mxfp4(4, 48, K), strict=True)]
    words, exponents = map(torch.stack, zip(*packs, strict=True))
    ids = torch.tensor([1] * 17 + [3] * 9 + [4, 9], device=DEVICE)[torch.arange(28, device=DEVICE) * 9 % 28].view(-1, 1)
    bias = random(4, 48, dtype=torch.float32) if has_bias else None
    return random(28, K), ids, words, exponents, bias, activation


@pytest.mark.parametrize(("activation", "has_bias"), [("", False), ("swigluoai", True)])
@pytest.mark.parametrize("K", [96, 160, 256, 352, 640])
def test_few_rows_of_experts_in_mxfp4_equal_their_twin(K, activation, has_bias):
    """Whole pairs of blocks, and a partial block as either of the last two."""
    x, ids, *rest = few_rows(K, activation, has_bias)
    ours = grouped_mxfp4(x, ids, *rest)
    close(ours, experts.grouped_mxfp4.twin(x, ids, *rest), BITS)
    for i in range(0, 28, 9):
        assert ours[i : i + 1].equal(grouped_mxfp4(x[i : i + 1], ids[i : i + 1], *rest))


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "has_bias"), [("", False), ("", True), ("swigluoai", True)])
@pytest.mark.parametrize("K", [96, 256, 352, 2880])
def test_bits_of_experts_in_mxfp4_depend_on_neither_rows_nor_tiles(K, activation, has_bias):
    x, ids, *rest = few_rows(K, activation, has_bias)
    full = grouped_mxfp4(x.repeat(10, 1), ids.repeat(10, 1), *rest)[:28]
    assert full.isfinite().all() and grouped_mxfp4(x.repeat(2, 1), ids.repeat(2, 1), *rest)[:28].equal(full)
    for rows in (1, 2, 5, 16, 17, 28):
        assert grouped_mxfp4(x[:rows], ids[:rows], *rest).equal(full[:rows])


@pytest.mark.parametrize(("num_tokens", "activation"), [(3, ""), (150, "silu")])
def test_products_with_experts_in_fp8_equal_their_twin(num_tokens, activation):
    weight, scales = map(torch.stack, zip(*(blocks(160, 384, seed) for seed in range(4)), strict=True))
    x, row_scales = fp8.quantise.twin(random(num_tokens, 384), False)
    ids = torch.arange(2 * num_tokens, device=DEVICE).view(-1, 2) % 5
    args = weight, scales, torch.bfloat16, activation
    ours = grouped_fp8(x, row_scales, ids, *args)
    close(ours, experts.grouped_fp8.twin(x, row_scales, ids, *args), BITS)
    assert ours[:2].equal(grouped_fp8(x[:1], row_scales[:1], ids[:1], *args))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(("is_nf4", "K"), [(False, 2048), (True, 2048), (False, 8192), (False, 1920)])
def test_bits_of_packed_products_depend_on_neither_rows_nor_tiles(is_nf4, K, activation):
    layers = [int4(4096, K, 64, torch.bfloat16, has_zeros=not is_nf4, seed=i) for i in range(2)]
    packs = [packed.pack_nf4(*layer[:2]) if is_nf4 else packed.pack(*layer) for layer in layers]
    words, scales = zip(*packs, strict=True)
    x = random(300, K)
    full = packed.packed_linear(x, words, scales, [], activation)
    for rows in (1, 2, 3, 4, 7, 8, 12, 16, 32, 64, 128):
        assert packed.packed_linear(x[:rows], words, scales, [], activation).equal(full[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_features_of_all_mantissas_are_quantised_as_by_a_division(dtype, bits):
    """Also by scales of all mantissas, and for all exponents of FP8."""
    count = 2**bits
    mantissas = 1 + torch.arange(count, device=DEVICE) / count
    largest = 256 * mantissas[:, None, None]
    for exponent in range(-13, 8):
        features = F.pad(mantissas * 2.0**exponent, (0, -count % 127)).view(1, -1, 127)
        x = torch.cat([largest.expand(-1, features.shape[1], -1), features.expand(count, -1, -1)], -1)
        x = x.flatten(1).to(dtype)
        ours, twin = fp8.quantise(x, False), fp8.quantise.twin(x, False)
        assert ours[0].view(torch.uint8).equal(twin[0].view(torch.uint8)) and ours[1].equal(twin[1])


@pytest.mark.gpu
def test_kernels_that_start_early_read_nothing_before_its_time(monkeypatch):
    words, scales = packed.pack(*int4(2048, 2048, 128, torch.bfloat16, has_zeros=True))
    wide, wide_scale = blocks(2048, 2048)
    scale, settings = random(2048), (1e-5, 0.0, False)

    def forward(x):
        for _ in range(8):
            y = packed.packed_linear(norms.rms_norm(x, scale, *settings), [words] * 2, [scales] * 2, [], "silu")
            y = packed.packed_linear(y, [words], [scales], [])
            y = packed.packed_linear(norms.rms_norm(y, scale, *settings), [words] * 3, [scales] * 3, [])[:, 2048:4096]
            values, row_scales, total = norms.add_rms_norm_fp8(y, x, scale, *settings, False)
            y = fp8.fp8_linear(values, row_scales, [wide], [wide_scale], [], x.dtype)
            gated = fp8.gated_linear_fp8(*fp8.quantise(y, False), [wide] * 2, [wide_scale] * 2, [], x.dtype, "silu")
            x = fp8.fp8_linear(*gated, [wide], [wide_scale], [], x.dtype) + total
        return x

    for rows in (1, 20):
        check_early_starts(forward, [random(rows, 2048, seed=i) for i in range(20)], monkeypatch)
