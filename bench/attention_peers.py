"""Peers of our kernels in bench/attention_kernels.py: SDPA, FlexAttention and FlashInfer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_cases import DEVICE, DTYPE, Case, replay_ms

PEERS = ("sdpa", "flex", "flashinfer")


def peers(case: Case, wanted_peers: Sequence[str]) -> dict[str, Any]:
    """ms of the other implementations on the same cell; what fails says why."""
    path, context, batch = case.path, case.context, case.batch
    wanted: dict[str, Callable[[Case], float]] = {}
    if "sdpa" in wanted_peers and (path != "prefill" or batch * context <= 8 * 8192):
        wanted["sdpa"] = sdpa_ms
    if "flex" in wanted_peers and path in ("decode", "verify8") and batch in (1, 32) and context in (2048, 8192):
        wanted["flex"] = flex_ms
    if "flashinfer" in wanted_peers and not path.startswith("draft"):
        wanted["flashinfer"] = flashinfer_ms
    found: dict[str, Any] = {}
    for name, run in wanted.items():
        try:
            found[f"{name}_ms"] = round(run(case), 5)
        except Exception as error:  # a peer that cannot run a cell is a fact to report, not a reason to stop
            found[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def _dense(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [batch, Hkv, context, dim] of every layer, contiguous."""
    slots = case.tables[:, : case.context].reshape(-1)

    def one(cache: torch.Tensor) -> torch.Tensor:
        return cache[slots].view(case.batch, case.context, *cache.shape[1:]).transpose(1, 2).contiguous()

    return [(one(k), one(v)) for k, v in zip(case.pool.k, case.pool.v, strict=True)]


def sdpa_ms(case: Case) -> float:
    """The heads of a KV group as further queries under a mask (a decode needs none); flash-attention for prefill."""
    s, dense = case.layer, _dense(case)
    q = case.q.view(case.batch, case.q_len, s.num_heads, -1).transpose(1, 2)
    group = s.num_heads // s.num_kv_heads
    options: dict[str, Any] = {"scale": s.scaling}
    if case.path == "prefill" and case.prefix == 0:
        options.update(is_causal=True, enable_gqa=True)
    else:
        q = q.reshape(case.batch, s.num_kv_heads, group * case.q_len, s.qk_dim).contiguous()
        if case.path != "decode":
            options["attn_mask"] = case.visible().repeat(group, 1)[None, None].expand(case.batch, 1, -1, -1)

    def layers() -> None:
        for k, v in dense:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return replay_ms(layers) / case.num_layers


def flex_ms(case: Case) -> float:
    """FlexAttention, compiled for this very shape, with the block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dense, visible = _dense(case), case.visible()
    q = case.q.view(case.batch, case.q_len, case.layer.num_heads, -1).transpose(1, 2).contiguous()
    mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, case.q_len, case.context, device=DEVICE, _compile=False
    )
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def layers() -> None:
        for k, v in dense:
            compiled(q, k, v, block_mask=mask, scale=case.layer.scaling, enable_gqa=True)

    return replay_ms(layers) / case.num_layers


def flashinfer_ms(case: Case) -> float:
    """Paged K/V in pages of 16; tensor-core decode, fa2 with a packed custom mask for trees, causal prefill."""
    import flashinfer

    s = case.layer
    num_pages = -(-case.context // case.page)
    indices = (case.tables[:, :: case.page][:, :num_pages] // case.page).to(torch.int32).reshape(-1).contiguous()
    kv_indptr = torch.arange(0, (case.batch + 1) * num_pages, num_pages, dtype=torch.int32, device=DEVICE)
    last = torch.full((case.batch,), (case.context - 1) % case.page + 1, dtype=torch.int32, device=DEVICE)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    if case.path == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            kv_indptr, indices, last, s.num_heads, s.num_kv_heads, s.qk_dim, case.page,
            q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=s.scaling,
        )  # fmt: skip
    else:
        backend = "fa2" if case.bits() is not None else "auto"
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        qo_indptr = torch.arange(0, (case.batch + 1) * case.q_len, case.q_len, dtype=torch.int32, device=DEVICE)
        mask = {"causal": True}
        if case.bits() is not None:
            mask = {"custom_mask": case.visible().repeat(case.batch, 1).reshape(-1)}
        wrapper.plan(
            qo_indptr, kv_indptr, indices, last, s.num_heads, s.num_kv_heads, s.qk_dim, case.page,
            q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=s.scaling, **mask,
        )  # fmt: skip
    caches = [
        tuple(c.view(-1, case.page, s.num_kv_heads, s.qk_dim) for c in kv)
        for kv in zip(case.pool.k, case.pool.v, strict=True)
    ]
    out = torch.empty_like(case.q)

    def layers() -> None:
        for cache in caches:
            wrapper.run(case.q, cache, out=out)

    return replay_ms(layers) / case.num_layers
