"""Logits processors for every node of a tree, in five launches. Twin: `specdec.core.functional.processors.process`.

One launch writes the tokens before each node, the nearest first; one counts the tokens of the history; one applies the
penalties over the vocabulary; one program per node then applies the rules for single tokens (draft tokens on its path,
biases, bans, bad words), and the last finds n-grams in the history. Programs of rows without such settings exit early.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2

_PROMPT = tl.constexpr(1 << 30)  # bit of a count: the token is in the prompt. Lower bits: how often it was emitted


@triton.jit
def _penalties(penalties, row):
    """Return the repetition, frequency and presence penalties of a row, and whether any is on."""
    own = penalties + 3 * row
    repetition, frequency, presence = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    return repetition, frequency, presence, (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)


@triton.jit
def _penalised(x, count, num_drafted, repetition, frequency, presence):
    """Return penalised logits x of tokens with `count` (see `_count_kernel`), num_drafted times on the node's path."""
    num_emitted = (count & (_PROMPT - 1)) + num_drafted
    x = tl.where((count != 0) | (num_drafted > 0), tl.where(x < 0, x * repetition, x / repetition), x)
    return x - frequency * num_emitted - tl.where(num_emitted > 0, presence, 0.0)


@triton.jit
def _path(ancestor_bits, node_at, n, D: tl.constexpr):
    """Return whether nodes n are on the path to `node_at`, itself included; the root belongs to the history."""
    words: tl.constexpr = (D + 63) // 64
    bits = tl.load(ancestor_bits + node_at * words + n // 64, mask=n < D, other=0)
    return (((bits >> (n % 64)) & 1) != 0) & (n > 0) & (n < D)


@triton.jit(do_not_specialize=["width"])
def _suffix_kernel(
    tree_tokens,
    depths,
    ancestor_bits,
    rows,
    num_context,
    history,
    suffix,
    width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)  # request * D + node
    request = at // D
    row = tl.load(rows + request)
    n = tl.arange(0, BLOCK_D)
    is_path = _path(ancestor_bits, at, n, D)
    depth = tl.load(depths + at)
    back = depth - tl.load(depths + request * D + n, mask=is_path, other=0)  # how far up each ancestor is
    token = tl.load(tree_tokens + request * D + n, mask=is_path, other=0)
    tl.store(suffix + at * M + back, token, mask=is_path & (back < M))
    k = tl.arange(0, BLOCK_M)
    position = tl.load(num_context + request) - 1 - (k - depth)
    is_old = (k >= depth) & (k < M)
    place = tl.minimum(tl.maximum(position, 0), width - 1)
    old = tl.load(history + row * width + place, mask=is_old, other=-2).to(tl.int64)
    tl.store(suffix + at * M + k, tl.where(position >= 0, old, -2), mask=is_old)


@triton.jit
def _num_drafted(token, own_tokens, own_parents, node, depth):
    """Return how often each of `token` is on the path of `node`, itself included; the root belongs to the history."""
    times = tl.zeros_like(token)
    for _ in range(0, depth):
        times += (token == tl.load(own_tokens + node)).to(tl.int64)
        node = tl.load(own_parents + node)
    return times


@triton.jit(do_not_specialize=["vocab", "width"])
def _count_kernel(rows, num_context, prompt_lens, penalties, history, counts, vocab, width, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    row, context = tl.load(rows + request), tl.load(num_context + request)
    begin = tl.program_id(1).to(tl.int64) * BLOCK
    if not _penalties(penalties, row)[3] or begin >= context:
        return
    position = begin + tl.arange(0, BLOCK)
    is_text = (position < context) & (position < width)
    is_prompt = position < tl.load(prompt_lens + row)
    own = counts + request * vocab + tl.load(history + row * width + position, mask=is_text, other=0)
    tl.atomic_or(own, _PROMPT, mask=is_text & is_prompt)
    tl.atomic_add(own, 1, mask=is_text & ~is_prompt)


@triton.jit(do_not_specialize=["vocab"])
def _penalty_kernel(logits, rows, penalties, counts, out, vocab, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    repetition, frequency, presence, is_on = _penalties(penalties, tl.load(rows + at // D))
    x = tl.load(logits + at * stride + v, mask=v < vocab, other=0.0).to(tl.float32)
    if is_on:
        count = tl.load(counts + at // D * vocab + v, mask=v < vocab, other=0)
        x = _penalised(x, count, 0, repetition, frequency, presence)
    tl.store(out + at * vocab + v, x, mask=v < vocab)


@triton.jit(do_not_specialize=["vocab", "most_entries", "most_words"])
def _tokens_kernel(
    logits,
    tree_tokens,
    parents,
    depths,
    ancestor_bits,
    rows,
    num_context,
    suffix,
    penalties,
    prompt_lens,
    num_entries,
    num_bad_words,
    tokens,
    biases,
    untils,
    bad_words,
    counts,
    out,
    vocab,
    stride,
    most_entries,
    most_words,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    request = at // D
    row = tl.load(rows + request)
    own_logits, own, own_counts = logits + at * stride, out + at * vocab, counts + request * vocab
    own_tokens, own_parents, depth = tree_tokens + request * D, parents + request * D, tl.load(depths + at)
    n = tl.arange(0, BLOCK_D)
    is_path = _path(ancestor_bits, at, n, D)
    draft = tl.load(own_tokens + n, mask=is_path, other=-1)
    repetition, frequency, presence, _ = _penalties(penalties, row)
    # From the logits, not from `out`: a token twice on the path, or seen before, is penalised once for repetition.
    on_path = tl.load(own_logits + draft, mask=is_path, other=0.0).to(tl.float32)
    counted = tl.load(own_counts + draft, mask=is_path, other=0)
    times = _num_drafted(draft, own_tokens, own_parents, at % D, depth)
    tl.store(own + draft, _penalised(on_path, counted, times, repetition, frequency, presence), mask=is_path)
    tl.debug_barrier()  # a rule may name a token of the path

    num_emitted = tl.load(num_context + request) + depth - tl.load(prompt_lens + row)
    count = tl.load(num_entries + row)
    for base in range(0, count, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        is_entry = e < count
        token = tl.load(tokens + row * most_entries + e, mask=is_entry, other=0).to(tl.int64)
        bias = tl.load(biases + row * most_entries + e, mask=is_entry, other=0.0)
        until = tl.load(untils + row * most_entries + e, mask=is_entry, other=0)
        x = tl.load(own_logits + token, mask=is_entry, other=0.0).to(tl.float32) + bias
        before = tl.load(own_counts + token, mask=is_entry, other=0)
        num_drafted = _num_drafted(token, own_tokens, own_parents, at % D, depth)
        x = _penalised(x, before, num_drafted, repetition, frequency, presence)
        tl.store(own + token, tl.where(num_emitted < until, float("-inf"), x), mask=is_entry)
    tl.debug_barrier()  # a banned word may end in a token with a rule of its own

    num_words = tl.load(num_bad_words + row)
    for base in range(0, num_words, BLOCK_Q):
        q = base + tl.arange(0, BLOCK_Q)
        is_word = q < num_words
        word = bad_words + (row * most_words + q) * (M + 1)
        for k in range(0, M):
            wanted = tl.load(word + 1 + k, mask=q < num_words, other=-1)
            is_word = is_word & ((wanted < 0) | (wanted == tl.load(suffix + at * M + k)))
        last = tl.load(word, mask=is_word, other=0).to(tl.int64)
        tl.store(own + last, float("-inf"), mask=is_word)


@triton.jit(do_not_specialize=["vocab", "width"])
def _ngram_kernel(
    tree_tokens,
    parents,
    depths,
    ancestor_bits,
    rows,
    num_context,
    suffix,
    ngram_sizes,
    history,
    out,
    vocab,
    width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    request = at // D
    row = tl.load(rows + request)
    size = tl.load(ngram_sizes + row)
    if size == 0:
        return
    own, context = out + at * vocab, tl.load(num_context + request)
    end = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # where an earlier n-gram may end
    own_history = history + row * width
    is_old = (end >= size - 1) & (end < context) & (end < width)
    for back in range(0, size - 1):
        wanted = tl.load(suffix + at * M + back)
        is_old = is_old & (tl.load(own_history + end - 1 - back, mask=is_old, other=-1) == wanted)
    tl.store(own + tl.load(own_history + end, mask=is_old, other=0).to(tl.int64), float("-inf"), mask=is_old)
    if tl.program_id(1) == 0:
        n = tl.arange(0, BLOCK_D)
        is_path = _path(ancestor_bits, at, n, D)
        num_before = context + tl.load(depths + request * D + n, mask=is_path, other=0) - 1
        is_path = is_path & (num_before >= size - 1)
        above = request * D + tl.load(parents + request * D + n, mask=is_path, other=0)
        for back in range(0, size - 1):
            wanted = tl.load(suffix + at * M + back)
            is_path = is_path & (tl.load(suffix + above * M + back, mask=is_path, other=-1) == wanted)
        draft = tl.load(tree_tokens + request * D + n, mask=is_path, other=0)
        tl.store(own + draft, float("-inf"), mask=is_path)


def process(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestor_bits: torch.Tensor,
    rows: torch.Tensor,
    num_context: torch.Tensor,
    state: Any,
) -> torch.Tensor:
    """Return processed logits [bs, D, V] float32, of logits [bs, D, V] (last dim dense), a tree's fields [bs, D] int64
    (bits [bs, D, W]), rows and num_context [bs] int64. state: a
    `specdec.core.functional.processors.ProcessorState`."""
    (bs, num_nodes, vocab), device = logits.shape, logits.device
    flat = logits.reshape(bs * num_nodes, vocab)
    assert flat.stride(1) == 1, "logits need a dense last dim"
    tokens, parents, depths, bits = (t.contiguous() for t in (tokens, parents, depths, ancestor_bits))
    rows, num_context = rows.contiguous(), num_context.contiguous()
    width, most_back = state.history.shape[1], state.bad_words.shape[2] - 1
    suffix = torch.empty(bs, num_nodes, most_back, dtype=torch.int64, device=device)
    out = torch.empty(bs, num_nodes, vocab, dtype=torch.float32, device=device)
    shape = {"D": num_nodes, "BLOCK_D": next_power_of_2(num_nodes), "M": most_back}
    counts = torch.zeros(bs, vocab, dtype=torch.int32, device=device)
    num_programs, block = bs * num_nodes, min(4096, next_power_of_2(vocab))
    _suffix_kernel[(num_programs,)](
        tokens, depths, bits, rows, num_context, state.history, suffix, width, **shape,
        BLOCK_M=next_power_of_2(most_back), num_warps=1,
    )  # fmt: skip
    _count_kernel[(bs, cdiv(width, 1024))](
        rows, num_context, state.prompt_lens, state.penalties, state.history, counts, vocab, width, BLOCK=1024
    )
    _penalty_kernel[(num_programs, cdiv(vocab, block))](
        flat, rows, state.penalties, counts, out, vocab, flat.stride(0), D=num_nodes, BLOCK=block
    )
    _tokens_kernel[(num_programs,)](
        flat, tokens, parents, depths, bits, rows, num_context, suffix,
        state.penalties, state.prompt_lens, state.num_entries, state.num_bad_words,
        state.tokens, state.biases, state.untils, state.bad_words, counts, out,
        vocab, flat.stride(0), state.tokens.shape[1], state.bad_words.shape[1], **shape, BLOCK_E=64, BLOCK_Q=64,
    )  # fmt: skip
    block = 1024
    _ngram_kernel[(num_programs, cdiv(width, block))](
        tokens, parents, depths, bits, rows, num_context, suffix, state.ngram_sizes, state.history, out, vocab, width,
        **shape, BLOCK=block,
    )  # fmt: skip
    return out
