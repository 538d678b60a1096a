"""Prompts with images, as a live model's own code passes them to its layers.

The model runs outside our route, with the caller's inputs: vision tower, projector, merging and positions are its own.
The call of its stack of layers raises, and its arguments become an `EmbeddedPrompt` for each row.
"""

import hashlib
import inspect
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.ranges import shown
from specdec.core.text.embedded import EmbeddedPrompt
from specdec.reach.targets.admission.probe import ModelSpec
from specdec.reach.targets.exclusive import called_by
from specdec.reach.targets.overrides import ConfigViews, evaluating

# Arguments of a stack without effect here: it runs without a cache, and its outputs are chosen by us.
IGNORED = frozenset(
    {"cache", "past_key_values", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "return_dict", "logits_to_keep"}
)
# Arguments of a model's forward that are not inputs of a prompt.
TEXT = IGNORED | {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "kwargs"}
DELTAS = "rope_deltas"  # attribute in which models keep how far images have moved positions
GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")


class _Caught(BaseException):
    """The stack was called."""


class Images:
    """Prompts with images for `model`. names: its inputs for images; empty for a text-only model.

    moves_positions: rotary positions of tokens after an image differ from their indices.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec):
        self._model, self._stack, self._name = model, spec.stack, type(model).__name__
        self._windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
        names = frozenset(inspect.signature(model.forward).parameters)
        self.names = names - TEXT if any(name.startswith("pixel_values") for name in names) else frozenset()
        # Modules around the stack, which build its masks: in a form that can be read.
        self._around = [m for m in model.modules() if m is not spec.stack and any(s is spec.stack for s in m.modules())]
        self._moving = [vars(module) for module in self._around if DELTAS in vars(module)]
        self.moves_positions = bool(self._moving)
        self._weights = torch.zeros(2, 0, dtype=torch.int64, device="cpu")

    @torch.inference_mode()
    def embed(self, inputs: Mapping[str, Any], wants_keys: bool) -> list[EmbeddedPrompt | None]:
        """Return the inputs of the layers for each row of `inputs`, None for rows of text alone.

        inputs: input_ids [B, T], attention_mask [B, T] and other arguments of the model's forward. wants_keys: see
        `EmbeddedPrompt.keys`. ValueError for inputs that the model, or the engine, does not know.
        """
        given, ids, keep = self._given(inputs)
        caught = self._call(given)
        embeds = caught.pop("inputs_embeds", None)
        if embeds is None or embeds.shape[:2] != ids.shape:
            raise ValueError(f"{', '.join(sorted(given))}: {self._name} merges them within its layers")
        masks, positions = caught.pop("attention_mask", None), caught.pop("position_ids", None)
        is_visual, deepstack = (caught.pop(name, None) for name in DEEPSTACK)
        unknown = sorted(name for name, value in caught.items() if name not in IGNORED and value is not None)
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(given))}: {self._name} gives its layers {', '.join(unknown)}, which "
                "the engine does not know; call model.generate for it"
            )
        text, num_visual = self._model.get_input_embeddings()(ids.where(keep, 0)), 0
        found: list[EmbeddedPrompt | None] = []
        for row, kept in enumerate(keep):
            own = EmbeddedPrompt(embeds[row][kept])
            self._place(own, positions, row, kept)
            self._see(own, masks, row, kept)
            if is_visual is not None:
                own.is_visual = is_visual[row][kept]
                begin, num_visual = num_visual, num_visual + int(own.is_visual.sum())
                own.deepstack = [features[begin:num_visual] for features in deepstack or ()]
            is_text = (own.embeds == text[row][kept]).all(-1)
            if bool(is_text.all()) and not own.rope_delta and own.limits is None:
                found.append(None)
                continue
            if wants_keys:
                own.keys = self._keys(own, is_text)
            found.append(own)
        return found

    def _given(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """Return the arguments of the model's forward, ids [B, T] int64, and a mask of the ids that are not padding."""
        device, dtype = self._model.get_input_embeddings().weight.device, self._model.dtype
        given = {name: value for name, value in inputs.items() if value is not None}
        for name, value in given.items():
            if name in ("input_ids", "attention_mask"):
                given[name] = value = torch.as_tensor(value, device=device)
            elif isinstance(value, np.ndarray):
                given[name] = value = torch.from_numpy(value)
            if isinstance(value, torch.Tensor):
                given[name] = value.to(
                    device, dtype if name.startswith("pixel") and value.is_floating_point() else None
                )
            elif isinstance(value, list | tuple):
                raise ValueError(
                    f"{name}={shown(value)}: expected a tensor; call the processor with return_tensors='pt'"
                )
        _check_sizes(given)
        given["input_ids"] = ids = given["input_ids"].reshape(-1, given["input_ids"].shape[-1])
        mask = given.get("attention_mask")
        given["attention_mask"] = mask = torch.ones_like(ids) if mask is None else mask.reshape(ids.shape)
        return given, ids, mask.bool()

    def _call(self, given: dict[str, Any]) -> dict[str, Any]:
        """Call the model with `given`, and return the arguments of its stack."""
        views = ConfigViews(self._around, "eager")
        deltas = [(own, own[DELTAS]) for own in self._moving]
        with views.shown(), evaluating(self._model, list(self._model.modules())), _catching(self._stack) as caught:
            try:
                self._model(**given, use_cache=False)
            except _Caught:
                return caught
            except (TypeError, IndexError, RuntimeError, AttributeError) as error:
                if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                names = ", ".join(sorted(given))
                raise ValueError(f"{names}: {self._name} refuses them: {error}") from error
            finally:
                for own, before in deltas:
                    own[DELTAS] = before
        raise ValueError(f"{self._name} did not call its layers")

    def _place(self, own: EmbeddedPrompt, positions: torch.Tensor | None, row: int, kept: torch.Tensor) -> None:
        """Set rotary positions, if the model gives the stack several per token; other positions must be those of
        text."""
        if positions is None:
            return
        num = len(own.embeds)
        if positions.dim() == 3:
            own.positions = positions[:, min(row, positions.shape[1] - 1)][:, kept]
            own.rope_delta = int(own.positions[-3:].max()) + 1 - num
            if own.rope_delta and not self.moves_positions:
                raise ValueError(f"{self._name} moves positions in a way that the engine does not know")
            return
        counted = positions[min(row, positions.shape[0] - 1)][kept]
        first = 0 if bool(kept.all()) else counted[0]
        if not torch.equal(counted - first, torch.arange(num, device=counted.device)):
            raise ValueError(f"{self._name} gives its layers other positions than 0, 1, 2, ...")

    def _see(self, own: EmbeddedPrompt, masks: Any, row: int, kept: torch.Tensor) -> None:
        """Set what each token sees, from a mask [B, T] or [B, 1, T, T], or one for each type of layer."""
        at = torch.arange(len(own.embeds), device=own.embeds.device)
        for mask in masks.values() if isinstance(masks, Mapping) else [masks]:
            if mask is None or mask.dim() == 2:
                continue
            sees = mask[row, 0][kept][:, kept]
            sees = sees if sees.dtype is torch.bool else sees == 0
            last = torch.where(sees, at, -1).amax(1)
            causal = at <= last.unsqueeze(1)
            near = (causal & (at.unsqueeze(1) - at < window) for window in (len(at), *self._windows))
            is_known = any(torch.equal(sees, expected) for expected in near) and bool((last.diff() >= 0).all())
            if not is_known or (own.limits is not None and not torch.equal(last, own.limits)):
                raise ValueError(f"{self._name} hides tokens by a mask that the engine does not know")
            own.limits = last
        if own.limits is None or torch.equal(own.limits, at):
            own.limits = None
            return
        own.cuts = np.concatenate([[True], (own.limits == at).cpu().numpy()])

    def _keys(self, own: EmbeddedPrompt, is_text: torch.Tensor) -> np.ndarray:
        """Return `EmbeddedPrompt.keys`: hashes of each token's embedding, features and positions, and of all that it
        sees ahead.

        Multilinear hashing modulo 2^64 (Lemire and Kaser, arXiv 1202.4961), of which the upper halves count, with
        secret numbers: two of 32 bits make a key.
        """
        parts = [own.embeds, *(_spread(own.is_visual, features) for features in own.deepstack)]
        words = [part.contiguous().view(torch.int16).long() for part in parts]
        words += [] if own.positions is None else [own.positions.T]
        packed = torch.cat(words, 1)
        if self._weights.shape[1] < packed.shape[1]:
            drawn = np.frombuffer(secrets.token_bytes(16 * packed.shape[1]), dtype=np.int64)
            self._weights = torch.from_numpy(drawn.reshape(2, -1).copy()).to(packed.device)
        high, low = ((packed * weights[: packed.shape[1]]).sum(1) >> 32 for weights in self._weights)
        keys = (high << 32 | low & 0xFFFFFFFF).masked_fill(is_text, 0).cpu().numpy()
        if own.cuts is None:
            return keys
        ends = np.flatnonzero(own.cuts)
        for begin, end in pairwise(ends):
            if end - begin > 1:
                whole = hashlib.blake2b(keys[begin:end].tobytes(), digest_size=8).digest()
                keys[begin:end] ^= np.frombuffer(whole, dtype=np.int64)
        return keys


