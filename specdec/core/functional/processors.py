"""Bans, biases and penalties of requests: the logits processors of `transformers`, for every node of a tree.

The law of a node depends on the tokens of its own path: the committed ones and the node's ancestors. So a request
keeps its history by row, and each node is judged after what it would follow. Pure tensor functions, without a look at
the device; the specification that `backends.triton.sampling.processors` is compared with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.core.batch import ancestor_mask, ints_to_device, to_device
from specdec.core.functional.tree import Tree
from specdec.core.sampling_params import SamplingParams

MAX_ENTRIES = 1024  # tokens that one request biases or bans by themselves
MAX_BAD_WORDS = 64  # bad words of several tokens
MAX_CONTEXT = 31  # tokens that an n-gram or a bad word has before its last
FOREVER = 2**31 - 1


@dataclass(frozen=True)
class TokenRules:
    """Settings of one request for single tokens and for sequences, ready to be copied.

    tokens, biases, untils: of each token once: what is added to its logit, and the number of emitted tokens before
    which it is banned. bad_words: sequences, whose last token is banned after the ones before it.
    """

    tokens: list[int]
    biases: list[float]
    untils: list[int]
    bad_words: list[tuple[int, ...]]

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Sequence[int]) -> "TokenRules":
        """The rules of `params`; eos_ids: what ends a text, which `min_new_tokens` bans and bad words do not."""
        biases = {t: float(b) for t, b in params.logit_bias.items()}
        untils: dict[int, int] = {}
        words = [tuple(w) for w in params.bad_words_ids if not (len(w) == 1 and w[0] in eos_ids)]
        bans: list[tuple[Iterable[int], int]] = [
            (eos_ids, params.min_new_tokens),
            (params.begin_suppress_tokens, 1),
            (params.suppress_tokens, FOREVER),
            ([w[0] for w in words if len(w) == 1], FOREVER),
        ]
        for tokens, until in bans:
            for token in tokens if until else ():
                untils[token] = max(until, untils.get(token, 0))
        tokens = sorted({*biases, *untils})
        return cls(
            tokens,
            [biases.get(t, 0.0) for t in tokens],
            [untils.get(t, 0) for t in tokens],
            [w for w in words if len(w) > 1],
        )


@dataclass(frozen=True, eq=False)
class ProcessorState:
    """State of processors by row; rows of requests that use none are neutral, whatever their lists hold.

    penalties [n, 3] float32: for repetition (1: off), frequency and presence (0: off); ngram_sizes [n] int64 (0: off);
    prompt_lens [n] int64; num_entries, num_bad_words [n] int64: how many of a row's rules count. tokens, untils
    [n, MAX_ENTRIES] int32 and biases, float32: see `TokenRules`. bad_words [n, MAX_BAD_WORDS, MAX_CONTEXT + 1] int32:
    the banned token, then the ones before it, the nearest first, -1 past the word. history [n, width] int32: tokens by
    position, see `EngineState`; what was seen and how often is counted there.
    """

    penalties: Tensor
    ngram_sizes: Tensor
    prompt_lens: Tensor
    num_entries: Tensor
    num_bad_words: Tensor
    tokens: Tensor
    biases: Tensor
    untils: Tensor
    bad_words: Tensor
    history: Tensor
    used: set[int] = field(default_factory=set)  # rows that are not neutral, known on the host

    @classmethod
    def empty(cls, history: Tensor) -> "ProcessorState":
        """All rows of `history` neutral."""
        num_rows, device = history.shape[0], history.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            penalties=torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32, device=device).repeat(num_rows, 1),
            ngram_sizes=zeros(),
            prompt_lens=zeros(),
            num_entries=zeros(),
            num_bad_words=zeros(),
            tokens=zeros(MAX_ENTRIES, dtype=torch.int32),
            biases=zeros(MAX_ENTRIES, dtype=torch.float32),
            untils=zeros(MAX_ENTRIES, dtype=torch.int32),
            bad_words=zeros(MAX_BAD_WORDS, MAX_CONTEXT + 1, dtype=torch.int32),
            history=history,
        )

    def fill(self, row: int, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]) -> None:
        """Take a new request into its row, without waiting for the device; one without processors costs nothing."""
        if params.has_processors:
            self.used.add(row)
            self._write(row, prompt_ids, params, eos_ids)
        elif row in self.used:
            self.used.discard(row)
            self.penalties[row : row + 1] = 1.0
            for constant in (self.penalties[:, 1:], self.ngram_sizes, self.num_entries, self.num_bad_words):
                constant[row : row + 1] = 0  # a fill; to an element a number is copied, and waited for

    def _write(self, row: int, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]) -> None:
        """The rules of a request and its prompt, in two copies."""
        rules, device = TokenRules.of(params, eos_ids), self.history.device
        words = [[*word[::-1], *[-1] * (MAX_CONTEXT + 1 - len(word))] for word in rules.bad_words]
        constants = [len(prompt_ids), params.no_repeat_ngram_size, len(rules.tokens), len(words)]
        lists = (constants, prompt_ids, rules.tokens, rules.untils, [token for word in words for token in word])
        packed = ints_to_device([value for values in lists for value in values], device)
        constant, prompt, tokens, untils, bad_words = packed.split([len(values) for values in lists])
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        floats = to_device(torch.tensor([*penalties, *rules.biases], dtype=torch.float32, device="cpu"), device)
        named = (self.prompt_lens, self.ngram_sizes, self.num_entries, self.num_bad_words)
        for target, value in zip(named, constant, strict=True):
            target[row] = value
        self.penalties[row] = floats[:3]
        self.tokens[row, : tokens.numel()] = tokens
        self.untils[row, : tokens.numel()] = untils
        self.biases[row, : tokens.numel()] = floats[3:]
        self.bad_words[row, : len(words)] = bad_words.view(len(words), MAX_CONTEXT + 1)
        self.history[row, : prompt.numel()] = prompt


def process(logits: Tensor, tree: Tree, rows: Tensor, num_context: Tensor, state: ProcessorState) -> Tensor:
    """Apply the processors of `rows` [bs] int64 to logits [bs, D, V], any float dtype; return them in float32.

    num_context [bs] int64: tokens of the history that every node follows, the root's included; a node follows its
    ancestors, itself included, besides. In the order of `transformers` and vLLM: biases of tokens; the repetition
    penalty, for tokens of the prompt and emitted ones; those for frequency and presence, for emitted tokens, to which a
    node's ancestors belong; then what is banned: single tokens for a time, bad words, n-grams that were there before.
    """
    _, num_nodes, vocab_size = logits.shape
    scores = logits.float()
    is_path = ancestor_mask(tree.ancestor_bits, num_nodes).clone()  # [bs, D, D]: which drafts a node follows
    is_path[:, :, 0] = False  # the root belongs to the history
    tokens, columns = state.tokens[rows].long(), torch.arange(MAX_ENTRIES, device=rows.device)
    is_entry = columns < state.num_entries[rows, None]  # [bs, E]
    wide_tokens = tokens.unsqueeze(1).expand(-1, num_nodes, -1)
    biases = torch.where(is_entry, state.biases[rows], 0.0)
    scores = scores.scatter_add(2, wide_tokens, biases.unsqueeze(1).expand(-1, num_nodes, -1))

    history, at = state.history[rows].long().unsqueeze(1), torch.arange(state.history.shape[1], device=rows.device)
    is_prompt = at < state.prompt_lens[rows, None, None]  # [bs, 1, width]
    is_emitted = ~is_prompt & (at < num_context[:, None, None])
    drafts = tree.tokens.unsqueeze(1).expand(-1, num_nodes, -1)
    counts = _counted(history, is_emitted, vocab_size) + _counted(drafts, is_path, vocab_size)
    is_seen = (counts > 0) | (_counted(history, is_prompt, vocab_size) > 0)
    repetition, frequency, presence = state.penalties[rows, None, None].unbind(3)
    scores = torch.where(is_seen, torch.where(scores < 0, scores * repetition, scores / repetition), scores)
    scores = scores - frequency * counts
    scores = scores - presence * (counts > 0)

    num_emitted = (num_context - state.prompt_lens[rows]).unsqueeze(1) + tree.depths  # [bs, D]
    is_early = is_entry.unsqueeze(1) & (num_emitted.unsqueeze(2) < state.untils[rows].unsqueeze(1))
    is_banned = _marked(wide_tokens, is_early, vocab_size)
    suffix = suffixes(tree, is_path, rows, num_context, state.history)
    is_banned |= _bad_words(suffix, rows, state, vocab_size)
    is_banned |= _repeated_ngrams(suffix, is_path, tree, rows, num_context, state, vocab_size)
    return scores.masked_fill(is_banned, -torch.inf)


def suffixes(tree: Tree, is_path: Tensor, rows: Tensor, num_context: Tensor, history: Tensor) -> Tensor:
    """Return the tokens up to each node, nearest first, itself included: [bs, D, MAX_CONTEXT] int64; -2: none."""
    back = torch.arange(MAX_CONTEXT + 1, device=rows.device)  # the last column holds what is further above
    position = (num_context[:, None, None] - 1 + tree.depths.unsqueeze(2)) - back
    old = history[rows[:, None, None], position.clamp(0, history.shape[1] - 1)].long()
    above = tree.depths.unsqueeze(2) - tree.depths.unsqueeze(1)
    above = torch.where(is_path, above.clamp(max=MAX_CONTEXT), MAX_CONTEXT)
    found = torch.where(position >= 0, old, -2).scatter_(2, above, tree.tokens.unsqueeze(1).expand_as(above))
    return found[:, :, :MAX_CONTEXT]


def _counted(tokens: Tensor, is_counted: Tensor, vocab_size: int) -> Tensor:
    """Return how often each token is among the tokens [bs, D, n] of a node where `is_counted`: [bs, D, V] int32."""
    counts = torch.zeros(*tokens.shape[:2], vocab_size + 1, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(2, torch.where(is_counted, tokens, vocab_size), is_counted.int())[..., :vocab_size]


def _marked(tokens: Tensor, is_marked: Tensor, vocab_size: int) -> Tensor:
    """Return a mask [bs, D, V] bool of the tokens [bs, D, n] of every node where `is_marked` [bs, D, n]."""
    marks = torch.zeros(*tokens.shape[:2], vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(2, torch.where(is_marked, tokens, vocab_size), True)[..., :vocab_size]


def _bad_words(suffix: Tensor, rows: Tensor, state: ProcessorState, vocab_size: int) -> Tensor:
    """Return a mask [bs, D, V] bool of the last tokens of bad words whose other tokens precede them at the node.

    As in `transformers` from 5.24 on; before, a word did not count where the text is one token shorter than it.
    """
    words = state.bad_words[rows].long()  # [bs, Q, M + 1]
    before, last = words[..., 1:].unsqueeze(1), words[..., 0].unsqueeze(1).expand(-1, suffix.shape[1], -1)
    is_match = ((before == suffix.unsqueeze(2)) | (before < 0)).all(3)
    is_word = torch.arange(MAX_BAD_WORDS, device=rows.device) < state.num_bad_words[rows, None]
    return _marked(last, is_match & is_word.unsqueeze(1), vocab_size)


def _repeated_ngrams(
    suffix: Tensor,
    is_path: Tensor,
    tree: Tree,
    rows: Tensor,
    num_context: Tensor,
    state: ProcessorState,
    vocab_size: int,
) -> Tensor:
    """Return a mask [bs, D, V] bool of tokens that would end an n-gram which the history or the node's path has."""
    sizes, history = state.ngram_sizes[rows, None, None], state.history[rows].long()
    ends = torch.arange(history.shape[1], device=rows.device)  # where an old n-gram may end
    in_history = (sizes > 0) & (ends >= sizes - 1) & (ends < num_context[:, None, None])
    num_before = (num_context.unsqueeze(1) + tree.depths - 1).unsqueeze(1)  # [bs, 1, D]: tokens before each node
    in_path = is_path & (sizes > 0) & (num_before >= sizes - 1)
    is_end = torch.cat([in_history.expand(-1, suffix.shape[1], -1), in_path], 2)  # [bs, D, width + D]
    above = suffix.gather(1, tree.parents.unsqueeze(2).expand(-1, -1, MAX_CONTEXT))  # what each node itself follows
    padded = torch.nn.functional.pad(history, (MAX_CONTEXT, 0))
    before = padded.unfold(1, history.shape[1], 1).unbind(1)[-2::-1]  # the history, moved on by 1, 2, ...
    is_over = (sizes - 1 <= torch.arange(MAX_CONTEXT, device=rows.device)).unsqueeze(3)
    columns = (above.unbind(2), suffix.unsqueeze(3).unbind(2), is_over.unbind(2))
    for old, drafts, followed, is_out in zip(before, *columns, strict=True):
        is_end &= is_out | (torch.cat([old, drafts], 1).unsqueeze(1) == followed)
    tokens = torch.cat([history, tree.tokens], 1).unsqueeze(1).expand(-1, suffix.shape[1], -1)
    return _marked(tokens, is_end, vocab_size)
