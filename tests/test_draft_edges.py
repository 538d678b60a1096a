"""Edge cases of drafts: shared layers, learned positions, windows in trees, what saving keeps."""

import json
import warnings

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

import specdec
from specdec import SamplingParams
from specdec.core.batch import ForwardMode
from specdec.core.engine.launcher import PREFIX_STEP
from specdec.reach.heads.fresh import new_eagle
from specdec.reach.heads.load import detect_algo, load_head, save_head
from specdec.reach.heads.nextn import NextNHead
from specdec.reach.targets.shape import TargetShape
from specdec.tools.commands.convert import convert
from specdec.tools.train.batches import Batches
from specdec.tools.train.config import HeadShape, recipe
from specdec.tools.train.data import Corpus
from specdec.tools.train.fit import StudentSetup, make_student
from specdec.tools.train.objectives import HeadObjective
from specdec.tools.train.trainer import Trainer
from tests.heads import ALGOS, MODULES, random_draft, random_head
from tests.test_algorithms import DEVICE, FromScratch
from tests.test_attach import greedy, ragged_prompts
from tests.test_round_graphs import past_prefill
from tests.tiny_models import _BASE, ADMITTED, CONFIGS, VOCAB, tiny_model

CPU = torch.device("cpu")


def llama_of(num_layers):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**_BASE, "num_hidden_layers": num_layers})).eval()


def loaded(folder, model, dtype=torch.float32):
    return load_head(folder, TargetShape.of(model), dtype, CPU)


def rewrite(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_draft_of_the_targets_own_layers_is_refused():
    """As in early exit: our marks on the target's attention modules would be overwritten."""
    model, draft = tiny_model("llama"), tiny_model("llama", 3)
    draft.config.num_hidden_layers = 2
    draft.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in (0, 2)])
    prompt = ragged_prompts()[0]
    expected = greedy(model, prompt, 8)
    with pytest.raises(specdec.AttachError, match="belong to a model that is attached already"):
        specdec.attach(model, draft)
    engine = specdec.attach(model)  # nothing is left of the failed attach
    assert engine.generate([prompt], max_new_tokens=8).tokens == [expected]


def test_a_base_model_is_no_draft():
    with pytest.raises(ValueError, match="has no output head"):
        specdec.attach(tiny_model("llama"), tiny_model("qwen3").model, max_seq_len=64)


