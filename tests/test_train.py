"""The trainer: unrolling equals inference, losses equal autograd, runs resume bit for bit, heads reload."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from specdec.backends import LayerSpec
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.op import ForwardContext, attention, forward_context
from specdec.backends.rope import Rope
from specdec.backends.torch_ref import TorchBackend
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool
from specdec.core.draft.head import DraftHead
from specdec.reach.heads.fresh import block_config, eagle3_config, new_block, new_eagle, new_eagle3, new_nextn
from specdec.reach.heads.load import check_head, load_head, save_head
from specdec.reach.targets.shape import LAST, TargetShape
from specdec.tools.train.acceptance import Tally, accepted_prefixes
from specdec.tools.train.batches import Batch, Batches
from specdec.tools.train.config import HeadShape, TrainConfig, recipe
from specdec.tools.train.data import Corpus
from specdec.tools.train.fit import check_student, write_card
from specdec.tools.train.losses import Goal, OutputHead, RowMath, imitation_loss
from specdec.tools.train.objectives import HeadObjective, Outcome
from specdec.tools.train.target import Teacher
from specdec.tools.train.trainer import Trainer, learning_rate
from specdec.tools.train.ttt import TTTAttention, unroll
from tests import gemma4
from tests.tiny_models import tiny_model
from tests.train_models import AUX, VOCAB, fresh, tiny_corpus, tiny_head, tiny_target

CPU = torch.device("cpu")
STEPS = 4
NONE = torch.zeros(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: LlamaForCausalLM) -> Corpus:
    return tiny_corpus(target, 12)


def loud_head(target: LlamaForCausalLM, algo: str = "eagle3") -> DraftHead:
    """A head whose attention, MLP and embedding affect the output: a fresh one barely uses them."""
    head = fresh(algo, target)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if p.dim() > 1 and "lm_head" not in name:
                p.add_(torch.randn(p.shape, generator=random) * p.shape[1] ** -0.5)
    return head


def config(**changes: object) -> TrainConfig:
    base = TrainConfig(num_steps=3, tokens_per_batch=128, max_steps=8, lr=3e-3, chunk_rows=7, log_every=4)
    return replace(base, **changes)  # type: ignore[arg-type]


def head_trainer(
    target: LlamaForCausalLM,
    head: DraftHead,
    corpus: Corpus,
    settings: TrainConfig | None = None,
    checkpoint: Path | None = None,
) -> Trainer:
    return Trainer(HeadObjective(target, head, settings or config()), corpus, corpus, checkpoint)


def naive_attention(
    qs: list[torch.Tensor], ks: list[torch.Tensor], vs: list[torch.Tensor], spec: LayerSpec
) -> torch.Tensor:
    """The last step's attention, row by row; qs, ks, vs: [B, T, H, d] of each step so far."""
    q = qs[-1]
    out = torch.zeros_like(q)
    group = q.shape[2] // ks[0].shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            near = slice(-spec.window if spec.window else None, None)  # keys are at 0..i+step without gaps
            for h in range(q.shape[2]):
                g = h // group
                keys = torch.stack([*ks[0][b, : i + 1, g], *[k[b, i, g] for k in ks[1:]]])[near]
                values = torch.stack([*vs[0][b, : i + 1, g], *[v[b, i, g] for v in vs[1:]]])[near]
                logits = keys @ q[b, i, h] * spec.scaling
                if spec.softcap:
                    logits = spec.softcap * (logits / spec.softcap).tanh()
                out[b, i, h] = logits.softmax(0) @ values
    return out


@pytest.mark.parametrize(
    "spec", [LayerSpec(6, 3, 8, 8, 0.3), LayerSpec(6, 3, 8, 8, 1.0, window=3), LayerSpec(6, 3, 8, 8, 1.0, softcap=0.5)]
)
def test_attention_equals_rows_one_by_one(spec: LayerSpec) -> None:
    torch.manual_seed(0)
    attend, qs, ks, vs = TTTAttention([spec]), [], [], []
    still = Rope(torch.ones(2, 7, 8), torch.zeros(2, 7, 8))  # rotates nothing
    for _ in range(STEPS):
        qs.append(torch.randn(2, 7, 6, 8))
        ks.append(torch.randn(2, 7, 3, 8))
        vs.append(torch.randn(2, 7, 3, 8))
        got = attend(qs[-1], ks[-1], vs[-1], still, 0)
        torch.testing.assert_close(got, naive_attention(qs, ks, vs, spec), atol=1e-5, rtol=1e-5)


