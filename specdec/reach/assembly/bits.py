"""Compares the bits of the target's forwards on the device: the same tokens in plain steps of one request, in batches,
chains or trees, and in prompts prefilled alone, together, in chunks and by a plain step.

If all are equal, a text depends neither on its batch nor on its draft. Forwards that differ run again op by op, each op
on its inputs from the other forward, and the ops that differ are named.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from specdec.backends.op import forward_context
from specdec.backends.sample_tree import Tail, sample_tree
from specdec.core.batch import AttentionMetadata, ForwardMode, on_device
from specdec.core.engine.core import Core
from specdec.graphs.shapes import batch_buckets
from specdec.reach.assembly.op_bits import Case, Rows, Shared, bits_of, differing_ops

CONTEXTS = (1100, 5, 70)  # tokens of the requests, fewer if the pool is small: the first one's keys fill several chunks
STEPS = 3  # plain steps per request
NOTHING: AbstractContextManager[Any] = nullcontext()


def check_bits(core: Core) -> str:
    """Return "equal", or the ops that differ, by name, and in which forwards; or why nothing was compared.

    The engine must be idle: K/V is written to its slots. On CUDA in 16 bits; elsewhere under `check_kernels`.
    """
    config, target = core.config, core.target
    is_wanted = config.check_kernels or (core.device.type == "cuda" and target.dtype != torch.float32)
    reasons = {
        f"{str(target.dtype).removeprefix('torch.')} on {core.device.type}": not is_wanted,
        "the model is shared by ranks": bool(target.group),
        "FlashInfer attention": "flashinfer" in core.context.backend.name,
    }
    if any(reasons.values()):
        return "not checked: " + ", ".join(reason for reason, is_so in reasons.items() if is_so)
    table = core.slot_tables.table
    before = table.clone()
    core.state.adapters.fill_(min(1, len(target.adapters)))
    try:
        with torch.inference_mode(), on_device(core.device), core.models.stepping():
            forwards = _Forwards(core)
            is_live = any(target.compiled.values()) and not target.compiled.get(True)
            others = "layers that are compiled in rounds only" if is_live else "ops that are not known"
            return _compare(forwards.cases(), others) if forwards.lens else "not checked: the pool holds no prompt"
    except torch.OutOfMemoryError:
        return "not checked: no memory is left"
    finally:
        table.copy_(before)
        core.state.adapters.zero_()


def _compare(cases: Iterable[Case], others: str) -> str:
    """Return the result of `check_bits`: the ops that differ, each with its kinds of forward and their sizes.

    others: stands for the ops of a forward in which none was found to differ.
    """
    known: dict[Callable[..., Rows], Rows] = {}
    sizes: dict[str, list[str]] = {}
    ops: dict[str, list[str]] = {}
    for case in cases:
        for shared in case.shared:
            if shared.first not in known:
                known[shared.first] = shared.first()
        found = case.run()
        pairs = [(known[s.first][s.begin :][: s.num], found[s.own :][: s.num]) for s in case.shared]
        if any(not torch.equal(bits_of(one), bits_of(other)) for one, other in pairs):
            sizes.setdefault(case.what, []).append(case.size)
            ops[case.what] = ops.get(case.what) or differing_ops(case)
    if not sizes:
        return "equal"
    where: dict[str, list[str]] = {}
    for what, own in sizes.items():
        named = ", ".join(ops[what]) or others
        where.setdefault(named, []).append(f"{what} of {', '.join(own)}")
    return "different: " + "; and ".join(f"{named} in {'; '.join(forwards)}" for named, forwards in where.items())


class _Forwards:
    """Forwards of a few random texts, in the slots of an idle engine."""

    def __init__(self, core: Core):
        self._config, self._target, self._table = core.config, core.target, core.slot_tables.table
        self._context = replace(core.context, on_forward=lambda mode: None)
        pool = core.context.state_pool
        self._states = [] if pool is None else [layer.state for layer in pool.layers]
        self._reached: dict[int, list[torch.Tensor]] = {}  # recurrent states of each text after its prefill
        page, tail = core.config.page_size, core.config.tail_reserve
        num = min(len(CONTEXTS), core.config.max_batch)
        span = min(self._table.shape[1], core.slot_tables.num_pages // num * page)
        most = min(span - tail - STEPS, core.config.prefill_tokens // num)
        self.lens = [min(n, most) for n in CONTEXTS[:num] if most > 1]
        random = torch.Generator().manual_seed(0)
        shape = (len(self.lens), span)
        config, vocab_size = core.target.model.config.get_text_config(), core.target.spec.num_ids
        count = getattr(config, "vocab_size_per_layer_input", vocab_size)  # Gemma 3n's last ids stand for images
        ids = torch.randint(min(count, vocab_size), shape, generator=random, device="cpu")
        self._ids = ids.to(core.device)
        first = page * (1 + torch.arange(len(self.lens), device=core.device) * -(-span // page)).unsqueeze(1)
        self._table[: len(self.lens), :span] = (first + torch.arange(span, device=core.device)).int()

    def cases(self) -> Iterator[Case]:
        """Yield the comparisons, ordered so that each finds the K/V it needs."""
        lens, places = self.lens, range(len(self.lens))
        alone = [partial(self._prefill, [i], [0], [n]) for i, n in enumerate(lens)]
        for i, n in enumerate(lens):
            run = partial(self._steps, [i], [n - 1], 1, (0,), False)
            yield Case("steps after prefills", f"{n - 1}", run, 1, [Shared(alone[i], n, n - 1, 0)])
        plain = [[partial(self._steps, [i], [n + j], 1) for j in range(STEPS)] for i, n in enumerate(lens)]
        sizes = batch_buckets(self._config.max_batch, self._config.graph_batches)
        for shape, size in product(self._config.shapes, sizes):
            width, words = shape.num_draft_tokens, self._config.tree_words if shape.topk > 1 else 0
            path = sample_tree(Tail(width, words), self._table.device).path[:STEPS]
            what = "trees" if words else "chains" if width > 1 else "batches"
            live = {i * (size - 1) // max(len(lens) - 1, 1): i for i in places}
            rows = [live.get(place, self._config.dummy_row) for place in range(size)]
            starts = [lens[row] if row in places else 0 for row in rows]
            shared = [
                Shared(plain[row][depth], 1, 0, place * width + node)
                for place, row in enumerate(rows)
                if row in places
                for depth, node in enumerate(path)
            ]
            run = partial(self._steps, rows, starts, width, path, words=words)
            yield Case(what, f"{size} x {width}", run, size * width, shared)
        ends = [sum(lens[:i]) for i in places]
        together = [Shared(alone[i], n, 0, ends[i], n) for i, n in enumerate(lens)]
        run = partial(self._prefill, places, [0] * len(lens), lens)
        yield Case("prefills together", f"{sum(lens)}", run, sum(lens), together)
        for i, n in enumerate(lens):
            cut = max(1, 2 * n // 5)
            for start, num in ((0, cut), (cut, n - cut)):
                part = [Shared(alone[i], n, start, 0, num)]
                run = partial(self._prefill, [i], [start], [num])
                yield Case("prefills in parts", f"{start}:{start + num}", run, num, part)

    def _steps(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        width: int,
        path: Sequence[int] = (0,),
        has_head: bool = True,
        within: AbstractContextManager[Any] = NOTHING,
        words: int = 0,
    ) -> Rows:
        """Return a verify's logits [bs * width, V], or last hidden states; the nodes of `path` have the next tokens."""
        self._reach(rows, starts)
        where = self._tensor(rows), self._tensor(starts)
        tree = sample_tree(Tail(width, words), self._table.device)
        depths, bits = (None if t is None else t.expand(len(rows), *t.shape) for t in (tree.depths, tree.bits))
        mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
        most = self._table.shape[1]  # as in a graph
        shape: dict[str, Any] = {"depths": depths, "tail_depths": depths, "ancestor_bits": bits}
        builder = self._context.backend.metadata
        metadata = builder.uniform(mode, self._table, *where, q_len=width, max_prefix=most, **shape)
        ids = torch.arange(len(rows) * width, device=self._table.device).view(len(rows), width)  # off the path
        ids %= self._target.spec.vocab_size
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if row < len(self.lens):
                ids[i, list(path)] = self._ids[row, start : start + len(path)]
        hidden = self._layers(metadata, ids.flatten(), within)
        with within:
            return self._target.head(hidden) if has_head else hidden

    def _prefill(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        q_lens: Sequence[int],
        within: AbstractContextManager[Any] = NOTHING,
    ) -> Rows:
        """Return last hidden states [T, h] of a packed prefill."""
        self._reach(rows, starts)
        metadata = self._context.backend.metadata.prefill(self._table, self._tensor(rows), starts, q_lens)
        ids = [self._ids[row, start : start + num] for row, start, num in zip(rows, starts, q_lens, strict=True)]
        return self._layers(metadata, torch.cat(ids), within)

    def _reach(self, rows: Sequence[int], starts: Sequence[int]) -> None:
        """Advance the recurrent states of `rows` to `starts`: by a prefill of the text, then plain steps."""
        for row, start in zip(rows, starts, strict=True) if self._states else ():
            num = min(start, self.lens[row]) if row < len(self.lens) else 0
            if num and start > num:
                self._steps([row], [start - 1], 1, has_head=False)
            elif num and row in self._reached and num == self.lens[row]:
                for state, kept in zip(self._states, self._reached[row], strict=True):
                    state[row] = kept
            elif num:
                self._prefill([row], [0], [num])
                if num == self.lens[row]:
                    self._reached[row] = [state[row].clone() for state in self._states]

    def _layers(self, metadata: AttentionMetadata, ids: torch.Tensor, within: AbstractContextManager[Any]) -> Rows:
        with forward_context(self._context, metadata), within:
            return self._target.layers(metadata.mode, ids, metadata.positions)[0]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._table.device)
