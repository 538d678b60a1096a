"""Adapters on a live target, with PEFT if installed: live layers follow them, compiled ones refuse them by name."""

import copy
import json
import math
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import specdec
from specdec.core.errors import AttachError, GraphError
from specdec.graphs.compile import pieces, trace
from specdec.reach.targets.pretrained import load_pretrained
from tests.adapters import save_lora, with_lora
from tests.image_models import image_model
from tests.tiny_models import DEVICE, tiny_model

PROMPT = [5, 17, 33, 64, 101, 12, 90, 7, 55, 23, 41]
FILE = "adapter_model.safetensors"
SETTINGS = {"max_batch": 1, "max_seq_len": 64}
PROMPTS = [list(range(5, 5 + n)) for n in (11, 7, 20, 14)]
NAMES = ["a", None, "b", "a"]
LIVE = {"cuda_graph": False, "prefill_graph": "off"}
PARTS = {"cuda_graph": True, "prefill_graph": "breakable", "graph_sampling": "greedy", "strict": True}
PARTS |= {"prefill_buckets": (1, 4, 8, 16, 32, 64)}
WHOLE = {**PARTS, "prefill_graph": "whole"}
TRACED = {**PARTS, "prefill_graph": "piecewise", "compile": True, "compiler": "eager"}
TREE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}


def endless(model):
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def text_of(model):
    ids = torch.tensor([PROMPT], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def served(engine):
    return engine.generate([PROMPT], max_new_tokens=6).tokens[0]


def test_what_is_added_to_an_attached_model_drops_nothing_out():
    model = endless(tiny_model("llama", seed=7))
    engine = specdec.attach(model, **SETTINGS)
    for layer in with_lora(model).modules():
        layer.train(layer is not model and isinstance(layer, nn.Dropout))
    texts = [served(engine) for _ in range(3)]
    model.eval()
    assert texts == [text_of(model)] * 3
    engine.detach()


def test_dropouts_in_training_mode_are_named():
    model = with_lora(tiny_model("llama"))
    model.model.layers[1].mlp.up_proj.train()
    with pytest.raises(AttachError, match=r"layers.1.mlp.up_proj.dropout.a is in training mode \(2 dropouts\); call"):
        specdec.attach(model)
    specdec.attach(model.eval()).detach()


def lora(dropout=0.3):
    peft = pytest.importorskip("peft")
    modules = ["q_proj", "v_proj", "gate_proj"]
    return peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=modules, init_lora_weights=False, lora_dropout=dropout, task_type="CAUSAL_LM"
    )


def adapted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(endless(tiny_model("llama", seed=7)), lora())
    wrapped.add_adapter("b", lora())
    return wrapped.eval()


def test_virtual_tokens_of_a_wrapper_are_refused_by_name():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(AttachError, match=r"a PeftModelForCausalLM.*PROMPT_TUNING works in the wrapper's own forward"):
        specdec.attach(peft.get_peft_model(tiny_model("llama"), config).eval())
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    with pytest.raises(AttachError, match=r"its activated LoRA \(alora_invocation_tokens\) works.*such as plain LoRA"):
        specdec.attach(peft.get_peft_model(tiny_model("llama"), config).eval())


