"""Drafting settings that a draft's author recommends on a GPU: `speculation.json` beside its weights.

{"max_batch": 8, "num_steps": 5, "topk": 4, "num_draft_tokens": 24}: the settings of `attach` for engines of up to
max_batch requests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.core.errors import CheckpointError
from specdec.core.ranges import is_whole
from specdec.reach.checkpoints.folders import read_json

ADVICE = "speculation.json"
DRAFTING = ("num_steps", "topk", "num_draft_tokens")


def read_advice(folder: Path) -> dict[str, int]:
    """Read speculation.json in `folder`: numbers by name, {} without a file. CheckpointError for an invalid file."""
    if not (folder / ADVICE).is_file():
        return {}
    advice = read_json(folder, ADVICE)
    names = {"max_batch", *DRAFTING}
    if set(advice) != names or not all(type(n) is int and n > 0 for n in advice.values()):
        what = f"{ADVICE} holds {advice}: expected whole numbers above 0 for {', '.join(sorted(names))}; or delete it"
        raise CheckpointError(str(folder), [what])
    return advice


def follow_advice(folder: Path, settings: Mapping[str, Any], default_batch: int) -> dict[str, Any]:
    """Return `settings`, with the advised num_steps, topk and num_draft_tokens if they set none of them (nor
    synthetic_acceptance). Advice for a smaller max_batch than theirs (default_batch if unset) is ignored.
    CheckpointError for an invalid file."""
    if {*DRAFTING, "synthetic_acceptance"} & set(settings):
        return dict(settings)
    advice = read_advice(folder)
    max_batch = settings.get("max_batch", default_batch)
    if not is_whole(max_batch) or max_batch > advice.get("max_batch", 0):  # EngineConfig refuses what is no int
        return dict(settings)
    return {**settings, **{name: advice[name] for name in DRAFTING}}
