"""Checkpoints of block drafters: z-lab's DFlash layout, which transformers and SGLang read too; DeepSpec's and
SpecForge's DSpark; speculators' (vLLM). They have tensors of the same names and differ in config.json."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from specdec.reach.heads import fresh
from specdec.reach.heads.block import BlockHead
from specdec.reach.heads.block_configs import dflash_json, inexpressible, read_config, speculators_json
from specdec.reach.heads.eagle3_format import hot_maps, hot_tensors
from specdec.reach.heads.files import EMBEDDING, LM_HEAD, HeadFiles, Wanted, shapes_of
from specdec.reach.heads.format import HeadFormat, Layout, Saving, Stored, Tensors, Training, same
from specdec.reach.targets.shape import TargetShape

_NAMES = ("fc.", "hidden_norm.", "norm.", "layers.", "lm_head.", "embed_tokens.", "mask_embedding", "markov_head.")
_PREFIXES = (*same(*_NAMES, "d2t", "t2d"), *(("model." + name, name) for name in _NAMES))
DFLASH = Layout("dflash", "block", r"(model\.)?hidden_norm\.weight$", _PREFIXES)
SPECULATORS = replace(DFLASH, name="speculators-block")
CONFIDENCE = "confidence_head."  # of DSpark: predicts when to stop; `num_steps="auto"` measures that instead


def read(files: HeadFiles, target: TargetShape | None) -> Stored | None:
    """Read the head in `files`; see `HeadFormat`. Embedding and output head are dropped if they equal the target's."""
    config = files.parse(read_config, target and target.num_layers)
    if config is None:
        return None
    size, vocab_size = config.layer.hidden_size, config.vocab_size
    files.check_target(target, config.target_hidden_size, vocab_size)
    scores_all = config.draft_vocab_size == vocab_size
    own_head = not scores_all or files.is_own(LM_HEAD, target)
    head = files.make(BlockHead, replace(config, own_embedding=files.is_own(EMBEDDING, target), own_head=own_head))
    wanted = shapes_of(head)
    optional: Wanted = {EMBEDDING: (vocab_size, size), LM_HEAD: (config.draft_vocab_size, size)}
    derived = [LM_HEAD] * bool(own_head and files.raw.get("lm_head_from_target")) + ["d2t", "t2d"] * scores_all
    optional |= {name: wanted.pop(name) for name in derived}
    optional |= {name: shape for name, (shape, _) in files.found.items() if name.startswith(CONFIDENCE)}
    files.check(wanted, optional, _why)
    return Stored(head, hot_tensors(files, head, list(wanted), hot_maps(files, head), target))


def _why(name: str, shape: tuple[int, ...] | None) -> str:
    if shape is not None and name == "fc.weight":
        return "config.json names another number of target layers than fc reads"
    if name.startswith("markov_head."):
        return "markov_rank or markov_head_type in config.json is not what the head was trained with"
    return ""


def write(head: BlockHead, saving: Saving) -> tuple[dict[str, Any], Tensors]:
    """Return config.json and the tensors. ValueError names what the layout cannot express."""
    tensors = head.state_dict()
    if head.hot_ids.numel() == head.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    if saving.layout == DFLASH.name:
        config = dflash_json(head.config, saving.num_layers)
    else:
        config = speculators_json(head.config, saving.verifier)
    if saving.lm_head_from_target and tensors.pop(LM_HEAD, None) is not None:
        config["lm_head_from_target"] = True
    return config, tensors


BLOCK = HeadFormat(
    algo="block",
    layouts=(DFLASH, SPECULATORS),
    read=read,
    write=write,
    fresh=partial(fresh.hot_head, fresh.block_config, fresh.new_block),
    written=lambda head: (SPECULATORS.name,) if inexpressible(head.config) else (DFLASH.name, SPECULATORS.name),
    training=Training(
        MappingProxyType({"num_steps": 8, "survival": True, "lk_weight": 0.5, "lr": 1.5e-3}),
        frozenset({"intermediate_size", "num_layers", "draft_vocab_size", "aux_layers"}),
        "Block draft head",
        "DFlash with a causal block and a Markov term, for targets of the same hidden size, vocabulary and layers.",
    ),
    features="aux",
    id_shift=0,
    shares_lm_head_rows=True,
)
