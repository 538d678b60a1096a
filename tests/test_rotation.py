"""Rotations of q and k that traced graphs leave to attention: which are recognised, and that results stay."""

from dataclasses import dataclass

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as by_halves
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from specdec.backends.base import NormedRope
from specdec.backends.op import attention, attention_scope
from specdec.backends.rope import prepare, rope_table, rotate
from specdec.graphs.compile.trace import trace
from specdec.reach.targets.compiling.norms import take_over_norms
from specdec.reach.targets.compiling.rotation import hand_over_norms, hand_over_rotations

DIM = 16


def partial(q, k, cos, sin):
    """Rotate the first 8 dims, as in Phi, StableLM and GPT-NeoX."""
    rotated = half_split(q[..., :8], k[..., :8], cos[..., :8], sin[..., :8])
    return (torch.cat([r, x[..., 8:]], -1) for r, x in zip(rotated, (q, k), strict=True))


def gpt_oss(q, k, cos, sin):
    return by_halves(q, k, cos[..., : DIM // 2], sin[..., : DIM // 2])


def queries_only(q, k, cos, sin):
    return half_split(q, k, cos, sin)[0], k


def other_tables_for_keys(q, k, cos, sin):
    return half_split(q, k, cos, sin)[0], half_split(q, k, cos * 2, sin)[1]


def other_halves(q, k, cos, sin):
    """Like a rotation, but with a wrong sign."""
    return (x * cos.unsqueeze(1) + torch.cat([x[..., 8:], x[..., :8]], -1) * sin.unsqueeze(1) for x in (q, k))


def in_fp32(q, k, cos, sin):
    return (x.to(q.dtype) for x in half_split(q, k, cos.float(), sin.float()))


@dataclass
class Recorder:
    """Answers attention calls with the rotated q and k side by side; records whether it got tables."""

    handed_over: bool | None = None

    def attend(self, q, k, v, layer_id, rope):
        self.handed_over = rope is not None
        if rope is not None:
            assert rope.cos.shape[0] == q.shape[0]
            q, k = rotate(q, rope), rotate(k, rope)
        return torch.cat([q, k, v], 1)


def attend(positions, x, rotation):
    q, k, v = (part.view(1, -1, 2, DIM).transpose(1, 2) for part in x.chunk(3, -1))
    cos, sin = (t.unsqueeze(0) for t in rope_table(positions, DIM, 1e4, x.dtype))
    q, k = rotation(q, k, cos, sin)
    return attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rotation", "is_recognised"),
    [
        (half_split, True),
        (partial, True),
        (gpt_oss, True),
        (queries_only, False),
        (other_tables_for_keys, False),
        (other_halves, False),
        (interleaved, False),
        (in_fp32, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_half_split_rotation_is_handed_over_and_no_other(rotation, is_recognised, dtype):
    inputs = (torch.arange(5), torch.randn(5, 6 * DIM, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    counts = []

    def rewrite(graph):
        counts.append(hand_over_rotations(graph, torch.ops.specdec.attn.default))

    def run(positions, x):
        return (attend(positions, x, rotation),)

    traced = trace(run, inputs, (torch.ops.specdec.attn.default,), "eager", rewrite=rewrite)
    live, ours = Recorder(), Recorder()
    with attention_scope(live):
        expected = run(*inputs)[0][:, :4]
    with attention_scope(ours):
        got = traced(*inputs)[0][:, :4]
    assert (counts, live.handed_over, ours.handed_over) == ([int(is_recognised)], False, is_recognised)
    assert torch.equal(got, expected)


@dataclass
class Prepared:
    """Answers attention calls with q and k as a backend prepares them; records whether it got norms."""

    has_norms: bool | None = None

    def attend(self, q, k, v, layer_id, rope):
        self.has_norms = isinstance(rope, NormedRope)
        q, k = (q, k) if rope is None else prepare(q, k, rope)
        return torch.cat([q, k, v], 1)


@pytest.mark.parametrize(
    ("norms", "is_recognised"),
    [
        ((Qwen3RMSNorm(DIM), Qwen3RMSNorm(DIM)), True),
        ((Gemma3RMSNorm(DIM), Gemma3RMSNorm(DIM)), True),
        ((Qwen3RMSNorm(DIM), Qwen3RMSNorm(DIM, eps=1e-3)), False),
        ((Qwen3RMSNorm(DIM), torch.nn.Identity()), False),
    ],
    ids=["Qwen3", "Gemma3", "of other settings", "of queries only"],
)
def test_norms_of_heads_are_handed_over_with_their_rotation(norms, is_recognised):
    generator, op = torch.Generator().manual_seed(0), torch.ops.specdec.attn.default
    for norm in norms:
        for weight in norm.parameters():
            weight.data = torch.randn(DIM, generator=generator)
    inputs, counts = (torch.arange(5), torch.randn(5, 6 * DIM, generator=generator)), []

    def normed(q, k, cos, sin):
        return half_split(norms[0](q.transpose(1, 2)).transpose(1, 2), norms[1](k), cos, sin)

    def rewrite(graph):
        hand_over_rotations(graph, op)
        take_over_norms(graph)
        counts.append(hand_over_norms(graph, op))

    def run(positions, x):
        return (attend(positions, x, normed),)

    with torch.no_grad():
        traced = trace(run, inputs, (op,), "eager", rewrite=rewrite, module=torch.nn.ModuleList(norms))
        live, ours = Prepared(), Prepared()
        with attention_scope(live):
            expected = run(*inputs)[0]
        with attention_scope(ours):
            got = traced(*inputs)[0]
    assert (counts, live.has_norms, ours.has_norms) == ([int(is_recognised)], False, is_recognised)
    torch.testing.assert_close(got, expected)
