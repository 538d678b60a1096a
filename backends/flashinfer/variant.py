"""The attention variant that FlashInfer's FA2 kernels are compiled with for trees, and for layers with sinks.

FlashInfer's custom mask has a byte per query and key, read at every tile. Here a key before the tail is visible unless
it is outside the window, which is computed in registers; a tail key is visible if its bit is set in the query's
ancestor bits (`AttentionMetadata.ancestor_bits`). Sinks join the softmax denominator once, with a request's first
chunk.
"""

import hashlib
from typing import NamedTuple

# In the order of the kernel's arguments, after those of every FlashInfer kernel.
TENSORS = {"maybe_ancestor_bits": "int64_t", "maybe_tail_positions": "int64_t", "maybe_sinks": "{sink}"}
SCALARS = {"sm_scale": "double", "softcap": "double", "tail_len": "int64_t", "window": "int64_t"}

# Masks are evaluated for every query and key of a tile, so they branch only on compile-time constants, and data of a
# query is loaded from an address that does not depend on the key, so that the compiler reuses the load.
_TEXT = r"""
template <bool CAPPED, bool WINDOWED>
struct SpecdecAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t qo_len, kv_len, window_left, tail_start;
  float sm_scale_log2, pre_tanh_scale;

  template <typename Params>
  __device__ __host__ SpecdecAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    // The kernel begins this many keys before a tile's first row; positions are compared with the window below.
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    tail_start = kv_len - static_cast<uint32_t>(params.tail_len);
    sm_scale_log2 = params.sm_scale * math::log2e;
    if constexpr (CAPPED) {
      pre_tanh_scale = params.sm_scale / params.softcap;
      sm_scale_log2 = params.softcap * math::log2e;
    }
  }

  template <typename Params>
  __device__ __forceinline__ int32_t position(const Params& params, uint32_t batch_idx, uint32_t kv_idx) {
    if (kv_idx < tail_start || params.maybe_tail_positions == nullptr) return kv_idx;
    return __ldg(params.maybe_tail_positions + batch_idx * params.tail_len + (kv_idx - tail_start));
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (CAPPED) {
      return float(math::tanh(logits * pre_tanh_scale));
    } else {
      return logits;
    }
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
@VISIBLE@    if constexpr (WINDOWED) {
      const int32_t own = position(params, batch_idx, kv_len - qo_len + query);
      is_visible &= position(params, batch_idx, min(kv_idx, kv_len - 1)) + static_cast<int32_t>(params.window) > own;
    }
    return is_visible;
  })

  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    scale = 1.f;
    if (params.maybe_sinks == nullptr || kv_tile_idx > 0 || qo_head_idx >= params.num_qo_heads) return;
    const float sink = float(params.maybe_sinks[qo_head_idx]) * math::log2e;
    const float larger = max(float(m), sink);
    scale = math::ptx_exp2(m - larger);
    d = d * scale + math::ptx_exp2(sink - larger);
    m = larger;
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return m != -math::inf ? output * scale * math::ptx_rcp(d) : 0.f;
  })
};
"""

# Visible nodes with one word of ancestor bits per query, in two registers,
_ONE_WORD = r"""    const uint32_t query = min(qo_idx, qo_len - 1);
    uint2 bits = make_uint2(0xffffffffu, 0xffffffffu);
    if (params.maybe_ancestor_bits != nullptr) {
      bits = __ldg(reinterpret_cast<const uint2*>(params.maybe_ancestor_bits) + batch_idx * qo_len + query);
    }
    const uint32_t node = kv_idx - tail_start;  // of keys before the tail: beyond any node, by wrapping around
    bool is_visible = node >= 64 || (((node & 32 ? bits.y : bits.x) >> (node & 31)) & 1);
"""
# and with several words, of which a key reads the half word with its bit. A tail has no more nodes than bits.
_WORDS = r"""    const uint32_t query = min(qo_idx, qo_len - 1), node = kv_idx - tail_start;
    bool is_visible = true;
    if (params.maybe_ancestor_bits != nullptr && node < static_cast<uint32_t>(params.tail_len)) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(params.maybe_ancestor_bits);
      const uint32_t half = (batch_idx * qo_len + query) * 2 * static_cast<uint32_t>(params.num_words) + (node >> 5);
      is_visible = (__ldg(words + half) >> (node & 31)) & 1;
    }
"""
SOURCE = _TEXT.replace("@VISIBLE@", _ONE_WORD)
WIDE_SOURCE = _TEXT.replace("@VISIBLE@", _WORDS)


class Variant(NamedTuple):
    """Arguments of `gen_customize_batch_prefill_module`: a name that changes with the source, parameters, text."""

    name: str
    tensors: dict[str, str]
    scalars: dict[str, str]
    struct: str
    source: str


def variant(c_type: str, head_dim: int, is_capped: bool, has_window: bool, is_wide: bool = False) -> Variant:
    """Return the variant for a C type of sinks, such as "half", a head dim, and layers with or without softcap, window.

    is_wide: for trees of more than 64 nodes.
    """
    tensors = {name: kind.format(sink=c_type) for name, kind in TENSORS.items()}
    source, scalars = (WIDE_SOURCE, {**SCALARS, "num_words": "int64_t"}) if is_wide else (SOURCE, SCALARS)
    version = hashlib.sha256(repr((source, tensors, scalars)).encode()).hexdigest()[:12]
    flags = "_capped" * is_capped + "_window" * has_window
    struct = f"SpecdecAttention<{str(is_capped).lower()}, {str(has_window).lower()}>"
    return Variant(f"specdec_attention_{version}_{c_type}_{head_dim}{flags}", tensors, scalars, struct, source)