@pytest.mark.parametrize("who", ["target", "draft"])
def test_learned_positions_end_where_max_seq_len_does(who):
    """Rounds go past the limit with drafts that are never emitted; they must not read past the position table."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    learned = tf.GPT2LMHeadModel(tf.GPT2Config(**shape, eos_token_id=2, bos_token_id=1)).eval()
    learned.generation_config.eos_token_id = None
    llama, prompt = tiny_model("llama"), list(range(3, 43))
    model, draft = (learned, tiny_model("qwen3")) if who == "target" else (llama, learned)
    model.generation_config.eos_token_id = None
    engine = specdec.attach(model, draft, max_batch=1, max_seq_len=64)
    out = engine.generate([prompt], max_new_tokens=24, ignore_eos=True)
    engine.detach()
    assert out.tokens == [greedy(model, prompt, 24)]


@pytest.mark.parametrize("name", [n for n in ADMITTED if n != "llama"])
def test_nextn_heads_are_of_every_family(name):
    model, prompts = tiny_model(name), ragged_prompts()[:2]
    expected = [greedy(model, p, 8) for p in prompts]
    engine = specdec.attach(model, random_draft(model, "nextn"), max_batch=2, max_seq_len=128)
    out = engine.generate(prompts, max_new_tokens=8)
    engine.detach()
    assert out.tokens == expected


def test_a_nextn_head_whose_layer_attends_twice_is_refused_by_name():
    model = tiny_model("diffllama")
    with pytest.raises(ValueError, match=r"DiffLlamaDecoderLayer attends 2 times .*: no NextN layer fits; use eagle"):
        specdec.attach(model, NextNHead(model), max_seq_len=64)


@torch.inference_mode()
def test_windows_of_draft_trees_go_by_depth():
    with torch.inference_mode(False):
        model, config = tiny_model("llama").to(DEVICE), CONFIGS["qwen2_windowed"]()
        config.sliding_window = 2
        draft = tf.AutoModelForCausalLM.from_config(config)
        draft.load_state_dict(tiny_model("qwen2_windowed", 9).state_dict())
        draft = draft.to(DEVICE).eval()
    tree_shape = {"num_steps": 6, "topk": 3, "num_draft_tokens": 40}
    engine = specdec.attach(model, draft, max_batch=5, max_seq_len=160, cuda_graph=False, **tree_shape)
    core, rows = past_prefill(engine, SamplingParams(), num_rounds=2)
    core.delivery.read(0)  # results that the host has not read yet
    lens = core.state.seq_lens[rows].tolist()
    tree = core.round.worker.draft(core.round.batch("greedy", rows, 128)).tree
    for i, request in enumerate(core.scheduler.decoding()[:2]):
        scratch = FromScratch(model, draft, "standalone", [*request.prompt_ids, *request.tokens][: lens[i] + 1])
        tokens, parents, paths = tree.tokens[i].tolist(), tree.parents[i].tolist(), {0: []}
        for node in range(1, len(tokens)):
            paths[node] = [*paths[parents[node]], tokens[node]]
        for parent in set(parents[1:]):
            children = {tokens[n] for n in range(1, len(tokens)) if parents[n] == parent}
            assert children <= set(scratch.logits(paths[parent]).topk(3).indices.tolist())


@pytest.mark.parametrize("depth", [None, 12])
@pytest.mark.parametrize("aux", [(1, 3, 4), (0, 4, 7), (1, 5, 8)], ids=["of 8 layers", "as SGLang's", "default"])
def test_aux_layers_survive_saving(aux, depth, tmp_path):
    """(1,3,4) are the defaults for another depth; (0,4,7) are stored as [1,5,8], which SGLang would read otherwise."""
    model = llama_of(12)
    save_head(tmp_path, random_head(model, aux=aux), dtype=torch.float32, num_layers=depth)
    assert loaded(tmp_path, model).aux_layers == aux
    written = json.loads((tmp_path / "config.json").read_text())["eagle_config"]
    assert ("eagle_aux_hidden_state_layer_ids" in written) == (depth is None or aux != (1, 5, 8))


def test_convert_keeps_stated_aux_layers(tmp_path):
    model = llama_of(12)
    save_head(tmp_path / "a", random_head(model, aux=(1, 3, 4)), dtype=torch.float32, layout="speculators")
    for source, target, to in (("a", "b", "official"), ("b", "c", "speculators")):
        convert(tmp_path / source, tmp_path / target, to)
        assert loaded(tmp_path / target, model).aux_layers == (1, 3, 4)


def test_fp32_buffers_of_an_mtp_layer_survive_saving(tmp_path):
    model = tiny_model("deepseek_v3").to(torch.bfloat16)
    head = NextNHead(model)
    for module in (model, head):
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.full_like(buffer, 1.001, dtype=torch.float32)
    save_head(tmp_path, head, dtype=torch.bfloat16)
    found = dict(loaded(tmp_path, model, torch.bfloat16).named_buffers())
    (bias,) = [b for name, b in found.items() if name.endswith("e_score_correction_bias")]
    assert bias.dtype == torch.float32 and torch.equal(bias, torch.full_like(bias, 1.001))


def test_another_activation_is_refused(tmp_path):
    model = tiny_model("llama")
    save_head(tmp_path, random_head(model), dtype=torch.float32)
    rewrite(tmp_path, hidden_act="gelu")
    with pytest.raises(specdec.CheckpointError, match="hidden_act='gelu': expected silu"):
        loaded(tmp_path, model)


def test_gguf_files_beside_other_weights(tmp_path):
    save_head(tmp_path, random_head(tiny_model("llama")), dtype=torch.float32)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert detect_algo(tmp_path) == "eagle3"
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"a.gguf, b.gguf: expected one"):
        detect_algo(tmp_path)


def test_models_of_unusual_names_are_standalone(tmp_path):
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    tf.OPTForCausalLM(tf.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64)).save_pretrained(tmp_path / "opt")
    gpt2 = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4))
    gpt2.transformer.save_pretrained(tmp_path / "gpt2")  # names without a prefix, as in the first GPT-2 files
    assert detect_algo(tmp_path / "opt") == "standalone"
    assert detect_algo(tmp_path / "gpt2", "standalone") == "standalone"
    with pytest.raises(specdec.CheckpointError, match="unknown layout"):
        detect_algo(tmp_path / "gpt2")


def tokens(first):
    return Corpus.of([(list(range(first, first + 20)), list(range(first + 20, first + 50)))])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_targets_with_experts_teach(name):
    model = tiny_model(name).requires_grad_(False)
    objective = HeadObjective(model, new_eagle(model, 0), recipe("eagle", max_steps=1, compile=False))
    batches = Batches(tokens(3), 4, 4096, 256, CPU)
    assert torch.isfinite(objective.forward(batches.build(batches.plan(None)[0]), None).loss)


def test_heads_of_several_modules_are_not_trained_by_halves():
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match="3 MTP modules"):
        HeadObjective(model, random_draft(model, MODULES), recipe("nextn", max_steps=1, compile=False))


def test_a_run_is_not_resumed_on_another_corpus(tmp_path):
    model = tiny_model("llama").requires_grad_(False)

    def trainer(corpus, steps):
        objective = HeadObjective(model, new_eagle(model, 0), recipe("eagle", max_steps=steps, compile=False))
        return Trainer(objective, corpus, corpus, tmp_path / "c.pt")

    trainer(tokens(3), 1).fit()
    with pytest.raises(ValueError, match="another run"):
        trainer(tokens(60), 3).resume(tmp_path / "c.pt")
    trainer(tokens(3), 3).resume(tmp_path / "c.pt")


@pytest.mark.parametrize(
    ("algo", "shape", "names"),
    [
        ("eagle", HeadShape(aux_layers=(0, 1, 2), hidden_size=64), "aux_layers, hidden_size: algo='eagle'"),
        ("nextn", HeadShape(intermediate_size=8), "intermediate_size: algo='nextn' takes only copy_layer"),
        ("block", HeadShape(init="somewhere", draft_vocab_size=8), "goes on from 'somewhere' takes only nothing"),
        (
            "standalone",
            HeadShape(file_format="safetensors", embed_type="Q8_0"),
            "embed_type='Q8_0': only file_format 'gguf'",
        ),
    ],
)
def test_options_that_a_student_has_no_use_for_are_refused(algo, shape, names):
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match=names):
        make_student(algo, StudentSetup("t", model, None, tokens(3), recipe(algo, max_steps=1, compile=False), shape))


class Upcasting(torch.nn.Linear):
    """An output head that takes bf16 and scores in fp32, as some models do."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight).float()


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.8, top_k=20, seed=3)])
@pytest.mark.parametrize("shape", [{}, {"topk": 3, "num_draft_tokens": 8}])
@pytest.mark.parametrize("algo", [*ALGOS, MODULES])
def test_heads_that_score_in_fp32_serve_drafts_in_bf16(algo, shape, sampling):
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.lm_head.__class__ = Upcasting
    draft = random_draft(model, algo).to(torch.bfloat16)
    if algo == "standalone":
        draft.lm_head.__class__ = Upcasting
    prompts = [[5, 6, 7, 8], [9, 10]]
    settings = {"num_steps": 3, "max_seq_len": 64, "cuda_graph": True, "graph_batches": (2,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rotary frequencies in bf16
        engine = specdec.attach(model, draft, **settings, **shape)
    out = engine.generate(prompts, max_new_tokens=12, sampling=sampling, ignore_eos=True)
    assert [len(tokens) for tokens in out.tokens] == [12, 12]


@pytest.mark.parametrize("length", [3, 40])
def test_the_first_root_is_attended_no_wider_than_the_prompt(length):
    """On a CPU the width costs time: the host passes its bound of L to the draft."""
    model = tiny_model("llama")
    engine = specdec.attach(model, random_draft(model, "standalone"), num_steps=3, max_seq_len=512)
    backend = engine._core.round.worker.context.backend
    plan, widths = backend.plan, []
    backend.plan = lambda metadata: (widths.append((metadata.mode, metadata.max_prefix)), plan(metadata))[1]
    engine.generate(list(range(3, 3 + length)), max_new_tokens=1)
    (width,) = [width for mode, width in widths if mode is ForwardMode.DRAFT_EXTEND]
    assert length <= width <= length + PREFIX_STEP + 1


@pytest.mark.parametrize("algo", ["eagle", "eagle3"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_targets_whose_embeddings_are_narrower_than_their_layers_are_refused(algo, is_saved, tmp_path):
    """As in OPT-350m; only heads with an embedding of their own could draft for it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 96}
    config = tf.OPTConfig(**sizes, vocab_size=VOCAB, word_embed_proj_dim=32, do_layer_norm_before=False)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    draft = random_draft(model, algo)
    if is_saved:
        save_head(tmp_path / "head", draft, dtype=torch.float32)
    with pytest.raises(specdec.CheckpointError, match="reads the target's embeddings, which are 32 wide"):
        specdec.attach(model, tmp_path / "head" if is_saved else draft, max_seq_len=100)