@pytest.mark.parametrize("mode", ["live", "compiled", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapters_of_peft_are_followed_or_refused_by_name(mode):
    wrapped = adapted().to("cuda" if mode == "cuda" else "cpu")
    model = wrapped.get_base_model()
    base, state = text_of(wrapped), {k: v.clone() for k, v in wrapped.state_dict().items()}
    how = {"compile": True, "compiler": "eager"} if mode == "compiled" else {}
    engine = specdec.attach(wrapped, prefix_cache=True, **SETTINGS, **how)
    assert specdec.engine_of(wrapped) is engine

    def check(told):
        if mode == "live":
            assert served(engine) == text_of(model) != base
            return
        with pytest.raises(GraphError, match=rf"layers.0.self_attn.q_proj.{told}.*detach\(\) and attach\(\) again"):
            engine.generate([PROMPT], max_new_tokens=6)

    assert served(engine) == base
    wrapped.set_adapter("b")
    check(r"_active_adapter \(\['default'\] → \['b'\]\)")
    wrapped.set_adapter("default")
    assert served(engine) == base
    with wrapped.disable_adapter():
        check(r"_disable_adapters \(False → True\)")
    assert served(engine) == base
    wrapped.add_adapter("c", lora())
    model.to(model.device).eval()
    assert served(engine) == base
    wrapped.merge_adapter(["default", "b"])
    check(r"merged_adapters \(\[\] → \['default', 'b'\]\)")
    engine.detach()
    wrapped.unmerge_adapter()
    wrapped.delete_adapter("c")
    torch.testing.assert_close(dict(wrapped.state_dict()), state)
    assert text_of(wrapped) == base and specdec.engine_of(wrapped) is None


def test_attention_that_peft_keeps_a_copy_of_is_given_back():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["up_proj"], modules_to_save=["self_attn"])
    wrapped = peft.get_peft_model(endless(tiny_model("llama", seed=7)), config).eval()
    for _ in range(2):  # the second engine finds nothing left by the first
        with specdec.attach(wrapped, **SETTINGS) as engine:
            assert served(engine) == text_of(wrapped.get_base_model())


class Routed(nn.Module):
    """Routes some rows to one expert, the others to another."""

    def __init__(self, layer):
        super().__init__()
        self.experts = nn.ModuleList([layer, copy.deepcopy(layer)])

    def forward(self, x):
        is_first = x[..., :1] > 0
        out = x.new_zeros(*x.shape[:-1], self.experts[0].out_features)
        for expert, chosen in zip(self.experts, (is_first, ~is_first), strict=True):
            out = out.masked_scatter(chosen, expert(x[chosen[..., 0]]))
        return out


def num_ops(graph):
    targets = [node.target for node in graph.graph.nodes]
    return tuple(targets.count(getattr(torch.ops.specdec, name).default) for name in ("lora_linear", "lora", "gate"))


@pytest.fixture(scope="module")
def two():
    """A PeftModel of two adapters with different layers, ranks and scales."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    common = {"init_lora_weights": False, "lora_dropout": 0.3, "task_type": "CAUSAL_LM"}
    a = peft.LoraConfig(r=4, lora_alpha=40, target_modules=["q_proj", "v_proj", "gate_proj"], **common)
    patterns = {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 60}}
    modules = ["v_proj", "k_proj", "up_proj", "down_proj"]
    b = peft.LoraConfig(r=20, lora_alpha=30, use_rslora=True, target_modules=modules, **patterns, **common)
    wrapped = peft.get_peft_model(endless(tiny_model("llama", seed=7)), a, adapter_name="a")
    wrapped.add_adapter("b", b)
    return wrapped.to(DEVICE).eval()


def own_text(wrapped, prompt, name):
    """Return the text of the PeftModel's own generate, with one of its adapters or none."""
    ids = torch.tensor([prompt], device=DEVICE)
    with nullcontext() if name else wrapped.disable_adapter():
        if name:
            wrapped.set_adapter(name)
        out = wrapped.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(two):
    texts = [own_text(two, p, name) for p, name in zip(PROMPTS, NAMES, strict=True)]
    assert all(own_text(two, PROMPTS[0], name) != texts[0] for name in (None, "b"))
    return texts


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    two.save_pretrained(folder)
    return {name: folder / name for name in "ab"}


@pytest.mark.parametrize("how", [LIVE, PARTS, WHOLE, TRACED], ids=["live", "parts", "whole", "traced"])
@pytest.mark.parametrize("shape", [None, {"num_steps": 3}, TREE], ids=["plain", "chain", "tree"])
@torch.no_grad()
def test_adapters_in_one_batch_write_what_each_writes_alone(two, expected, saved, shape, how, monkeypatch):
    found = []
    monkeypatch.setattr(f"{trace.__name__}.cut", lambda *args: found.append(num_ops(args[0])) or pieces.cut(*args))
    loaded = how is not PARTS
    draft = tiny_model("llama").to(DEVICE) if shape else None
    settings = {"max_batch": 4, "max_seq_len": 64, "prefix_cache": True, **how, **(shape or {})}
    target, adapters = (two, ["a", "b"]) if loaded else (endless(tiny_model("llama", seed=7)).to(DEVICE), saved)
    with specdec.attach(target, draft, adapters=adapters, **settings) as engine:
        for _ in range(2):  # the second time from the prefix cache
            assert engine.generate(PROMPTS, max_new_tokens=8, adapter=NAMES).tokens == expected
        assert engine.generate(PROMPTS[0], max_new_tokens=8, adapter="a").tokens == expected[:1]
        others = engine.generate([PROMPTS[0]] * 3, max_new_tokens=8, adapter=[None, "b", "a"]).tokens
        assert others == [own_text(two, PROMPTS[0], name) for name in (None, "b", "a")]
        assert how is LIVE or engine.report().paths["EXTEND"]["replays"]
        assert how is not TRACED or engine.report().compiled.startswith("compiled")
        assert found[:1] == ([(3 * 4, 0, 0)] if how is TRACED else []), "of QKV, of gate and up, and of down"


@pytest.mark.parametrize("how", [LIVE, PARTS, TRACED], ids=["live", "parts", "traced"])
def test_adapters_that_requests_choose_are_trained_while_they_serve(two, how):
    model = copy.deepcopy(two)
    with specdec.attach(model, adapters=["a", "b"], **{**SETTINGS, **how, "prefix_cache": True}) as engine:

        def check():
            for name in ("a", "b"):
                text = engine.generate(PROMPTS[0], max_new_tokens=8, adapter=name).tokens[0]
                assert text == own_text(model, PROMPTS[0], name)
            return text

        before = check()  # the active adapter makes no difference
        model.set_adapter("b")
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if ".b." in n], lr=30.0)
        ids = torch.tensor(PROMPTS[:1], device=DEVICE)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert check() != before
        score = engine.score(PROMPTS[:1], [[7]], adapter="b")[0].logprob
        assert score == pytest.approx(model(input_ids=ids).logits[0, -1].log_softmax(-1)[7].item(), abs=1e-4)
        model.merge_adapter(["a"])
        with pytest.raises(GraphError, match=r"adapter 'a': .*q_proj is merged into the model's weights"):
            engine.generate(PROMPTS[0], adapter="a")
        model.unmerge_adapter()
        check()
        model.delete_adapter("a")
        with pytest.raises(GraphError, match=r"peft_config \({'a': |no LoRA adapter 'a' loaded \(it has 'b'\)"):
            engine.generate(PROMPTS[0], adapter="b")