def test_tokens_must_reach_the_last_step(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="pad to 9"):
        tokens, aux = torch.ones(1, 8).long(), torch.ones(1, 6, 192)
        next(unroll(tiny_head(target), target.get_input_embeddings(), tokens, aux, 3))


class Incremental:
    """Runs the head as inference does: appends rows to a KV pool through the attention op."""

    def __init__(self, head: DraftHead, embed: torch.nn.Module):
        spec = head.attention_layers[0]
        pool = KVPool([spec.shape], 64, torch.float32, CPU)
        self.context = ForwardContext(TorchBackend(), pool, [spec], [None], lambda mode: None)
        self.head, self.embed, self.length = head, embed, 0

    def append(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Append tokens [n], hidden [n, h_d], causal among themselves; return recycled states [n, h_d]."""
        metadata = TORCH_METADATA.uniform(
            ForwardMode.DRAFT,
            torch.arange(1, 64, dtype=torch.int32).unsqueeze(0),
            torch.tensor([0]),
            torch.tensor([self.length]),
            q_len=tokens.numel(),
            max_prefix=self.length,
        )
        self.length += tokens.numel()
        with forward_context(self.context, metadata):
            embeds, rope = self.embed(tokens), self.head.rope(metadata.positions)
            return self.head(embeds, hidden, rope, lambda q, k, v, rope, layer: attention(q, k, v, layer, rope))


@pytest.mark.parametrize("algo", ["eagle", "eagle3", "nextn"])
@torch.no_grad()
def test_unrolling_equals_the_draft_chain_of_inference(target: LlamaForCausalLM, algo: str) -> None:
    head, embed = loud_head(target, algo), target.get_input_embeddings()
    tokens = torch.randint(3, 96, (2, 12 + STEPS), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, NONE, NONE, NONE, 12, 24)
    aux = Teacher(target, head.aux_layers).read(batch).features

    def score(state: torch.Tensor) -> torch.Tensor:
        return head.project(head.normed(state), target.lm_head)

    unrolled = [score(state) for state in unroll(head, embed, tokens, aux, STEPS)]
    for b in range(2):
        row_by_row = Incremental(head, embed)
        for i in range(12):
            one = row_by_row.append(tokens[b, i + 1 : i + 2], head.fuse(aux[b, i : i + 1]))
            torch.testing.assert_close(unrolled[0][b, i], score(one)[0], atol=1e-3, rtol=1e-3)
            chain = Incremental(head, embed)
            state = chain.append(tokens[b, 1 : i + 2], head.fuse(aux[b, : i + 1]))[-1:]
            for j in range(1, STEPS):
                state = chain.append(tokens[b, i + 1 + j : i + 2 + j], state)
                torch.testing.assert_close(unrolled[j][b, i], score(state)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("algo", ["eagle", "eagle3"])
def test_the_teacher_reads_the_rows_that_are_asked_for(target: LlamaForCausalLM, corpus: Corpus, algo: str) -> None:
    head = fresh(algo, target)
    batches = Batches(corpus, 3, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    teacher = Teacher(target, head.aux_layers)
    features, hidden = teacher.read(batch)
    is_hot = algo == "eagle3"
    goal = teacher.goal(hidden.flatten(0, 1)[batch.rows], head.hot_ids if is_hot else None, RowMath(5))
    full = target(batch.tokens[:, : batch.length], output_hidden_states=True)
    # classic numbering starts at the embedding: hidden_states[k] is the output of layer k-1, the last one is normed
    wanted = torch.cat([full.hidden_states[i + 1] for i in AUX], -1) if is_hot else full.hidden_states[-1]
    torch.testing.assert_close(features, wanted)
    logits = full.logits.flatten(0, 1)[batch.rows]
    torch.testing.assert_close(goal.logits, logits[:, head.hot_ids])
    torch.testing.assert_close(goal.lse, logits[:, head.hot_ids].logsumexp(-1))
    best = torch.where(goal.best >= 0, head.hot_ids[goal.best], -1)
    expected = torch.where(torch.isin(logits.argmax(-1), head.hot_ids), logits.argmax(-1), -1)
    assert best.tolist() == expected.tolist()
    assert (0 < int(goal.is_trained.sum()) < goal.best.numel()) is is_hot


def test_taps_of_the_teacher_are_checked(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="ascending layers"):
        Teacher(target, (0, 1, 4))
    with pytest.raises(ValueError, match="read only as LAST"):
        Teacher(target, (0, LAST))


@pytest.mark.parametrize("lk_weight", [0.0, 0.5])
@pytest.mark.parametrize("hot", [None, [0, 2, 3, 5, 8, 9, 13, 18, 19]])
def test_chunked_loss_equals_autograd(lk_weight: float, hot: list[int] | None) -> None:
    torch.manual_seed(0)
    ids = torch.tensor(hot if hot else range(20))
    states = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(ids.numel(), 6, dtype=torch.float64, requires_grad=True)
    target_logits = 2 * torch.randn(11, 20, dtype=torch.float64)
    rows, places = RowMath(4), torch.arange(11.0, dtype=torch.float64)  # places stand in for hidden states
    goal = rows.goal(lambda i: target_logits[i.long()], places, 20, ids if hot else None)
    loss, best = imitation_loss(rows, states, OutputHead(lm_head), goal, goal.weights, lk_weight)
    got = torch.autograd.grad(2 * loss, [states, lm_head])
    q = (states @ lm_head.T).softmax(-1)
    p = target_logits[:, ids].softmax(-1)
    each = -(p * q.log()).sum(-1) - lk_weight * torch.minimum(p, q).sum(-1).log()
    is_hot = torch.isin(target_logits.argmax(-1), ids)
    expected = each[is_hot].mean()
    assert (int(is_hot.sum()) < 11) is bool(hot) and best.tolist() == q.argmax(-1).tolist()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(got, torch.autograd.grad(2 * expected, [states, lm_head]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_math_equals_eager(device: str) -> None:
    torch.manual_seed(0)
    states, lm_head = torch.randn(11, 16, device=device), torch.randn(300, 16, device=device, requires_grad=True)
    target_logits = 3 * torch.randn(11, 300, device=device).bfloat16()
    results = []
    for rows in (RowMath(4), RowMath(4, compiled=True)):  # the last chunk of three rows is padded
        leaf = states.clone().requires_grad_()
        goal = rows.goal(lambda hidden: hidden, target_logits, 300)
        loss, best = imitation_loss(rows, leaf, OutputHead(lm_head), goal, goal.weights, 0.3)
        results.append([goal.lse, goal.best, loss.detach(), best, *torch.autograd.grad(loss, [leaf, lm_head])])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)


def test_an_eagle_head_learns_features_and_law(target: LlamaForCausalLM, corpus: Corpus) -> None:
    head = loud_head(target, "eagle")
    settings = config(feature_weight=0.7, soft_weight=0.2, num_steps=2, normalise_steps=True, step_decay=0.5)
    objective = HeadObjective(target, head, settings)
    batches = Batches(corpus, 2, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[1])
    outcome = objective.forward(batch, None)
    full = target(batch.tokens[:, : batch.length], output_hidden_states=True)
    p = full.logits.flatten(0, 1)[batch.rows].softmax(-1)
    feature = full.hidden_states[-1].flatten(0, 1)[batch.rows]
    expected = torch.zeros(())
    states = unroll(head, target.get_input_embeddings(), batch.tokens, full.hidden_states[-1], 2)
    for j, (state, weight) in enumerate(zip(states, (2 / 3, 1 / 3), strict=True)):
        rows = state.flatten(0, 1)[batch.rows - 1 - j]
        soft = -(p * target.lm_head(rows).log_softmax(-1)).sum(-1).mean()
        far = (rows - feature).abs()
        smooth = torch.where(far < 1, far.square() / 2, far - 0.5).mean(-1).mean()
        expected = expected + weight * (0.2 * soft + 0.7 * smooth)
    torch.testing.assert_close(outcome.loss, expected)
    params = [p for p in head.parameters() if p.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(outcome.loss, params), torch.autograd.grad(expected, params), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    for algo, changes in (("eagle3", {"feature_weight": 1.0}), ("eagle", {"prompt_weight": 1.0})):
        with pytest.raises(ValueError, match=rf"{next(iter(changes))}=1\.0 for '{algo}': expected 0\.0"):
            HeadObjective(target, fresh(algo, target), config(**changes))
    with pytest.raises(ValueError, match=r"train_lm_head=True for 'nextn': expected False"):
        HeadObjective(target, fresh("nextn", target), config(train_lm_head=True))


@torch.no_grad()
@pytest.mark.parametrize("algo", ["eagle", "nextn"])
def test_a_fresh_head_passes_the_targets_state_through(corpus: Corpus, algo: str) -> None:
    target = tiny_target()
    target.model.norm.weight.copy_(torch.linspace(0.3, 2.3, 64))  # ones would hide a missing norm
    batches = Batches(corpus, 3, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    features = Teacher(target, (LAST,)).read(batch).features
    head = fresh(algo, target)
    states = next(unroll(head, target.get_input_embeddings(), batch.tokens, features, 1))
    quiet = (states - features).norm() / features.norm()
    for name, p in head.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert p.abs().max() > 0
            p.zero_()
    states = next(unroll(head, target.get_input_embeddings(), batch.tokens, features, 1))
    assert (states - features).norm() / features.norm() < 0.02 < quiet < 1


@pytest.mark.parametrize("algo", ["eagle", "eagle3", "block"])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "mamba"])
def test_fresh_heads_fit_targets_whose_configs_use_other_words(kind: str, algo: str) -> None:
    """None of these has `intermediate_size`, or the number of heads, under that name."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": VOCAB}
    if kind == "opt":
        sizes |= {"num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}
    config = AutoConfig.for_model(kind, **({**sizes, "num_attention_heads": 4} if kind == "gpt2" else sizes))
    model = AutoModelForCausalLM.from_config(config).eval()
    hot = torch.arange(64)
    if algo == "eagle":
        head: DraftHead = new_eagle(model, 1)
    elif algo == "eagle3":
        head = new_eagle3(model, eagle3_config(model, 64, (0, 1, 2)), hot, 1)
    else:
        head = new_block(model, block_config(model, 64, (0, 1)), hot, 1)
    check_head(head, TargetShape.of(model), torch.float32, CPU)
    ids = torch.randint(3, VOCAB, (1, 8))
    teacher = Teacher(model, head.aux_layers)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(teacher.logits(hidden), model(input_ids=ids).logits[0])


def test_llama_4_teaches() -> None:
    """Its `get_decoder` returns the causal LM, whose output has no hidden states."""
    model = tiny_model("llama4").requires_grad_(False)
    corpus = tiny_corpus(model, 4)  # type: ignore[arg-type]
    rows = corpus.tokens[:16].long().unsqueeze(0)
    batch = Batch(torch.nn.functional.pad(rows, (0, 3)), *[torch.arange(4)] * 3, 16, 16)
    teacher = Teacher(model, (0, 1, 2))
    read = teacher.read(batch)
    torch.testing.assert_close(read.hidden, model.model(input_ids=rows).last_hidden_state)
    torch.testing.assert_close(teacher.logits(read.hidden[0]), model(input_ids=rows).logits[0])
    assert read.features.shape == (1, 16, 3 * 64)


@pytest.mark.parametrize(("kind", "said"), [("gptj", "decoder has no layers"), ("gemma4", "take shared_kv_states")])
def test_targets_without_a_nextn_layer_are_told(kind: str, said: str) -> None:
    model = gemma4.pair()[0] if kind == "gemma4" else tiny_model(kind)
    with pytest.raises(ValueError, match=f"{said}.*: no NextN layer fits"):
        new_nextn(model, 1)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Make torch fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_a_fresh_layer_with_experts_is_of_its_seed_alone(name: str) -> None:
    model = tiny_model(name)
    first = new_nextn(model, 1).state_dict()
    assert all(bool(p.isfinite().all()) for p in first.values())
    torch.manual_seed(123)
    again, other = new_nextn(model, 1).state_dict(), new_nextn(model, 2).state_dict()
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    gate_up, down = (f"mtp.0.layer.mlp.experts.{p}_proj" for p in ("gate_up", "down"))
    assert not torch.equal(first[gate_up], other[gate_up]) and 0 < first[down].std() < first[gate_up].std() / 5


@pytest.mark.usefixtures("nan_memory")
def test_a_head_with_experts_learns() -> None:
    model = tiny_model("qwen3_moe").requires_grad_(False)
    corpus = tiny_corpus(model, 4)  # type: ignore[arg-type]
    head = new_nextn(model, 1)
    experts = head.get_parameter("mtp.0.layer.mlp.experts.down_proj")
    before = experts.detach().clone()
    result = head_trainer(model, head, corpus, config(max_steps=30)).fit()  # type: ignore[arg-type]
    assert result["acc"][0] > 0.5 and not torch.equal(experts, before)


def test_noise_is_of_the_step_and_spares_evaluations(target: LlamaForCausalLM, corpus: Corpus) -> None:
    objective = HeadObjective(target, loud_head(target, "eagle"), config(feature_noise=0.5))
    batches = Batches(corpus, 3, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    seeds = (1, 1, 2)
    noisy = [objective.forward(batch, torch.Generator().manual_seed(s)).loss.item() for s in seeds]
    quiet = [objective.forward(batch, None).loss.item() for _ in range(2)]
    assert noisy[0] == noisy[1] != noisy[2] and quiet[0] == quiet[1] != noisy[0]


def test_acceptance_counts_prefixes_from_chain_starts() -> None:
    # one sequence, 3 prompt tokens, 4 answer tokens (3..6): rows 2..5, starts at columns 2, 3, 4
    batch = Batch(torch.zeros(1, 18).long(), torch.tensor([2, 3, 4, 5]), torch.tensor([2, 3, 4]), NONE, 16, 7)
    right = torch.tensor([[True, True, False, True], [True, True, True, False]])  # [step, row]
    prefixes = accepted_prefixes(batch, right)
    # column i is right at step j if row i+1+j is: (3, 4), (4, 5), (5, beyond the end)
    assert prefixes.tolist() == [[True, False, True], [True, False, False]]
    tally = Tally(2, CPU)
    goal = Goal(torch.zeros(4, 3), torch.zeros(4), torch.tensor([0, 1, 2, -1]))
    drafted = [torch.where(row, goal.best, 9) for row in right]
    tally.add(batch, Outcome(torch.tensor(2.0), goal, [torch.tensor(1.0), torch.tensor(3.0)], drafted))
    rates = tally.read()
    assert rates["accept_at"] == pytest.approx([2 / 3, 1 / 3]) and rates["tau"] == pytest.approx(2.0)
    assert rates["acc"] == [0.75, 0.75] and rates["argmax_coverage"] == 0.75 and rates["loss"] == [1.0, 3.0]


def test_a_miss_of_the_hot_vocabulary_is_never_right() -> None:
    batch = Batch(torch.zeros(1, 17).long(), torch.tensor([4]), torch.tensor([3]), NONE, 16, 7)
    tally = Tally(1, CPU)
    goal = Goal(torch.zeros(1, 3), torch.zeros(1), torch.tensor([-1]))
    tally.add(batch, Outcome(torch.tensor(0.0), goal, [torch.tensor(0.0)], [torch.tensor([0])]))
    assert tally.read()["acc"] == [0.0]


@pytest.mark.parametrize(
    ("limits", "seen", "share"),
    [
        ({"max_steps": 10, "minutes": 5}, (5, 0, 30), 0.5),
        ({"max_tokens": 800, "minutes": 5}, (5, 60, 270), 0.9),
        ({"max_steps": 10}, (99, 0, 0), 1.0),
        ({"max_steps": 10, "max_tokens": 80, "minutes": 5}, (1, 40, 0), 0.5),
    ],
)
def test_progress_is_the_largest_share(target, corpus, monkeypatch, limits, seen, share) -> None:
    trainer = head_trainer(target, fresh("eagle", target), corpus, config(**{"max_steps": None, **limits}))
    trainer.step, trainer.tokens_seen, _ = seen
    monkeypatch.setattr(Trainer, "seconds", seen[2])
    assert trainer.progress == pytest.approx(share)


def test_learning_rates_and_limits() -> None:
    assert learning_rate(1.0, 0.01, 0.02) == 0.5 and learning_rate(1.0, 1.0, 0.02) == pytest.approx(0.0)
    assert learning_rate(1.0, 0.51, 0.02) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="expected at least one"):
        TrainConfig()
    for wrong in ({"max_steps": -1}, {"minutes": 0.0}, {"max_steps": 1, "lr": math.nan}, {"max_steps": 1, "clip": 0.0}):
        with pytest.raises(
            ValueError, match=rf"{list(wrong)[-1]}=.*: expected (an integer of at least 1|a finite number above 0)"
        ):
            TrainConfig(**wrong)


def test_recipes_are_configs_of_their_own() -> None:
    nextn = recipe("nextn", max_steps=3, num_steps=3, lr=None)
    assert (
        nextn.step_weights == pytest.approx([0.51, 0.306, 0.184], abs=1e-3) and nextn.lr == recipe("nextn", epochs=1).lr
    )
    assert recipe("eagle3", epochs=1).step_weights == pytest.approx([0.8**j for j in range(5)])
    assert recipe("eagle", epochs=1).feature_weight == 1.0
    with pytest.raises(ValueError, match=r"algo='medusa'.*nextn"):
        recipe("medusa", epochs=1)


def test_weights_of_steps_beside_survival_are_refused_where_they_were_ignored() -> None:
    for algo, changes in (("block", {}), ("eagle", {"survival": True})):
        with pytest.raises(ValueError, match=f"step_decay: survival already weights the steps of '{algo}'"):
            recipe(algo, epochs=1, step_decay=0.5, **changes)
    assert recipe("block", epochs=1, step_decay=0.5, survival=False).step_weights[1] == 0.5
    assert recipe("nextn", epochs=1, survival=True).survival  # its own recipe has a decay


LEARNING = [
    ("eagle", {"feature_weight": 0.1, "max_steps": 90}),
    ("eagle3", {}),
    ("eagle3", {"lk_weight": 0.3}),
    ("nextn", {}),
]


@pytest.mark.parametrize(("algo", "changes"), LEARNING)
def test_overfits_one_batch(target: LlamaForCausalLM, corpus: Corpus, algo: str, changes: dict[str, float]) -> None:
    few = corpus.select(range(4))
    head = tiny_head(target, draft_vocab_size=96) if algo == "eagle3" else fresh(algo, target)
    result = head_trainer(target, head, few, config(**{"max_steps": 60, "tokens_per_batch": 256, **changes})).fit()
    # a chain that starts near the end of an answer is cut there, so a_j has a maximum below 1
    assert min(result["acc"]) > 0.9 and result["accept_at"][0] > 0.85 and result["rows"] > 0
    assert result["argmax_coverage"] == 1.0 and math.isclose(result["tau"], 1 + sum(result["accept_at"]))


def test_runs_end_at_their_tokens(target: LlamaForCausalLM, corpus: Corpus) -> None:
    trainer = head_trainer(target, fresh("eagle", target), corpus, config(max_steps=None, max_tokens=500))
    result = trainer.fit()
    assert 500 <= result["tokens"] < 500 + 128 and trainer.progress == 1.0 and result["tokens_per_s"] > 0


def test_lm_head_stays_the_targets_unless_asked(target: LlamaForCausalLM, corpus: Corpus) -> None:
    for train_lm_head in (False, True):
        head = tiny_head(target)
        head_trainer(target, head, corpus, config(max_steps=2, train_lm_head=train_lm_head)).fit()
        rows = target.lm_head.weight[head.hot_ids]
        assert torch.equal(head.lm_head.weight, rows) is not train_lm_head


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(target, corpus, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    trainer = head_trainer(target, fresh("eagle", target), corpus, config())
    trainer.save(path)
    before = path.read_bytes()

    def fail(state, partial):
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(path)
    assert [f.name for f in tmp_path.iterdir()] == ["run.pt"] and path.read_bytes() == before


@pytest.mark.usefixtures("python_sigint")
@pytest.mark.parametrize("algo", ["eagle", "eagle3"])
def test_resumed_run_equals_the_uninterrupted_one(
    target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path, algo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives within a step and takes effect after it."""
    settings = config(feature_noise=0.1)
    whole = head_trainer(target, fresh(algo, target), corpus, settings)
    expected = whole.fit()
    path = tmp_path / "run.pt"
    first = head_trainer(target, fresh(algo, target), corpus, settings, path)
    step = first.train_step
    monkeypatch.setattr(
        first, "train_step", lambda *args: (first.step == 4 and signal.raise_signal(signal.SIGINT), step(*args))
    )
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    assert first.step == 5
    second = head_trainer(target, fresh(algo, target, seed=2), corpus, settings)
    second.resume(path)
    result = second.fit()
    assert (second.step, second.epoch, second.cursor) == (whole.step, whole.epoch, whole.cursor)
    weights = [t.objective.optimizer.module.state_dict() for t in (whole, second)]
    for (name, a), b in zip(weights[0].items(), weights[1].values(), strict=True):
        assert torch.equal(a, b), name
    clock = {"minutes", "tokens_per_s"}
    assert {k: v for k, v in result.items() if k not in clock} == {k: v for k, v in expected.items() if k not in clock}
    with pytest.raises(ValueError, match=r"another run.*lr: 0.003 there, 0.001 here"):
        head_trainer(target, fresh(algo, target), corpus, replace(settings, lr=1e-3)).resume(path)


def test_a_checkpoint_of_another_draft_says_where_it_differs(
    target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path
) -> None:
    """It does not list all tensors of both drafts."""
    first, second = (head_trainer(target, tiny_head(target, size), corpus, config()) for size in (64, 40))
    first.save(tmp_path / "checkpoint.pt")
    told = r"of another run \(draft's lm_head\.weight: \[64, 64\] there, \[40, 64\] here\); use its settings$"
    with pytest.raises(ValueError, match=told):
        second.resume(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("algo", ["eagle3", "nextn"])
def test_low_precision_targets_train_a_head_in_fp32(corpus: Corpus, algo: str) -> None:
    target = tiny_target().bfloat16()
    head = fresh(algo, target)
    before = {name: p.clone() for name, p in head.named_parameters()}
    trainer = head_trainer(target, head, corpus, config(max_steps=3))
    trainer.fit()
    working = dict(trainer.objective.optimizer.working.named_parameters())
    for name, p in head.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(working[name], p.bfloat16())
        assert torch.equal(before[name], p) is ("lm_head" in name)
    if algo == "nextn":  # rounded frequencies rotate far positions by the wrong angle
        assert trainer.objective.optimizer.working.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("from_target", [True, False])
def test_export_comes_back_with_the_same_logits(target: LlamaForCausalLM, tmp_path: Path, from_target: bool) -> None:
    head = tiny_head(target)
    save_head(tmp_path, head, lm_head_from_target=from_target, dtype=torch.float32)
    back = load_head(tmp_path, TargetShape.of(target), torch.float32, CPU)
    tokens = torch.randint(3, 96, (1, 9 + STEPS), generator=torch.Generator().manual_seed(0))
    aux = torch.randn(1, 9, 192, generator=torch.Generator().manual_seed(0))
    embed = target.get_input_embeddings()
    pairs = zip(unroll(head, embed, tokens, aux, STEPS), unroll(back, embed, tokens, aux, STEPS), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(head.project(head.normed(ours)), back.project(back.normed(theirs)))
    assert torch.equal(head.d2t, back.d2t) and back.config == head.config


def test_card_has_facts_and_tables(tmp_path: Path) -> None:
    facts = {"algo": "nextn", "target": "T", "tokens": 12345, "acc": [0.5, 0.4], "accept_at": [0.5, 0.2]}
    text = write_card(tmp_path, facts).read_text("utf-8")
    assert "# NextN (MTP) draft head for T" in text and "| tokens | 12,345 |" in text and "| 2 | 0.4 | 0.2 |" in text
    assert "{" not in text


def test_a_head_with_sinks_is_refused_before_its_corpus_is_made() -> None:
    model = tiny_model("gpt_oss")
    with pytest.raises(ValueError, match="attention has sinks: expected none, they cannot be trained yet"):
        check_student("nextn", recipe("nextn", max_steps=1), HeadShape(), "tiny", model, None)
