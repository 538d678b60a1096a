"""Counts the kernels that Triton compiles: after warm-up, requests must not compile any."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """Record the full names of all Triton kernels compiled (or loaded from the disk cache) within the context."""
    compiled: list[str] = []
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def note(*args: Any, fn: Any = None, **kwargs: Any) -> Any:
        compiled.append(f"{fn.module}.{fn.name}")
        return before(*args, fn=fn, **kwargs) if before is not None else None

    runtime.jit_post_compile_hook = note
    try:
        yield compiled
    finally:
        runtime.jit_post_compile_hook = before
