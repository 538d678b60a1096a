"""Unpacks 4-bit weights in registers, for products: what a thread loads is what it multiplies, without a shuffle.

A word has element 16 * j + c of a block of 128 at bits 4 * j, for its column c of 16. So an operand of tensor cores,
16 features at a time, takes nibble j of the same words for each j in turn.
"""

import triton
import triton.language as tl


def _assembly(kind: str, magic: int, one: int) -> str:
    """Return what makes eight pairs of 16-bit weights of two words, and two words of scales for a quarter of them.

    A nibble becomes the end of the mantissa of a number whose last digit counts ones, 128 in bf16 and 1024 in fp16; the
    high half of a scale's word takes that and a zero point off again, exactly; the product with the low half is rounded
    once.
    """
    steps = ["prmt.b32 v0, $8, $9, 0x5410", "prmt.b32 v4, $8, $9, 0x7632"]
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


OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r" + 10 * ",r")
INT4_BF16, INT4_FP16 = tl.constexpr(_assembly("bf16", 0x4300, 0x3F80)), tl.constexpr(_assembly("f16", 0x6400, 0x3C00))
BF16, FP16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


@triton.jit
def _value(words, scales, DTYPE: tl.constexpr, J: tl.constexpr):
    """Return weights of nibble J of each word, as the assembly does."""
    MAGIC: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0  # noqa: SIM300
    scale = scales.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    offset = (scales >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return (((words >> (4 * J) & 15).to(tl.float32) + MAGIC + offset) * scale).to(DTYPE)


@triton.jit
def unpacked(words, s0, s1, s2, s3, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return weights [N, 128] of words [N, 16] and the scales [N, 1] of each 32 of them, all int32."""
    N: tl.constexpr = words.shape[0]
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
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).permute(0, 2, 3, 4, 1).reshape([N, 128])
