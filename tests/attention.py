"""`pytest --attention NAME` runs the tests of engines, rounds and prefills on that attention backend.

FlashInfer has no fp32. Its run casts q, K and V of fp32 models to fp16 around attention; everything else stays as it
is, and tolerances are wider. A test that the backend cannot run is skipped with the reason.
"""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.backends import BACKENDS, AttentionCall, unmet_needs
from specdec.backends.flashinfer import kernels
from specdec.reach.assembly import assemble

TOLERANCE_16 = 2e-2


def force(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "auto" pick the backend `name` while a test of `module` runs."""
    backend = BACKENDS[name]()
    if "flashinfer" in name:
        backend = in_16_bits(backend)
        if hasattr(module, "TOLERANCE") and isinstance(module.TOLERANCE, float):
            monkeypatch.setattr(module, "TOLERANCE", TOLERANCE_16)

    def pick(asked: str, layers: Any, dtype: Any, device: torch.device) -> Any:
        if asked != "auto":
            return original(asked, layers, dtype, device)
        unusable = backend.unusable_on(device)
        reasons = [unusable] if unusable else unmet_needs(backend.capabilities, layers, dtype)
        if reasons:
            pytest.skip(f"{name}: {reasons[0]}")
        return backend, f"auto: {name}, forced by the tests"

    original = assemble.pick_backend
    monkeypatch.setattr(assemble, "pick_backend", pick)


def in_16_bits(backend: Any) -> Any:
    """Return a subclass of `backend` that also takes fp32 models."""

    class In16Bits(backend):
        capabilities = replace(backend.capabilities, dtypes=backend.capabilities.dtypes | {torch.float32})
        min_prefill_flops = 0.0

        def prepare_for(self, layers, dtype, device, mask_words=1):
            dtype = torch.float16 if dtype is torch.float32 else dtype
            if kernels.unbuilt(kernels.kernels_for(layers, dtype, device, mask_words)):
                pytest.skip("FlashInfer's kernels for this model are not compiled")
            super().prepare_for(layers, dtype, device, mask_words)

        def _attend(self, call: AttentionCall) -> None:
            if call.q.dtype is not torch.float32:
                return super()._attend(call)
            pool = SimpleNamespace(
                k={call.layer_id: call.pool.k[call.layer_id].half()},
                v={call.layer_id: call.pool.v[call.layer_id].half()},
            )
            out = torch.empty_like(call.out, dtype=torch.float16)
            sinks = None if call.sinks is None else call.sinks.half()
            super()._attend(call._replace(q=call.q.half(), out=out, pool=pool, sinks=sinks))
            call.out.copy_(out)

    return In16Bits