def test_an_adapter_may_have_the_names_of_older_transformers(tmp_path):
    """Files made for Qwen2.5-VL before 4.52 say model.layers, which is now model.language_model.layers."""
    model = image_model("qwen2_5_vl").to(DEVICE)
    now = save_lora(model.model.language_model, tmp_path / "now")
    before, tensors = shutil.copytree(now, tmp_path / "before"), load_file(now / FILE)
    for folder, names in ((now, "model.language_model"), (before, "model")):
        named = {k.replace("base_model.model", f"base_model.model.{names}"): t for k, t in tensors.items()}
        save_file(named, folder / FILE)
    engine = specdec.attach(model, adapters={"now": now, "before": before}, max_batch=3, max_seq_len=64)
    texts = engine.generate([PROMPT] * 3, adapter=["now", "before", None], max_new_tokens=8, ignore_eos=True).tokens
    assert texts[0] == texts[1] != texts[2]


def test_what_adapters_cannot_be_is_refused_by_name(two, saved, tmp_path):
    peft, model = pytest.importorskip("peft"), endless(tiny_model("llama", seed=7))

    def refused(match, adapters, target=two):
        with pytest.raises(ValueError, match=match):
            specdec.attach(target, adapters=adapters, **SETTINGS)

    def changed(change=lambda tensors: tensors, **config):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(saved["a"], folder)
        settings = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
        file = folder / FILE
        save_file(change(load_file(file)), file)
        return {"x": folder}

    refused("adapters='a': expected names of adapters that are loaded in the model, or a dict", "a")
    refused(r"no LoRA adapter 'c' loaded \(it has 'a', 'b'\); load it, or pass {'c': FOLDER}", ["c"])
    refused(r"no LoRA adapter 'a' loaded \(it has none\)", ["a"], model)
    ia3 = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    of_ia3 = peft.get_peft_model(endless(tiny_model("llama", seed=7)), ia3, adapter_name="third").eval()
    refused("adapter 'third': peft_type='IA3': expected LORA; merge it into a copy", ["third"], of_ia3)
    refused("cannot load the checkpoint '/no/such/folder': no such folder", {"x": "/no/such/folder"}, model)
    refused("use_dora=True, bias='all': expected low-rank products.*merge", changed(use_dora=True, bias="all"), model)
    refused("peft_type='LOHA': expected LORA", changed(peft_type="LOHA"), model)
    for init in ("pissa", "pissa_niter_16", "OLoRA"):
        refused(f"init_lora_weights='{init}': .*PEFT changes.*for_weight_conv", changed(init_lora_weights=init), model)
    for config in ({"lora_alpha": None}, {"lora_alpha": "x"}, {"lora_alpha": math.inf}, {"alpha_pattern": 3}):
        refused("lora_alpha=.*: expected a number, and numbers by regular", changed(**config), model)
    refused("alpha_pattern={'\\(': 4}: expected a number", changed(alpha_pattern={"(": 4}), model)
    refused("its matrices are not finite", changed(lambda t: {key: v * math.nan for key, v in t.items()}), model)
    nothing = {key: t[:0] if "lora_A" in key else t[:, :0] for key, t in load_file(saved["a"] / FILE).items()}
    refused(r"lora_A \[0, 64\], but lora_B \[64, 0\]", changed(lambda t: nothing), model)
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    refused(f"{embedding}.*expected lora_A", changed(lambda t: t | {embedding: torch.ones(2, 2)}), model)
    wrong = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 64)}
    wrong |= {"base_model.model.lm_head.lora_B.weight": torch.ones(128, 2)}
    refused("'x' is for lm_head, not a linear layer below the output head", changed(lambda t: wrong), model)
    foreign = {key.replace("q_proj", "z_proj"): tensor for key, tensor in load_file(saved["a"] / FILE).items()}
    refused("'x' is for .*z_proj, which the model does not have", changed(lambda t: foreign), model)
    wide = {key: torch.cat([t, t], 1 - int("lora_B" in key)) for key, t in load_file(saved["a"] / FILE).items()}
    refused(r"'x' is of another model: .* has \(64, 96\)", changed(lambda t: wide), model)
    routing = endless(tiny_model("llama", seed=7))
    routing.model.layers[1].mlp.down_proj = Routed(routing.model.layers[1].mlp.down_proj)
    down = save_lora(routing, tmp_path / "down", kinds=("experts.0",))
    refused("an adapted layer gets . rows in a forward of 7 tokens, as experts do", {"x": down}, routing)
    dora = peft.get_peft_model(endless(tiny_model("llama", seed=7)), peft.LoraConfig(r=2, use_dora=True)).eval()
    refused("adapter 'default': use_dora=True", ["default"], dora)
    ranked = peft.get_peft_model(endless(tiny_model("llama", seed=7)), peft.LoraConfig(r=129)).eval()
    refused("ranks up to 129: expected 128 at most", ["default"], ranked)
    with specdec.attach(model, adapters={"x": saved["a"]}, **SETTINGS) as engine:
        with pytest.raises(ValueError, match="adapter='y': expected one of 'x'"):
            engine.generate(PROMPT, adapter="y")
        with pytest.raises(ValueError, match=r"adapters by request.*engine.generate\(adapter=NAME\)"):
            engine.install()
    with specdec.attach(model, **SETTINGS) as engine, pytest.raises(ValueError, match="adapter='x': expected none"):
        engine.generate(PROMPT, adapter="x")


