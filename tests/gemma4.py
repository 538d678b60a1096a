"""Tiny random Gemma 4 targets and assistants."""

from typing import Any

import torch
import transformers as tf

from tests.tiny_models import VOCAB, WINDOW, random_weights

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    sliding_window=WINDOW,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
OWN = dict(
    hidden_size=32,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
)
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16
)
KINDS = {  # text config, assistant config, whether the target's last layers share K/V of earlier ones
    "gemma4": (tf.Gemma4TextConfig, tf.Gemma4AssistantConfig, 2),
    "gemma4 without shared layers": (tf.Gemma4TextConfig, tf.Gemma4AssistantConfig, 0),
    "gemma4 with images": (tf.Gemma4TextConfig, tf.Gemma4AssistantConfig, 2),
    "gemma4_unified": (tf.Gemma4UnifiedTextConfig, tf.Gemma4UnifiedAssistantConfig, 0),
}


def pair(
    kind: str = "gemma4", has_centroids: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, Any]:
    """Return a target and an assistant with random weights; has_centroids: for the assistant's output head."""
    text, assistant, num_shared = KINDS[kind]
    own = {} if "unified" in kind else dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
    layers = dict(num_hidden_layers=6, num_kv_shared_layers=num_shared, tie_word_embeddings=False)  # to vary its text
    torch.manual_seed(seed)
    config = text(**SIZES, hidden_size=64, layer_types=["sliding_attention", "full_attention"] * 3, **layers, **own)
    made_of = config
    if kind == "gemma4 with images":
        made_of = tf.Gemma4Config(text_config=config.to_dict(), vision_config=VISION, tie_word_embeddings=False)
    target = random_weights(tf.AutoModelForCausalLM.from_config(made_of), seed)
    config = assistant(
        text_config={**SIZES, **OWN, "model_type": config.model_type},
        backbone_hidden_size=64,
        use_ordered_embeddings=has_centroids,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    )
    draft = random_weights(tf.AutoModelForCausalLM.from_config(config), seed + 1)
    if has_centroids:
        draft.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return target.to(dtype), draft.to(dtype)
