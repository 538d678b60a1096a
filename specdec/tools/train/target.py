"""The target, loaded from the values of options, and as a teacher: one frozen forward gives the features that a head
reads, and the distribution that it imitates."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.reach.targets.exclusive import answering
from specdec.reach.targets.pretrained import load_pretrained
from specdec.reach.targets.shape import LAST, TargetShape, decoder_of, eos_ids_of, vocab_size_of
from specdec.reach.targets.taps import UNORDERED, Taps, found_layers
from specdec.tools.train.batches import Batch
from specdec.tools.train.losses import Goal, OutputHead, RowMath

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(target: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """Load target and tokenizer; "auto": bfloat16 on CUDA if there is a CUDA device, else float32 on the CPU.
    ValueError for an unknown target, dtype or device."""
    where = device_of(device)
    return load_pretrained(target, dtype=dtype_of(dtype, where), device=where)


def device_of(device: str) -> str:
    """Return `device`; "auto": "cuda" if there is a CUDA device, else "cpu". ValueError for a missing device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    named = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if named is None:
        raise ValueError(f"device={device!r}: expected auto, cpu, cuda, or one of several such as cuda:1")
    if device != "cpu" and int(named[1] or 0) >= count:
        raise ValueError(
            f"device={device!r}: PyTorch {torch.__version__} sees {count} CUDA devices here; use cpu or auto, or "
            "install a PyTorch and a driver for your GPU (`specdec env` shows both)"
        )
    return device


def dtype_of(dtype: str, device: str) -> torch.dtype:
    """Return the dtype of that name; "auto" is bfloat16 on CUDA, else float32."""
    name = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected auto or one of {sorted(DTYPES)}")
    return DTYPES[name]


def special_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the ids a hot vocabulary must have: the tokenizer's special tokens and the model's EOS ids."""
    vocab_size = vocab_size_of(model)
    return {i for i in (*tokenizer.all_special_ids, *eos_ids_of(model)) if i is not None and i < vocab_size}


class TeacherOutput(NamedTuple):
    """Output of one forward of the target. features: [B, T, num_aux*h]. hidden: [B, T, h], after the final norm."""

    features: torch.Tensor
    hidden: torch.Tensor


class Teacher:
    """The frozen target. aux_layers: layers whose output is read, ascending, or (LAST,), or none, else ValueError."""

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int]):
        last = TargetShape.of(model).num_layers - 1
        layers = [] if tuple(aux_layers) in ((), (LAST,)) else list(aux_layers)
        if layers != sorted(set(layers)) or not all(0 <= i < last for i in layers):
            raise ValueError(
                f"aux_layers={tuple(aux_layers)}: expected ascending layers of 0..{last - 1} (the last one is read "
                "only as LAST)"
            )
        self.model = model
        self.aux_layers = layers
        self._taps = self._tap()

    @torch.no_grad()
    def _tap(self) -> Taps:
        config, decoder = self.model.config.get_text_config(), decoder_of(self.model)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.weight.device)
        with found_layers(decoder, config.num_hidden_layers, config.hidden_size) as found:
            self._output = type(decoder(input_ids=ids, use_cache=False))  # heads read its other fields
        if not self.aux_layers:
            return Taps()
        if not found:
            raise ValueError(f"aux_layers={tuple(self.aux_layers)} of {type(self.model).__name__}: {UNORDERED}")
        return Taps([found[i] for i in self.aux_layers])

    @property
    def embed_tokens(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def weight(self) -> torch.Tensor:
        """The embedding weight, which gives device and dtype."""
        weight = self.embed_tokens.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def output_head(self) -> OutputHead:
        """The frozen output head, without the model's scaling or softcap of logits. If it has any, a draft scored by
        this head cannot match the target's distribution exactly, nor its loss reach that distribution's entropy."""
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return OutputHead(head.weight.detach(), None if bias is None else bias.detach())

    @torch.no_grad()
    def read(self, batch: Batch) -> TeacherOutput:
        """Run one forward over the batch."""
        with self._taps.reading():
            hidden = decoder_of(self.model)(
                input_ids=batch.tokens[:, : batch.length], use_cache=False
            ).last_hidden_state
            return TeacherOutput(self._taps.take() if self.aux_layers else hidden, hidden)

    @torch.no_grad()
    def goal(self, hidden: torch.Tensor, hot_ids: torch.Tensor | None, math: RowMath) -> Goal:
        """Return the Goal of rows with last hidden states `hidden` [N, h]; hot_ids [dv] int64, or None for all V."""
        return math.goal(self.logits, hidden, self.output_head.weight.shape[0], hot_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map last hidden states [N, h] to logits [N, V], with the model's scaling and softcap."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        answer = self._output(last_hidden_state=hidden.unsqueeze(0))
        with answering(decoder_of(self.model), answer):
            return self.model(input_ids=ids, use_cache=False).logits[0]
