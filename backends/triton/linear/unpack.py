"""Unpacks 4-bit weights in registers, for products: a thread multiplies the weights that it loads, without shuffles.

Two neighbours of a block of 128 elements are in one word, 16 bits apart, with the pairs 16, 32 and 48 elements further
on; the next word has the other four of these pairs (`backends.linear.packed.pack`). So each tensor-core operand, of 16
features, takes the next nibble of both halves of a word. In MXFP4, the bits of a nibble lie apart: `pack_mxfp4`.
"""

import struct

import triton
import triton.language as tl

from specdec.backends.linear.packed import NF4


def _assembly(kind: str, magic: int, one: int) -> str:
    """Return the PTX that makes eight pairs of 16-bit weights from two words, and two words of scales per quarter.

    A nibble becomes the low mantissa bits of a number whose last bit counts ones, 128 in bf16 and 1024 in fp16; adding
    the high half of a scale's word removes that and a zero point, exactly; the product with the low half is rounded
    once.
    """
    steps = ["mov.b32 v0, $8", "mov.b32 v4, $9"]
    for i in range(4):
        steps.append(f"prmt.b32 scale{i}, ${10 + 2 * i}, ${11 + 2 * i}, 0x5410")
        steps.append(f"prmt.b32 offset{i}, ${10 + 2 * i}, ${11 + 2 * i}, 0x7632")
    steps += [f"mov.b32 one, 0x{one:04X}{one:04X}", "mov.b32 none, 0x80008000"]
    steps += [f"shr.u32 v{j}, v{j // 4 * 4}, {j % 4 * 4}" for j in range(8) if j % 4]
    for j in range(8):
        steps.append(f"lop3.b32 v{j}, v{j}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA")
        steps.append(f"fma.rn.{kind}x2 v{j}, v{j}, one, offset{j // 2}")
        steps.append(f"fma.rn.{kind}x2 ${j}, v{j}, scale{j // 2}, none")
    return f"{{ .reg .b32 v<8>, scale<4>, offset<4>, one, none; {'; '.join(steps)}; }}"


def _assembly_of_mxfp4() -> str:
    """Return the PTX that makes eight pairs of bf16 weights from two words of e2m1 and a word of exponents, one per
    quarter. Moving sign, exponent and mantissa to bf16's bits gives 2^-126 of the value, exactly, with subnormals.
    """
    steps = ["mov.b32 none, 0x80008000"]
    for i in range(4):
        steps += [f"prmt.b32 scale{i}, $10, 0, 0x4{i}4{i}", f"shl.b32 scale{i}, scale{i}, 7"]
    for j, word in enumerate(4 * ["$8"] + 4 * ["$9"]):
        first = f"and.b32 v, {word}, 0x81C081C0", f"shf.r.wrap.b32 v, {word}, {word}, 6", f"shl.b32 v, {word}, 4"
        steps.append((*first, f"shl.b32 v, {word}, 6")[j % 4])
        if j % 4 in (1, 2):
            steps.append("and.b32 v, v, 0x81C081C0")
        if j % 4 == 3:
            steps += ["and.b32 v, v, 0x80C080C0", f"shr.u32 rest, {word}, 2", "lop3.b32 v, rest, 0x01000100, v, 0xEA"]
        steps.append(f"fma.rn.bf16x2 ${j}, v, scale{j // 2}, none")
    return f"{{ .reg .b32 v, rest, scale<4>, none; {'; '.join(steps)}; }}"