def test_a_folder_of_an_adapter_is_no_target_and_says_so(saved):
    with pytest.raises(ValueError, match=r"target '.*a' is an adapter of PEFT, not a model: take the model"):
        load_pretrained(saved["a"])


def test_layers_that_adapters_were_read_for_must_stay(saved):
    model = endless(tiny_model("llama", seed=7)).to(DEVICE)
    own = model.model.layers[0].mlp.gate_proj
    with specdec.attach(model, adapters={"x": saved["a"]}, cuda_graph=False, **SETTINGS) as engine:
        before = engine.generate(PROMPTS, max_new_tokens=4, adapter="x").tokens
        model.model.layers[0].mlp.gate_proj = copy.deepcopy(own)
        with pytest.raises(
            GraphError, match=r"gate_proj \(another module\).*read from files belong to layers that are gone"
        ):
            engine.generate(PROMPTS, adapter="x")
        model.model.layers[0].mlp.gate_proj = own
        assert engine.generate(PROMPTS, max_new_tokens=4, adapter="x").tokens == before


def test_a_changed_config_is_refused_by_name_beside_adapters(saved):
    model = endless(tiny_model("llama", seed=7)).to(DEVICE)
    with specdec.attach(model, adapters={"x": saved["a"]}, cuda_graph=False, **SETTINGS) as engine:
        before = engine.generate(PROMPTS, max_new_tokens=4, adapter="x").tokens
        model.config.sliding_window = 2
        with pytest.raises(GraphError, match=r"config.sliding_window \(nothing → 2\).*detach\(\) and attach\(\) again"):
            engine.generate(PROMPTS, adapter="x")
        del model.config.sliding_window
        assert engine.generate(PROMPTS, max_new_tokens=4, adapter="x").tokens == before


