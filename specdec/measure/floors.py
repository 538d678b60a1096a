"""Lower bounds on times of the named shapes on an H200: the slower of reading what must be read and of multiplying.

ranks: H200s that share the target; each has all of the draft. What they tell each other takes no time here.
"""

from specdec.measure.shapes import DRAFT_VOCAB, SHAPES

COPY_BYTES_PER_MS = 4.24e9  # of an H200, read and written bytes counted
FLOPS_PER_MS = 0.79e12  # dense bf16 products of an H200, as measured for 2048 rows


def target_weights(shape: str) -> int:
    """Parameters of the products of a forward: layers and output head."""
    h, inter, layers, vocab, attention = _sizes(shape)
    return layers * (attention + 3 * h * inter) + vocab * h


def round_floor_ms(shape: str, steps: int, ranks: int = 1) -> float:
    """Bytes that must be read, over the copy rate: the target's weights once and the head's once a pass."""
    h, inter, _, _, attention = _sizes(shape)
    head = 2 * attention - h * h + 3 * h * inter + DRAFT_VOCAB[shape] * h  # q, k, v see two widths
    features = 3 * h * h if steps else 0
    return round(
        2 * (target_weights(shape) / ranks + steps * head + features) / COPY_BYTES_PER_MS, 3
    )  # S-1 drafts, an extend


def token_floor_ms(shape: str, steps: int, width: int, batch: int, context: float, tau: float, ranks: int = 1) -> float:
    """ms a token of the slower of reading, weights and the KV of the mean context, and multiplying `width` rows."""
    reading = round_floor_ms(shape, steps, ranks) + batch * context * kv_bytes(shape) / ranks / COPY_BYTES_PER_MS
    products = 2 * target_weights(shape) / ranks * batch * width / FLOPS_PER_MS
    return round(max(reading, products) / tau, 4)


def first_floor_ms(shape: str, batch: int, tokens: int, ranks: int = 1) -> float:
    """ms to the first token of the slower of reading the weights once and multiplying, attention too."""
    layers, num_heads, _, head_dim = attention_sizes(shape)
    attention = 2 * layers * num_heads * head_dim * tokens**2  # q·k and p·v of the causal half
    products = 2 * target_weights(shape) * tokens
    reading = 2 * target_weights(shape) / COPY_BYTES_PER_MS
    return round(max(reading, batch * (products + attention) / FLOPS_PER_MS) / ranks, 3)


def kv_bytes(shape: str) -> int:
    """Bytes of one token in bfloat16: keys and values of the target's layers and of one draft layer."""
    layers, _, num_kv_heads, head_dim = attention_sizes(shape)
    return 2 * 2 * (layers + 1) * num_kv_heads * head_dim


def attention_sizes(shape: str) -> tuple[int, int, int, int]:
    """Layers, heads, KV heads and the width of a head."""
    c = SHAPES[shape]
    heads = c["num_attention_heads"]
    return c["num_hidden_layers"], heads, c["num_key_value_heads"], c["hidden_size"] // heads


def _sizes(shape: str) -> tuple[int, ...]:
    """Hidden and intermediate size, layers, vocabulary, and weights of one attention layer."""
    c = SHAPES[shape]
    h, inter, layers, vocab = (c[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    head_dim = h // c["num_attention_heads"]
    return h, inter, layers, vocab, 2 * h * h + 2 * h * c["num_key_value_heads"] * head_dim
