"""The two backends that use FlashInfer: all paths on it, or only the prefills that it runs faster than Triton.

Storing K and V, placement and the round's other operations are Triton's in both.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.backends.base import AttentionCall, LayerSpec
from specdec.backends.flashinfer.check import check_answers, check_tables
from specdec.backends.flashinfer.kernels import (
    HEAD_DIMS,
    Kernel,
    build,
    has_fa3,
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
from specdec.backends.triton.backend import TritonBackend
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.errors import AttachError

_DTYPES = frozenset({torch.bfloat16, torch.float16})
MIN_PREFILL_TOKENS = 1024  # of all prompts of a prefill; below, planning on the host costs what FA3 gains


class FlashInferBackend(TritonBackend):
    """Every path on FlashInfer's kernels; its tables are written inside our graphs, see `tables`."""

    name = "flashinfer"
    capabilities = replace(
        TritonBackend.capabilities,
        v_dim_differs=False,
        dtypes=_DTYPES,
        head_dims=HEAD_DIMS,
        max_head_dim=max(HEAD_DIMS),
    )

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        problem = version_problem()
        if problem is not None:
            return problem
        if device.type != "cuda":
            return f"it needs CUDA, the model is on {device.type}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"it needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
        return None

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, has_trees: bool = True
    ) -> None:
        """Build and load the kernels, and check them; AttachError names what differs from this package's knowledge."""
        kernels = kernels_for(layers, dtype, device, has_trees)
        build(kernels)
        modules = load(kernels)
        self._prefill_families = sorted({prefill_family(s, device) for s in layers})
        self._uniform_families = sorted({uniform_family(s, is_tree) for s in layers for is_tree in {False, has_trees}})
        self._uniform, self._prefill = UniformAttention(modules, device), PrefillAttention(modules, device)
        modes = ("chain", "tree", "prefill") if has_trees else ("chain", "prefill")
        problems = check_tables(modules, layers, device) or check_answers(self, layers, dtype, device, modes)
        if problems:
            raise AttachError("with the installed FlashInfer: it is not what backend='flashinfer' expects", problems)

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
    """Triton, but for the attention of long prefills, which FlashInfer's Hopper kernel runs faster."""

    name = "triton+flashinfer"
    min_prefill_tokens = MIN_PREFILL_TOKENS

    @classmethod
    def unusable_on(cls, device: torch.device) -> str | None:
        problem = FlashInferBackend.unusable_on(device)
        if problem is None and not has_fa3(device):
            problem = f"its prefill kernel is for compute capability 9.0, not for {torch.cuda.get_device_name(device)}"
        return problem

    @classmethod
    def not_ready(cls, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> str | None:
        kernels = _fa3_kernels(layers, dtype)
        if not kernels:
            return "no layer of this model is one that FlashInfer's prefill kernel runs"
        missing = unbuilt(kernels)
        if missing:
            return (
                f"prefills of {MIN_PREFILL_TOKENS} tokens and more would run on FlashInfer if its kernels were "
                f"compiled ({', '.join(map(str, missing))}): do it once with `specdec backends build MODEL`"
            )
        try:
            cls().prepare_for(layers, dtype, device)
        except AttachError as error:
            return str(error)
        return None

    def prepare_for(
        self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, has_trees: bool = True
    ) -> None:
        """Build and load the prefill kernel, and check it; AttachError if it is not what is expected."""
        kernels = _fa3_kernels(layers, dtype)
        build(kernels)
        self._modules = load(kernels)
        self._prefill = PrefillAttention(self._modules, device)
        self.min_prefill_tokens = 1
        taken = [s for s in layers if self._takes(s, dtype)]
        problems = check_answers(self, taken, dtype, device, ("prefill",))
        self.min_prefill_tokens = type(self).min_prefill_tokens
        if problems:
            raise AttachError("with the installed FlashInfer: its prefill kernel is not what is expected", problems)

    def served_by(self, mode: ForwardMode) -> str:
        if mode is not ForwardMode.EXTEND:
            return "triton"
        return f"flashinfer fa3 from {self.min_prefill_tokens} tokens on, triton below"

    def _prepare(self, metadata: AttentionMetadata) -> None:
        super()._prepare(metadata)
        self._prefill.begin()

    def _attend(self, call: AttentionCall) -> None:
        m = self.planned
        is_long = m.mode is ForwardMode.EXTEND and m.positions.shape[0] >= self.min_prefill_tokens
        if is_long and self._takes(call.layer, call.q.dtype):
            self._prefill.attend(m, call)
        else:
            super()._attend(call)

    def _takes(self, layer: LayerSpec, dtype: torch.dtype) -> bool:
        return kernel_for("fa3", layer, dtype) in self._modules and _fits_fa3(layer, dtype)


def _fits_fa3(layer: LayerSpec, dtype: torch.dtype) -> bool:
    """Whether FlashInfer's Hopper kernel runs a layer's prefills."""
    is_plain = not layer.has_sinks and layer.v_dim == layer.qk_dim
    return dtype in _DTYPES and layer.qk_dim in HEAD_DIMS and is_plain


def _fa3_kernels(layers: Sequence[LayerSpec], dtype: torch.dtype) -> list[Kernel]:
    return list(dict.fromkeys(kernel_for("fa3", s, dtype) for s in layers if _fits_fa3(s, dtype)))