def test_adapters_that_are_hot_swapped_are_read_again_when_the_cache_is_cleared(tmp_path):
    """PEFT writes them through `.data`, which changes no version counter."""
    hotswap = pytest.importorskip("peft.utils.hotswap")
    wrapped = adapted()
    base = endless(tiny_model("llama", seed=7))
    torch.manual_seed(5)
    pytest.importorskip("peft").get_peft_model(base, lora()).save_pretrained(tmp_path)
    with specdec.attach(wrapped, prefix_cache=True, adapters=["default"], **SETTINGS) as engine:
        before = engine.generate([PROMPT], max_new_tokens=6, adapter="default").tokens
        hotswap.hotswap_adapter(wrapped, str(tmp_path), "default")
        engine.clear_prefix_cache()
        (after,) = engine.generate([PROMPT], max_new_tokens=6, adapter="default").tokens
        assert after == text_of(wrapped) and [after] != before


@pytest.mark.gpu
def test_in_16_bits_texts_are_those_of_one_request_alone(tmp_path):
    model = endless(tiny_model("llama64", seed=7)).to(DEVICE, torch.bfloat16)
    adapters = {name: save_lora(model, tmp_path / name, seed=i) for i, name in enumerate("ab")}
    draft = tiny_model("llama64").to(DEVICE, torch.bfloat16)
    with specdec.attach(
        model, draft, adapters=adapters, max_batch=4, max_seq_len=64, num_steps=3, compile=True
    ) as engine:
        texts = engine.generate(PROMPTS, max_new_tokens=8, adapter=NAMES).tokens
        alone = [engine.generate(p, max_new_tokens=8, adapter=n).tokens[0] for p, n in zip(PROMPTS, NAMES, strict=True)]
        assert texts == alone != engine.generate(PROMPTS, max_new_tokens=8).tokens
        assert engine.report().bits == "equal" and engine.report().compiled.startswith("compiled")
