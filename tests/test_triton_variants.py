"""Which variants of its kernels Triton compiles: attach needs all of them, later requests no new one.

Triton compiles a variant for every type, constant, integer that is 1 or divisible by 16, and pointer that is aligned to
16 bytes. Here launches run in its interpreter, and the key that the compiler would look up is recorded;
tests/test_gpu.py counts real compilations.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch

import specdec
from tests.heads import random_head
from tests.tiny_models import VOCAB, tiny_model

pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles; tests/test_gpu.py counts")
# An odd number of rows of odd width, so that slot table rows and slices of packed lists have any alignment.
ATTACHED = {"backend": "triton", "max_batch": 5, "max_seq_len": 52, "cuda_graph": True, "prefill_graph": "breakable"}
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 4}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The variants that launches within the test need."""
    found: set[str] = set()
    run = InterpretedFunction.run

    def noting(kernel, *args, grid, warmup, **options):
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        found.add(f"{kernel.fn.__name__}({variant(kernel, named)})")
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    yield found


def variant(kernel, arguments):
    """Return the arguments of a launch as Triton's JITFunction specialises them."""
    parameters = inspect.signature(kernel.fn).parameters
    general = kernel.kwargs["do_not_specialize"] or ()
    unaligned = kernel.kwargs["do_not_specialize_on_alignment"] or ()
    parts = []
    for name, value in arguments.items():
        is_constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        if not is_constant:
            value = native_specialize_impl(CUDABackend, value, False, name not in general, name not in unaligned)
        parts.append(f"{name}={value}")
    return ", ".join(parts)


def test_products_with_experts_have_a_variant_a_tile(keys):
    from specdec.backends.triton.experts.products import grouped_linear

    weight = torch.randn(8, 16, 16)
    for num_tokens in (1, 3, 8, 9, 64, 65, 70):  # up to 64 rows, and sorted first
        ids = torch.rand(num_tokens, 8).topk(8).indices
        grouped_linear(torch.randn(num_tokens, 16), ids, weight, None, False)
    names = [key.partition("(")[0] for key in keys]
    assert sorted(names) == ["_grouped_linear_kernel"] * 2 + ["_route_kernel"]


def test_the_key_tells_alignment_and_ones(keys):
    from specdec.backends.triton.round.rows import gather_rows

    values, index = torch.zeros(3, 4, 8), torch.zeros(3, 2, dtype=torch.int64)
    gather_rows(values, index)
    gather_rows(values, index)
    assert len(keys) == 1
    gather_rows(torch.zeros(97)[1:].view(3, 4, 8), index)
    assert len(keys) == 2
    gather_rows(values[:, :1].contiguous(), index * 0)  # another stride
    assert len(keys) == 3


def test_live_traffic_needs_no_variant_that_attaching_did_not(keys):
    """Windows and softcap (Gemma-2); prefills that replay and that run eagerly, in batches of odd sizes, in chunks."""
    model = tiny_model("gemma2")
    engine = specdec.attach(
        model, random_head(model), **ATTACHED, **TREE,
        graph_batches=(2,), prefill_buckets=(1, 16), graph_sampling="greedy", max_prefill_tokens=16,
    )  # fmt: skip
    assert engine.config.table_width % 2 and any("_attention_kernel" in key for key in keys)
    attached = set(keys)
    generator = torch.Generator().manual_seed(0)
    for lens in ([12], [3, 1, 17]):
        prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lens]
        engine.generate(prompts, max_new_tokens=2)
    runner = engine.report().runners["target_prefill"]
    assert runner["replays"] and runner["eager"]
    assert engine.report().runners["round"]["eager"]
    assert sorted(keys - attached) == []
