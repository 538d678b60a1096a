"""Speeds up transformers' reading of .gguf files, in which every token of a vocabulary is a field: each is parsed
once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations.ggml import _gguf_parse_value

from specdec.reach.targets.overrides import replaced

_READING = threading.RLock()


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Parse a .gguf file only once within the context: for one model transformers does so four times, seconds each, and
    rebuilds the table of tensor names for every module. Threads take turns."""
    if find_spec("gguf") is None:
        yield
        return
    import gguf

    ours: list[tuple[dict[str, Any], str, Any]] = [
        (vars(gguf), "GGUFReader", cache(_quick(gguf.gguf_reader.GGUFReader))),
        (vars(gguf), "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (vars(modeling_gguf_pytorch_utils), "_gguf_parse_value", _parsed_once(_gguf_parse_value)),
    ]
    with _READING, replaced(ours):
        yield


def _quick(reader: type) -> type:
    """Return a class of readers that slice fields from a plain array: slicing a memory map takes 3 times as long."""

    class Reader(reader):
        """A reader of one file."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return Reader


def _parsed_once(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `parse`(value, types) with a cache for arrays, which the reader keeps alive."""
    known: dict[int, tuple[Any, Any]] = {}

    def parsed(value: Any, types: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, parse(value, types)
        return known[id(value)][1]

    return parsed
