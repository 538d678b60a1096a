"""`model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`: an engine for a draft's folder.

Called by the `custom_generate/generate.py` that `reach.heads.custom_generate` writes into such folders. The first call
attaches the engine, which belongs to the model: later calls reuse it. Another folder or other settings replace it when
the calls that it serves have ended, and it is freed with the model.

transformers does not pass on the folder: it copies generate.py to a cache whose name is made from the file's text and
the folder's last name, and keeps `custom_generate` to itself. A path in the file would be wrong after the folder is
moved or downloaded, and a digest would identify the folder without locating it. So the folder is read from the running
call of `GenerationMixin.generate`, whose frame is found by its code, not by name or depth. `draft=FOLDER` names it
explicitly, in case a version of transformers has no such frame.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from specdec.api import Engine, attach
from specdec.api import engine_of as attached_engine
from specdec.reach.assembly.arguments import check_mapping, check_settings
from specdec.reach.targets.exclusive import ATTACHING
from specdec.reach.targets.marks import HOLDER
from specdec.tools.doors.generate import EngineGenerate, generate_by

_CALLS = threading.Condition()  # notified when a call ends


def generate_with_draft(
    model: PreTrainedModel,
    *,
    draft: str | Path | None = None,
    engine_settings: dict[str, Any] | None = None,
    on_unsupported: str = "raise",
    **arguments: Any,
) -> Any:
    """Generate as `model.generate(**arguments)` would, with the draft whose folder this call names.

    draft: the folder or Hub id; None: that of `custom_generate`. engine_settings: fields of `EngineConfig`, such as
    max_seq_len (2048 at most unless given) and max_batch; None: those of the engine that is there, or the defaults.
    on_unsupported: as for `Engine.install`. ValueError for what an engine cannot decode so, and all errors of `attach`.
    """
    if arguments.pop("revision", None) not in (None, "main"):
        raise ValueError("revision with custom_generate: download that revision, and give its folder")
    check_mapping("engine_settings", engine_settings)
    check_settings(
        {name: value for name, value in (engine_settings or {}).items() if name not in ("algo", "tokenizer")}
    )
    source = _local(draft if draft is not None else _named_by_caller(model))
    with _engine_for(model, source, engine_settings) as engine:
        return generate_by(EngineGenerate(engine, on_unsupported))(model, **arguments)


def engine_of(model: PreTrainedModel) -> Engine | None:
    """Return the engine that calls with `custom_generate=FOLDER` have attached to `model`, to read its report or to
    detach it; None if there is none."""
    held, attached = vars(model).get(HOLDER), attached_engine(model)
    return attached if held is not None and held.engine is attached else None


@dataclass(eq=False)
class _Held:
    """The state kept with a model: its engine, its settings, and the threads whose calls it serves now. Copies of the
    model get an empty one."""

    engine: Engine | None = None
    source: str | None = None
    settings: dict[str, Any] | None = None
    callers: list[int] = field(default_factory=list)

    def fits(self, source: str, settings: dict[str, Any] | None) -> bool:
        """Return whether the engine suits a call with `source` and `settings`."""
        return self.source == source and settings in (None, self.settings)

    def __reduce__(self) -> tuple[type["_Held"], tuple[()]]:
        return _Held, ()


@contextmanager
def _engine_for(model: PreTrainedModel, source: str, settings: dict[str, Any] | None) -> Iterator[Engine]:
    """Yield the model's engine, attached now if needed; an engine to be replaced first finishes its calls."""
    me = threading.get_ident()
    with ATTACHING:
        engine, held = engine_of(model), vars(model).get(HOLDER)
        if engine is not None and not held.fits(source, settings):
            if me in held.callers:
                raise ValueError(f"custom_generate={source!r} within a call that decodes with {held.source!r}")
            with _CALLS:
                _CALLS.wait_for(lambda: not held.callers)
            engine.detach()
            engine = None
        if engine is None:
            engine = attach(model, source, **(settings or {}))
            held = _Held(engine, source, settings or {})
            setattr(model, HOLDER, held)
            engine._on_detach.callback(vars(model).pop, HOLDER, None)
        held.callers.append(me)
    try:
        yield engine
    finally:
        with _CALLS:
            held.callers.remove(me)
            _CALLS.notify_all()


def _named_by_caller(model: PreTrainedModel) -> str:
    """Return `custom_generate` of the call of `model.generate` that runs in this thread."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            named = frame.f_locals.get("custom_generate")
            if isinstance(named, str | Path):
                return str(named)
        frame = frame.f_back
    raise ValueError(
        "this call of generate does not name the folder of the draft; add draft=FOLDER, or attach an engine "
        "yourself: specdec.attach(model, FOLDER)"
    )


def _local(source: str | Path) -> str:
    """Return the canonical name of a folder; Hub ids stay as they are."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else str(source)
