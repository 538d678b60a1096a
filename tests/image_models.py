"""Tiny random image-text models of transformers, and prompts with random images."""

import inspect
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from bench.admission import check_size, small
from tests.tiny_models import random_weights

IMAGE = 150  # the id of image placeholder tokens
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")  # images have a grid, tokens several positions
TILED = ("llava_next", "llava_onevision")
PLAIN = ("smolvlm", "idefics3", "llava", "internvl", "mistral3", "aya_vision", "gemma3", "lfm2_vl", "ovis2")
FAMILIES = (*GRIDS, *TILED, *PLAIN)
IDS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **{"video_token_id": 151, "audio_token_id": 154},
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"), 152),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index"), 153),
}
VISION: dict[str, Any] = {
    **{"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "patch_size": 8},
    **{"num_position_embeddings": 64, "num_patches": 16, "projection_dim": 64, "image_size": 32},
}
SECTIONS = {0.25: [1, 1, 0], 0.5: [1, 1, 2], 1.0: [2, 3, 3]}  # M-RoPE sections, by the rotated share of a head


def image_model(kind: str) -> tf.PreTrainedModel:
    """Return a random model of a type, in eval mode, whose greedy text varies."""
    config = small(CONFIG_MAPPING[kind])
    for name, value in IDS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    vision, text = getattr(config, "vision_config", None), config.get_text_config()
    for name, value in VISION.items():
        if hasattr(vision, name):
            old = getattr(vision, name)
            setattr(
                vision,
                name,
                [value] * len(old) if isinstance(old, list | tuple) and name in ("image_size", "patch_size") else value,
            )
    if hasattr(config, "scale_factor"):
        config.scale_factor = 2
    with torch.device("meta"):
        model = tf.AutoModelForImageTextToText.from_config(config)
    check_size(model)
    if takes(model, "image_grid_thw"):
        rope = text.rope_parameters
        text.rope_parameters = {**rope, "mrope_section": SECTIONS[rope.get("partial_rotary_factor", 1.0)]}
    if kind == "gemma3":
        config.mm_tokens_per_image, text.sliding_window = 4, 8
        text.layer_types = ["sliding_attention", "full_attention"] * 2
    if kind in TILED:
        size = vision.image_size
        config.image_grid_pinpoints = [[size, 2 * size], [2 * size, size], [2 * size, 2 * size]]
    torch.manual_seed(0)
    model = random_weights(tf.AutoModelForImageTextToText.from_config(config))
    for name, weight in model.named_parameters():
        if "modality_projection" in name:  # else its images have too little effect to change a text
            weight.data *= 9
    model.generation_config.eos_token_id = None
    return model


def image_prompt(model: tf.PreTrainedModel, seed: int, lead: int = 2, tail: int = 3) -> dict[str, torch.Tensor]:
    """Return the processor's output for a prompt with one image: `lead` tokens, the image, `tail` tokens."""
    random, config = torch.Generator().manual_seed(seed), model.config
    vision, kind = config.vision_config, config.model_type
    more: dict[str, torch.Tensor] = {}
    if takes(model, "image_grid_thw"):
        h, w, merge = 4, 6, vision.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or vision.num_channels
        pixels = torch.randn(h * w, channels * vision.temporal_patch_size * vision.patch_size**2, generator=random)
        num, more = h * w // merge**2, {"image_grid_thw": torch.tensor([[1, h, w]])}
    else:
        size = vision.image_size if hasattr(vision, "image_size") else 32
        size = size[0] if isinstance(size, list | tuple) else size
        shape: tuple[int, ...] = (1, 3, size, size)
        if kind in ("smolvlm", "idefics3"):
            shape = (1, *shape)
        if kind in TILED:
            more = {"image_sizes": torch.tensor([[size, 2 * size]])}
            shape = (1, image_size_to_num_patches([size, 2 * size], config.image_grid_pinpoints, size), 3, size, size)
        if kind == "mistral3":
            more = {"image_sizes": torch.tensor([[size, size]])}
        if kind == "lfm2_vl":
            patch = vision.patch_size
            shape = (1, (size // patch) ** 2, 3 * patch**2)
            more = {
                "spatial_shapes": torch.tensor([[size // patch] * 2]),
                "pixel_attention_mask": torch.ones(1, (size // patch) ** 2, dtype=torch.long),
            }
        pixels = torch.randn(shape, generator=random)
        with torch.no_grad():
            features = model.model.get_image_features(pixel_values=pixels, **more).pooler_output
        features = torch.cat([f.reshape(-1, f.shape[-1]) for f in features])
        num = features.shape[0]
    ids = torch.tensor(
        [[*range(5, 5 + lead), *[152] * takes(model, "image_grid_thw"), *[IMAGE] * num, *range(20, 20 + tail)]]
    )
    types = (ids == IMAGE).long()
    more |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if takes(model, name)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, **more}


def takes(model: tf.PreTrainedModel, name: str) -> bool:
    """Return whether the model's forward has an argument `name`."""
    return name in inspect.signature(model.forward).parameters


def greedy(model: tf.PreTrainedModel, inputs: dict[str, torch.Tensor], num: int = 8) -> list[list[int]]:
    """Return the text of the model's own `generate`, by row."""
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=num, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[:, length:].tolist()
