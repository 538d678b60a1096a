"""Makes Triton's interpreter quick enough for a test suite.

It replaces what `tl` names, hundreds of attributes, whenever a kernel is launched and again whenever a kernel calls a
function, where all of it is replaced already: half of its time. Within a launch once is enough.
"""

import threading
from functools import cache
from typing import Any

from triton.runtime import interpreter


def make_quick() -> None:
    """See the module; does nothing with a Triton whose interpreter works in another way."""
    patch = getattr(interpreter, "_patch_lang", None)
    scope_class = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope_class is None:
        return
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