def _assembly_of_nf4(kind: str) -> str:
    """Return the PTX that makes eight pairs of 16-bit weights from two words of NF4, and two fp32 scales per half.

    Lane i of a warp has code i % 16; a shuffle looks a nibble up and ignores higher bits. The product is rounded once.
    """
    tree = [f"0x{bits:08X}" for bits in struct.unpack("16I", struct.pack("16f", *NF4))]
    steps = ["mov.u32 at, %laneid"]
    for level in range(4):
        steps += [f"and.b32 low, at, {1 << level}", f"setp.ne.u32 p{level}, low, 0"]
        names = [f"t{level}_{i}" for i in range(len(tree) // 2)]
        steps += [f"selp.b32 {t}, {tree[2 * i + 1]}, {tree[2 * i]}, p{level}" for i, t in enumerate(names)]
        tree = names
    for j in range(8):
        word, place = "$8" if j < 4 else "$9", j % 4 * 4
        for shift, scale, value in ((place, 10 + j // 4 * 2, "low"), (place + 16, 11 + j // 4 * 2, "high")):
            steps += [f"shr.u32 at, {word}, {shift}", f"shfl.sync.idx.b32 {value}, {tree[0]}, at, 31, -1"]
            steps.append(f"mul.f32 {value}, {value}, ${scale}")
        steps.append(f"cvt.rn.{kind}x2.f32 ${j}, high, low")
    registers = ", ".join(f"t{level}_<{8 >> level}>" for level in range(4))
    return f"{{ .reg .b32 at, low, high, {registers}; .reg .pred p<4>; {'; '.join(steps)}; }}"


OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r" + 10 * ",r")
INT4_BF16, INT4_FP16 = tl.constexpr(_assembly("bf16", 0x4300, 0x3F80)), tl.constexpr(_assembly("f16", 0x6400, 0x3C00))
BF16, FP16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


NF4_BF16, NF4_FP16 = tl.constexpr(_assembly_of_nf4("bf16")), tl.constexpr(_assembly_of_nf4("f16"))
CODES = tl.constexpr(NF4)
OPERANDS_OF_NF4 = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r")
MXFP4, OPERANDS_OF_MXFP4 = tl.constexpr(_assembly_of_mxfp4()), tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")


@triton.jit
def _words_with(words, J: tl.constexpr):
    """Return, of each two words of [N, 2 * W], the word with the J-th of their eight pairs, [N, W]."""
    first, second = tl.split(words.reshape([words.shape[0], words.shape[1] // 2, 2]))
    return first if J < 4 else second


@triton.jit
def _nibbles(words, J: tl.constexpr):
    """Return the J-th of eight pairs of each two words of [N, 2 * W], in the places of these words."""
    word = _words_with(words, J) >> (4 * (J % 4))
    return tl.join(word & 15, word >> 16 & 15).reshape(words.shape)


@triton.jit
def _value(words, scales, DTYPE: tl.constexpr, J: tl.constexpr):
    """Return the J-th eighth of weights, as the assembly does."""
    MAGIC: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0  # noqa: SIM300
    scale = scales.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    offset = (scales >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return ((_nibbles(words, J).to(tl.float32) + MAGIC + offset) * scale).to(DTYPE)


@triton.jit
def _int4(words, s0, s1, s2, s3, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return the eighths of weights of words [N, W] and the scales [N, 1] of each 32 of them, all int32."""
    if UPCAST:
        a, b = _value(words, s0, DTYPE, 0), _value(words, s0, DTYPE, 1)
        c, d = _value(words, s1, DTYPE, 2), _value(words, s1, DTYPE, 3)
        e, f = _value(words, s2, DTYPE, 4), _value(words, s2, DTYPE, 5)
        g, h = _value(words, s3, DTYPE, 6), _value(words, s3, DTYPE, 7)
    else:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        assembly: tl.constexpr = INT4_BF16 if IS_BF16 else INT4_FP16
        dtypes: tl.constexpr = BF16 if IS_BF16 else FP16
        args = [words, s0, s1, s2, s3]
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(assembly, OPERANDS, args, dtypes, True, 2)
    return a, b, c, d, e, f, g, h


@triton.jit
def in_order(eighths):
    """Concatenate eight tensors [N, 16] to [N, 128]; every thread keeps its elements."""
    a, b, c, d, e, f, g, h = eighths
    N: tl.constexpr = a.shape[0]
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).permute(0, 2, 3, 4, 1).reshape([N, 128])


@triton.jit
def _e2m1(words, exponents, J: tl.constexpr):
    """Return the J-th eighth of weights of words [N, C], as the assembly does."""
    word = _words_with(words, J)
    if J % 4 == 1:
        word = word >> 6 & 0x03FFFFFF | word << 26
    elif J % 4 == 2:
        word = word << 4
    elif J % 4 == 3:
        word = word << 6 & 0xFEFFFEFF - (1 << 32) | word >> 2 & 0x01000100
    pair = tl.join(word << 16, word) & 0x81C00000 - (1 << 32)
    field = exponents >> (J // 2 * 8) & 255  # 2^-126 of the value, times 2^(field - 127)
    values = pair.reshape(words.shape).to(tl.float32, bitcast=True)
    return (values * (field << 23).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def eighths_of_mxfp4(words, exponents, UPCAST: tl.constexpr):
    """Return the eighths of bf16 weights; words [N, W] of e2m1, see `eighths_of_words`; exponents [N, 1], 4 a word."""
    if UPCAST:
        a, b = _e2m1(words, exponents, 0), _e2m1(words, exponents, 1)
        c, d = _e2m1(words, exponents, 2), _e2m1(words, exponents, 3)
        e, f = _e2m1(words, exponents, 4), _e2m1(words, exponents, 5)
        g, h = _e2m1(words, exponents, 6), _e2m1(words, exponents, 7)
    else:
        args = [words, exponents]
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(MXFP4, OPERANDS_OF_MXFP4, args, BF16, True, 2)
    return a, b, c, d, e, f, g, h


@triton.jit
def _code(words, scales, DTYPE: tl.constexpr, J: tl.constexpr):
    """Return the J-th eighth of weights, as the assembly does."""
    nibble, code = _nibbles(words, J), tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(16):
        code = tl.where(nibble == i, CODES[i], code)
    return (code * scales).to(DTYPE)


@triton.jit
def _nf4(words, s0, s1, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return the eighths of weights of words [N, W] int32 of NF4 and the scales [N, 1] fp32 of each 64."""
    if UPCAST:
        a, b = _code(words, s0, DTYPE, 0), _code(words, s0, DTYPE, 1)
        c, d = _code(words, s0, DTYPE, 2), _code(words, s0, DTYPE, 3)
        e, f = _code(words, s1, DTYPE, 4), _code(words, s1, DTYPE, 5)
        g, h = _code(words, s1, DTYPE, 6), _code(words, s1, DTYPE, 7)
    else:
        IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
        assembly: tl.constexpr = NF4_BF16 if IS_BF16 else NF4_FP16
        dtypes: tl.constexpr = BF16 if IS_BF16 else FP16
        args = [words, s0, s1]
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(assembly, OPERANDS_OF_NF4, args, dtypes, True, 2)
    return a, b, c, d, e, f, g, h


@triton.jit
def appended(values, value):
    """Return the tuple `values` with one more: Triton cannot compile a star in a tuple."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def loaded(pointers, inside, IS_MASKED: tl.constexpr):
    """Load values where `inside` is true, zeros elsewhere; without IS_MASKED load all."""
    if IS_MASKED:
        values = tl.load(pointers, mask=inside, other=0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def scales_of(scales, inside, block, size, GROUP: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load the scales of blocks of 128 features: one tensor, or one per GROUP features if GROUP < 128.

    scales: pointers to the first ones, in the shape of the results. size: number of columns, the stride between scales.
    """
    group = block * (128 // GROUP) if GROUP < 128 else block // (GROUP // 128)
    found = ()
    for i in tl.static_range(max(128 // GROUP, 1)):
        found = appended(found, loaded(scales + (group + i) * size, inside, IS_MASKED))
    return found


@triton.jit
def eighths_of_words(words, scales, GROUP: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return the weights of blocks of features as eight tensors [N, W], 16 features each.

    words: [N, W], the 16 of a column or some neighbouring pairs of them; scales: of `scales_of`, [N, 1], fp32 for NF4.
    """
    s0, s1, s2, s3 = scales[0], scales[0], scales[0], scales[0]
    if GROUP == 64:
        s2, s3 = scales[1], scales[1]
    if GROUP == 32:
        s1, s2, s3 = scales[1], scales[2], scales[3]
    if s0.dtype == tl.float32:
        eighths = _nf4(words, s0, s2, DTYPE, UPCAST)
    else:
        eighths = _int4(words, s0, s1, s2, s3, DTYPE, UPCAST)
    return eighths
