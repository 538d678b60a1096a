"""Makes Triton's interpreter fast enough for a test suite: what it repeats is done once.

- It patches hundreds of attributes of `tl` at every kernel launch, and again at every function call within a kernel,
  where all are patched already: half of its time. Once per launch is enough.
- It checks every sum and product of integers for overflow, but reads the result only with `debug`.
- It builds a table of dtypes for every value, and the shape of every tensor anew.
"""

import dataclasses
import math
import threading
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """Patch the interpreter as described above; do nothing if this Triton's interpreter works differently."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        _look_dtypes_up()
    core.tensor.__init__ = _init_tensor
    core.block_type.with_element_ty = _with_element_ty
    _convert_no_types(builder)


def _patch_once_a_launch() -> None:
    patch, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    local = threading.local()

    class Launch(scope_class):  # type: ignore[misc, valid-type]
        """The patches of a launch; `restore` undoes them."""

        def restore(self) -> None:
            super().restore()
            local.patched = frozenset()

    @cache
    def named(fn: Any) -> frozenset[str]:
        """Return the names of the patched modules that the function's globals hold."""
        modules = (interpreter.tl, interpreter.tl.core)
        return frozenset(m.__name__ for m in modules if any(value is m for value in fn.__globals__.values()))

    def patch_lang(fn: Any) -> Any:
        patched: frozenset[str] = getattr(local, "patched", frozenset())
        names = named(fn)
        if names <= patched:
            return scope_class()
        scope = patch(fn)
        if not patched:
            scope.__class__ = Launch
        local.patched = patched | names
        return scope

    interpreter._patch_lang = patch_lang


def _look_dtypes_up() -> None:
    live = interpreter._get_np_dtype
    known = cache(live)

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        return live(scalar) if isinstance(scalar, core.pointer_type) else known(scalar)

    interpreter._get_np_dtype = look_up


def _convert_no_types(builder: Any) -> None:
    """Use the language's own types as those of the interpreter."""
    live = core.block_type.to_ir
    core.block_type.to_ir = lambda self, other: self if other is builder else live(self, other)


@cache
def _shape(*sizes: int) -> tuple[Any, Any]:
    """Return what tensors of these sizes store: the number of elements, and the sizes."""
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _init_tensor(self: Any, handle: Any, dtype: Any) -> None:
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.numel, self.shape = _shape(*dtype.shape) if dtype.is_block() else _shape()


def _with_element_ty(self: Any, scalar: Any) -> Any:
    """Return a type of the same shape, without checking it again."""
    made = object.__new__(core.block_type)
    made.element_ty, made.shape, made.numel = scalar, self.shape, self.numel
    made.name = f"<{self.shape}, {scalar}>"
    return made
