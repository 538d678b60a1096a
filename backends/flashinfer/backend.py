"""The two backends that use FlashInfer: for all paths, or only for prefills that it runs faster than Triton.

Both use Triton to store K and V, for placement and for the round's other operations.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.backends.attention_check import attention_checks
from specdec.backends.base import AttentionCall, LayerSpec
from specdec.backends.flashinfer.kernels import (
    HEAD_DIMS,
    Kernel,
    build,
    has_fa3,
    import_problem,
    kernel_for,
    kernels_for,
    load,
    prefill_family,
    unbuilt,
    uniform_family,
    version_problem,
)
from specdec.backends.flashinfer.prefill import PrefillAttention
from specdec.backends.flashinfer.uniform import UniformAttention
from specdec.backends.sample_tree import Tail
from specdec.backends.triton.backend import TritonBackend
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.errors import AttachError

FA3_GAINS = frozenset({128, 256})  # head dims
_DTYPES = frozenset({torch.bfloat16, torch.float16})
# FLOPs of a layer's attention from which FA3 is faster than Triton's kernel: 2,000 new tokens of an 8B model. Each of
# its blocks runs a whole tile of one head over all keys, so fewer tokens leave multiprocessors idle. With heads of 64
# it gains a tenth, which its costlier launches offset.
MIN_PREFILL_FLOPS = 3e10


class FlashInferBackend(TritonBackend):
    """Every path on FlashInfer's kernels; its tables are written inside our graphs, see `tables`."""

    name = "flashinfer"
    rehearses = False  # attention reads tables that kernels write
    capabilities = replace(
        TritonBackend.capabilities,
        packed_prefill=False,
        limits=False,
        v_dim_differs=False,
        max_latent_dim=0,
        dtypes=_DTYPES,
        head_dims=HEAD_DIMS,
        max_head_dim=max(HEAD_DIMS),
    )

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        return _device_problem(device) or import_problem()

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, mask_words: int = 1
    ) -> None:
        """Build, load and check the kernels; AttachError names results that differ from the torch backend's."""
        kernels = kernels_for(layers, dtype, device, mask_words)
        build(kernels)
        modules = load(kernels)
        self._prefill_families = sorted({prefill_family(s, device) for s in layers})
        self._uniform_families = sorted({uniform_family(s, words) for s in layers for words in {0, mask_words}})
        self._uniform, self._prefill = UniformAttention(modules, device), PrefillAttention(modules, device)
        _require_equal(self, layers, dtype, device, [Tail(6, words) for words in {0, mask_words}])

    def served_by(self, mode: ForwardMode) -> str:
        families = self._prefill_families if mode is ForwardMode.EXTEND else self._uniform_families
        return f"flashinfer {'+'.join(families)}"

    def _prepare(self, metadata: AttentionMetadata) -> None:
        if metadata.slot_table.numel() >= 1 << 31:
            raise ValueError(
                f"the slot table has {metadata.slot_table.numel()} entries: FlashInfer counts them in 32 bits; "
                "attach with a lower max_batch or max_seq_len"
            )
        self._uniform.begin()
        self._prefill.begin()

    def _attend(self, call: AttentionCall) -> None:
        m = self.planned
        own = self._prefill if m.mode is ForwardMode.EXTEND else self._uniform
        own.attend(m, call)


