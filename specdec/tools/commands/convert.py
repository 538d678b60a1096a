"""`specdec convert`: EAGLE-3 heads between the official layout and vLLM speculators', tensor by tensor, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec import shipped
from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.fitting import target_ids
from specdec.reach.checkpoints.replacing import check_free, write_checkpoint
from specdec.reach.checkpoints.tensors import TensorFiles
from specdec.reach.heads.configs import AUX_IDS, AUX_LAYERS
from specdec.reach.heads.custom_generate import FILE, write_custom_generate
from specdec.reach.heads.eagle3_configs import proposal_json
from specdec.reach.heads.eagle3_format import EAGLE3
from specdec.reach.heads.files import LM_HEAD, HeadFiles
from specdec.reach.heads.format import Saving, Stored
from specdec.reach.heads.formats import layouts
from specdec.reach.heads.load import open_head
from specdec.reach.targets.pretrained import BUNDLED, load_pretrained
from specdec.reach.targets.shape import TargetShape
from specdec.tools.commands.choices import Reported
from specdec.tools.options import REQUIRED, argument, command_of, option

TO = {"official": "eagle3", "speculators": "speculators"}
# Keys that our computation does not use, but other readers do.
PASSED = ("max_position_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    verifier: str | None = None,
    *,
    overwrite: bool = False,
    target: TargetShape | None = None,
) -> list[str]:
    """Write the EAGLE-3 head in `src` to the folder `dst` in the layout `to`; return notes on reading it.

    to: "official" or "speculators". verifier: name of the target for speculators' config; None keeps the one in `src`.
    overwrite: replace a checkpoint in `dst`. target: provides the lm_head rows of a head without its own, which other
    readers of speculators' layout need. ValueError names the feature that `to` cannot express, CheckpointError the
    problem of `src`.
    """
    if to not in TO:
        raise ValueError(f"to={to!r}: expected one of {', '.join(TO)}")
    head = open_head(TensorFiles.at(src))
    if head.layout.algo != "eagle3":
        raise ValueError(f"{str(src)!r} holds a head of {head.layout.algo!r}: expected an EAGLE-3 head")
    if head.layout.name == TO[to]:
        raise ValueError(f"{str(src)!r} is in the layout {to!r} already")
    if Path(dst).exists() and Path(dst).resolve() == head.folder.resolve():
        raise ValueError(f"dst={str(dst)!r} is the source: expected another folder")
    check_free(dst, overwrite, (str(FILE),))
    stored = EAGLE3.read(head, None)
    if head.problems or stored is None:
        raise CheckpointError(str(head.folder), head.problems)
    tensors = head.read(list(head.names))
    if to == "speculators" and head.raw.get("lm_head_from_target") and LM_HEAD not in tensors:
        tensors[LM_HEAD] = _targets_rows(target, tensors)
    written = _config(head, stored, to, verifier)
    layout = layouts()[TO[to]]
    write_checkpoint(dst, written, {layout.theirs(ours): t.contiguous() for ours, t in tensors.items()})
    write_custom_generate(dst)
    return head.notes + head.doubts


def _config(head: HeadFiles, stored: Stored, to: str, verifier: str | None) -> dict[str, Any]:
    """Return config.json in the layout `to`, with the keys of the one in `head` that other readers use."""
    raw, lacks_rows = head.raw, bool(head.raw.get("lm_head_from_target")) and to == "official"
    written, _ = EAGLE3.write(stored.head, Saving(TO[to], lacks_rows))
    given = {**raw, **raw.get("transformer_layer_config", {})}
    layer = written.get("transformer_layer_config", written)
    layer.update({key: given[key] for key in PASSED if key in given})
    _keep_aux(raw, written, written.get("eagle_config", written))
    known = raw.get("speculators_config")
    if verifier is not None or to == "speculators":
        written["speculators_config"] = _with_verifier(known, verifier)
    elif known is not None:
        written["speculators_config"] = known
    return written


def _targets_rows(target: TargetShape | None, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the rows of the target's output head that a head of `tensors` scores with, in its own dtype."""
    if target is None:
        raise ValueError(
            "the head uses its target's lm_head, which other readers of the speculators layout do not know: give "
            "that target as --target, to write its rows out"
        )
    rows, d2t = target.lm_head_rows(), tensors.get("d2t")
    ids = torch.arange(len(rows)) if d2t is None else target_ids(d2t)
    width, most = tensors["fc.weight"].shape[0], int(ids.max()) + 1
    if rows.shape[1] != width or len(rows) < most:
        raise ValueError(
            f"--target: its output head is {list(rows.shape)}, but the head's states have width {width} and it scores "
            f"token ids up to {most - 1}; give the target that it was trained for"
        )
    return rows[ids.to(rows.device)].to("cpu", tensors["fc.weight"].dtype)


def _keep_aux(raw: Mapping[str, Any], written: dict[str, Any], holder: dict[str, Any]) -> None:
    """Copy aux ids as they are in `raw`, or none: their meaning depends on the target's depth, which is unknown
    here."""
    ids = (raw.get("eagle_config") or {}).get(AUX_IDS) or raw.get(AUX_IDS)
    for config, key, value in ((holder, AUX_IDS, ids), (written, AUX_LAYERS, raw.get(AUX_LAYERS))):
        config.pop(key, None)
        if value:
            config[key] = value


def _with_verifier(known: Any, verifier: str | None) -> dict[str, Any]:
    """Return `speculators_config` for the target `verifier`; an entry for another target is dropped."""
    kept = dict(known) if isinstance(known, dict) else proposal_json(None)
    if verifier is not None and (kept.get("verifier") or {}).get("name_or_path") != verifier:
        kept["verifier"] = {"name_or_path": verifier, "architectures": []}
    return kept


class Convert(Reported):
    """Convert an EAGLE-3 head between the official and the speculators layout."""

    src: str = argument("Folder, Hub id or shipped name of an EAGLE-3 head.")
    dst: str = argument("Folder to write.")
    to: str = option("Layout: official (SafeAILab, SpecForge, SGLang) or speculators (vLLM).", REQUIRED)
    verifier: str | None = option("Name of the target, for speculators' config.")
    target: str | None = option(
        "With --to speculators: target of a head without an lm_head; of shipped heads: bundled."
    )
    overwrite: bool = option("Replace a checkpoint in DST.", False)

    def run(self) -> None:
        source, target = shipped.find(self.src), self.target
        if target is not None and self.to == "official":
            raise ValueError(f"--target {target}: only --to speculators needs the target; leave it out")
        if target is None and str(source) != self.src and self.to == "speculators":
            target = BUNDLED
        shape = None if target is None else TargetShape.of(load_pretrained(target)[0])
        notes = convert(source, self.dst, self.to, self.verifier, overwrite=self.overwrite, target=shape)
        for note in notes:
            print(note)
        self.finish({"src": self.src, "dst": self.dst, "to": self.to, "notes": notes})


command = command_of(Convert)