def _check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ValueError unless there are as many patches as the grids say: a GPU would read past the end of fewer."""
    for grids, pixels in GRIDS.items():
        sizes, patches = given.get(grids), given.get(pixels)
        if isinstance(sizes, torch.Tensor) and isinstance(patches, torch.Tensor):
            num, expected = len(patches), int(sizes.prod(-1).sum())
            if num != expected:
                raise ValueError(
                    f"{pixels}: expected {expected} patches, as {grids}={sizes.tolist()} says, got {num}; "
                    "pass both as the processor returns them"
                )


def _spread(is_there: torch.Tensor | None, features: torch.Tensor) -> torch.Tensor:
    """Return `features` [V, h] at their tokens, [T, h], and zeros at the others."""
    assert is_there is not None
    return features.new_zeros(len(is_there), features.shape[1]).index_put_((is_there,), features)


@contextmanager
def _catching(stack: nn.Module) -> Iterator[dict[str, Any]]:
    """Make a call of `stack` raise within the context, and store its arguments by name in the yielded dict."""
    caught: dict[str, Any] = {}

    def catch(*args: Any, **kwargs: Any) -> Any:
        caught.update(kwargs | {f"argument {i}": value for i, value in enumerate(args)})
        raise _Caught

    with called_by(stack, catch):
        yield caught