class MixedBackend(TritonBackend):
    """Triton, except for the attention of long prefills, which FlashInfer's Hopper kernel runs faster."""

    name = "triton+flashinfer"
    min_prefill_flops = MIN_PREFILL_FLOPS

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        problem = _device_problem(device)  # FlashInfer takes seconds to import, so only `prepare_for` imports it
        if problem is None and not has_fa3(device):
            problem = f"its prefill kernel is for compute capability 9.0, not for {torch.cuda.get_device_name(device)}"
        return problem

    @classmethod
    def not_ready(cls, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> str | None:
        kernels = _fa3_kernels(layers, dtype)
        if not kernels:
            return "no layer of this model is one that FlashInfer's prefill kernel would run faster"
        try:
            missing = unbuilt(kernels)
            if not missing:
                cls().prepare_for(layers, dtype, device)
                return None
        except Exception as error:  # problems of an optional library must not prevent attaching
            return f"FlashInfer is installed, but: {type(error).__name__}: {error}"
        begin = _from_tokens([s for s in layers if _fits_fa3(s, dtype)])
        return (
            f"long prefills ({begin}) would run on FlashInfer if its kernels were compiled "
            f"({', '.join(map(str, missing))}): do it once with `specdec backends build MODEL`"
        )

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, mask_words: int = 1
    ) -> None:
        """Build and load the prefill kernel, and check it; AttachError if its results are wrong."""
        taken = [s for s in layers if _fits_fa3(s, dtype)]
        kernels = _fa3_kernels(taken, dtype)
        if kernels:
            problem = import_problem()
            if problem is not None:
                raise AttachError("with FlashInfer", [problem])
            build(kernels)
        self._prefill = PrefillAttention(load(kernels), device)
        self._from = _from_tokens(taken) if taken else None
        self.min_prefill_flops = 0.0  # for the check, which is short
        _require_equal(self, taken, dtype, device, [])
        self.min_prefill_flops = type(self).min_prefill_flops

    def served_by(self, mode: ForwardMode) -> str:
        if mode is not ForwardMode.EXTEND or self._from is None:
            return "triton"
        return f"flashinfer fa3 {self._from}, triton below"

    def _prepare(self, metadata: AttentionMetadata) -> None:
        super()._prepare(metadata)
        self._prefill.begin()

    def _attend(self, call: AttentionCall) -> None:
        m = self.planned
        if m.mode is ForwardMode.EXTEND and self._takes(m, call.layer, call.q.dtype):
            self._prefill.attend(m, call)
        else:
            super()._attend(call)

    def _takes(self, m: AttentionMetadata, layer: LayerSpec, dtype: torch.dtype) -> bool:
        if m.is_packed or m.limits is not None or not _fits_fa3(layer, dtype):
            return False
        return prefill_flops(m, layer) >= self.min_prefill_flops


def _require_equal(
    backend: TritonBackend, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, tails: list[Tail]
) -> None:
    problems = [p for check in attention_checks(backend, layers, dtype, device, tails) for p in check.problems()]
    if problems:
        raise AttachError(f"with the installed FlashInfer: it is not what {backend.name!r} expects", problems)


def _device_problem(device: torch.device) -> str | None:
    """Return why FlashInfer cannot be used on `device`, without importing it."""
    problem = version_problem()
    if problem is not None:
        return problem
    if device.type != "cuda":
        return f"it needs CUDA, the model is on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return None


def prefill_flops(m: AttentionMetadata, layer: LayerSpec) -> float:
    """Return the FLOPs of one layer's attention in a prefill, over visible keys."""
    assert m.starts is not None and m.q_lens is not None, "a prefill knows its lengths on the host"
    window = layer.window or m.slot_table.shape[1]
    pairs = sum(n * min(start + n / 2, window) for start, n in zip(m.starts, m.q_lens, strict=True))
    return 2 * layer.num_heads * (layer.qk_dim + layer.v_dim) * pairs


def _from_tokens(layers: Sequence[LayerSpec]) -> str:
    """Describe from how many tokens of one new prompt on FA3 runs a layer."""
    widest = max(layers, key=lambda s: s.num_heads * s.qk_dim)
    tokens = (MIN_PREFILL_FLOPS / (widest.num_heads * (widest.qk_dim + widest.v_dim))) ** 0.5
    return f"from about {round(tokens, -2):.0f} tokens on"


def _fits_fa3(layer: LayerSpec, dtype: torch.dtype) -> bool:
    """Return whether FlashInfer's Hopper kernel supports a layer's prefills, and is faster for long ones."""
    is_plain = not layer.has_sinks and layer.v_dim == layer.qk_dim
    return dtype in _DTYPES and layer.qk_dim in FA3_GAINS and is_plain


def _fa3_kernels(layers: Sequence[LayerSpec], dtype: torch.dtype) -> list[Kernel]:
    return list(dict.fromkeys(kernel_for("fa3", s, dtype) for s in layers if _fits_fa3(s, dtype)))
