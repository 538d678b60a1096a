"""Makes Triton's interpreter quick enough for a test suite: what it does again and again, it does once.

- It replaces what `tl` names, hundreds of attributes, whenever a kernel is launched and again whenever a kernel calls a
  function, where all of it is replaced already: half of its time. Within a launch once is enough.
- Of every sum and product of integers it computes a check for overflow, which is read with `debug` only.
- It makes a table of dtypes for every value, and the shape of every tensor anew.
- It asks of every two operands all that there is to ask of any, and calls builtins through two wrappers.
"""

import dataclasses
import math
import threading
from functools import cache
from typing import Any

from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_quick() -> None:
    """See the module; leaves a Triton alone whose interpreter works in another way."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        _look_dtypes_up()
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    core.block_type.with_element_ty = _with_element_ty
    core.dtype.__eq__ = _same_or(core.dtype.__eq__)
    interpreter.TensorHandle.__post_init__ = _check_size(interpreter.TensorHandle.__post_init__)
    _convert_no_types(builder)
    _check_operands_quickly()
    if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
        interpreter._patch_attr = _patch_attr


def _patch_once_a_launch() -> None:
    patch, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    local = threading.local()

    class Launch(scope_class):  # type: ignore[misc, valid-type]
        """What a launch replaced; `restore` ends it."""

        def restore(self) -> None:
            super().restore()
            local.patched = frozenset()

    @cache
    def named(fn: Any) -> frozenset[str]:
        """Which of the modules that are replaced the function names."""
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
    """Types of the interpreter's are those of the language."""
    live = core.block_type.to_ir
    core.block_type.to_ir = lambda self, other: self if other is builder else live(self, other)


def _same_or(live: Any) -> Any:
    return lambda self, other: self is other or live(self, other)


def _check_size(live: Any) -> Any:
    def check(self: Any) -> None:
        if self.data.itemsize * 8 > getattr(self.dtype, "primitive_bitwidth", 0):  # bits of a pointer or an int1
            live(self)

    return check


def _check_operands_quickly() -> None:
    """Operands of the same type, numbers beside those that they take the type of, offsets of pointers, and shapes of as
    many dimensions; others go the interpreter's way."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def check_quickly(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is core.tensor:
            if type(rhs) is core.tensor:
                ours = (lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in _RANGES) or (
                    allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.name in _RANGES and rhs.dtype.is_int()
                )
                if ours:
                    return broadcast_quickly(self, lhs, rhs)
            elif arithmetic_check and _takes_type_of(rhs, lhs.dtype):
                return broadcast_quickly(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        elif arithmetic_check and type(rhs) is core.tensor and _takes_type_of(lhs, rhs.dtype):
            return broadcast_quickly(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        ours, theirs = getattr(lhs.type, "sizes", ()), getattr(rhs.type, "sizes", ())
        if ours == theirs:
            return lhs, rhs
        if not theirs:
            return lhs, _splat(self, rhs, ours)
        if not ours:
            return _splat(self, lhs, theirs), rhs
        if len(ours) != len(theirs) or any(1 != a != b != 1 for a, b in zip(ours, theirs, strict=True)):
            return broadcast(self, lhs, rhs)
        sizes = tuple(map(max, ours, theirs))
        return _broadcast_to(self, lhs, sizes), _broadcast_to(self, rhs, sizes)

    TritonSemantic.binary_op_type_checking_impl = check_quickly
    TritonSemantic.broadcast_impl_value = broadcast_quickly


# Types that operands of them are promoted to, and the numbers that they hold, if those are integers.
_RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (32, 64)},
    "fp32": (-math.inf, math.inf),
}


def _takes_type_of(number: Any, dtype: Any) -> bool:
    """Return whether a Python number beside a tensor of `dtype` becomes one of it."""
    if type(number) is float:
        return dtype.name == "fp32"  # type: ignore[no-any-return]
    low, high = _RANGES.get(dtype.name, (math.inf, 0))
    return type(number) is int and low <= number <= high


def _splat(self: Any, value: Any, sizes: tuple[int, ...]) -> Any:
    made = core.block_type(value.dtype, sizes)
    return core.tensor(self.builder.create_splat(made, value.handle), made)


def _broadcast_to(self: Any, value: Any, sizes: tuple[int, ...]) -> Any:
    if value.type.sizes == sizes:
        return value
    return core.tensor(self.builder.create_broadcast(value.handle, sizes), core.block_type(value.dtype, sizes))


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Have the interpreter's semantic passed to a builtin, whose wrapper would only ask whether it is."""
    semantic = interpreter.interpreter_semantic
    called = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKING_WRAPPER else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return called(*args, **kwargs)

    scope.set_attr(obj, name, call)


_CHECKING_WRAPPER = core.builtin(lambda: None).__code__


@cache
def _facts(*sizes: int) -> tuple[Any, ...]:
    """Return what block types of these sizes hold of them, and then what tensors do: sizes, and how many elements."""
    shape, num = core.tuple(list(sizes)), validate_block_shape(list(sizes))
    return shape, num, str(shape), core.constexpr(num), core.tuple([core.constexpr(size) for size in sizes])


_SCALAR = core.constexpr(1), core.tuple([])


def _init_tensor(self: Any, handle: Any, dtype: Any) -> None:
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.numel, self.shape = dtype.of_tensors if dtype.is_block() else _SCALAR


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "value", shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    _fill(self, element_ty, sizes)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    """Return a type of the same shape, which has been checked."""
    made = object.__new__(core.block_type)
    _fill(made, scalar, self.sizes)
    return made


def _fill(made: Any, element_ty: Any, sizes: tuple[int, ...]) -> None:
    made.element_ty, made.sizes = element_ty, sizes
    made.shape, made.numel, name, *of_tensors = _facts(*sizes)
    made.of_tensors = tuple(of_tensors)
    made.name = f"<{name}, {element_ty}>"
