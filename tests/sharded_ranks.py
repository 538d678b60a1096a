"""What tests/test_sharded.py runs in two processes: cases over models that transformers loads tensor-parallel.

`python -m tests.sharded_ranks FOLDER RANK` writes FOLDER/RANK.pt: for each case its facts, or the text of its error.
Facts are plain numbers, lists and tensors; the tests have the expected values.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers as tf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel

from specdec.backends.comm import Communicator
from specdec.core.errors import AttachError
from specdec.reach.parallel.sharded import Sharded, find_group, plain
from specdec.reach.targets.adapters.experts import Experts
from tests.tiny_models import CONFIGS, VOCAB

SIZE = 2
IDS = torch.arange(24).view(2, 12) * 5 + 3  # from both halves of the vocabulary
_SMALL = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_FUSED = {  # Phi-3 with a fused weight, each part of which is sharded
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_LATENT = {  # DeepSeek-V3 with heads sharded over ranks, as transformers does for V2
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}


def _changed(name: str, **changes: Any) -> tf.PretrainedConfig:
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def _phi3() -> tf.PretrainedConfig:
    llama = CONFIGS["llama"]()
    return tf.Phi3Config(**{key: getattr(llama, key) for key in _SMALL}, num_hidden_layers=2, pad_token_id=0)


def _glm4() -> tf.PretrainedConfig:
    llama = CONFIGS["llama"]()
    sizes = {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    few = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "pad_token_id": 0}
    return tf.Glm4MoeConfig(**{key: getattr(llama, key) for key in _SMALL}, **sizes, **few)


# by case: how to make its config, and the options of DistributedConfig besides the number of ranks
MODELS: dict[str, tuple[Callable[[], tf.PretrainedConfig], dict[str, Any]]] = {
    "llama": (CONFIGS["llama"], {}),
    "biased": (lambda: _changed("llama", attention_bias=True, mlp_bias=True), {}),
    "tied": (lambda: _changed("llama", tie_word_embeddings=True, pad_token_id=VOCAB - 1), {}),
    "scaled": (lambda: _changed("gemma3", tie_word_embeddings=True), {}),
    "qwen3": (CONFIGS["qwen3"], {}),
    "gemma3": (CONFIGS["gemma3"], {}),
    "phi3": (_phi3, {}),
    "fused": (_phi3, {"tp_plan": _FUSED}),
    "qwen3_moe": (CONFIGS["qwen3_moe"], {}),
    "qwen3_moe_experts": (CONFIGS["qwen3_moe"], {"enable_expert_parallel": True}),
    "deepseek_v3": (CONFIGS["deepseek_v3"], {}),
    "latent": (CONFIGS["deepseek_v3"], {"tp_plan": _LATENT}),
    "gpt_oss": (CONFIGS["gpt_oss"], {}),
    "gpt_oss_experts": (CONFIGS["gpt_oss"], {"enable_expert_parallel": True}),
    "qwen3_next": (CONFIGS["qwen3_next"], {}),
    "glm4_moe": (_glm4, {}),
    "llama4": (CONFIGS["llama4"], {}),
}


class Cases:
    """The cases of one rank; each is a method, or one of MODELS."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.name = Communicator(dist.group.WORLD, torch.device("cpu")).name  # every mesh of two ranks has this group

    def load(self, case: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
        """Return a random model loaded by transformers on two ranks, and the whole model."""
        make, options = MODELS[case]
        path = self.folder / case
        if self.rank == 0 and not path.exists():
            _random_model(make()).save_pretrained(path)
        dist.barrier()
        config = DistributedConfig(**{"tp_size": SIZE, **options, **changes})
        load = tf.AutoModelForCausalLM.from_pretrained
        return load(path, distributed_config=config).eval(), load(path).eval()

    @contextmanager
    def made_plain(self, model: nn.Module) -> Iterator[Sharded]:
        group = find_group(model)
        assert group is not None
        communicator = Communicator(group, torch.device("cpu"))
        sharded = plain(model, communicator.name)
        try:
            yield sharded
        finally:
            sharded.restore()
            communicator.close()

    def model(self, case: str) -> dict[str, Any]:
        """A model before, during and after its parallelism is made plain."""
        model, whole = self.load(case)
        before, state = _logits(model), _state(model)
        with self.made_plain(model) as sharded, Experts(model).routed():  # as engines run it
            facts = {
                "rank": tuple(sharded.share[1:]),
                "logits": _logits(model),
                "sums": _num_sums(model),
                "left": [n for n, p in model.named_parameters() if type(p) is not nn.Parameter],
                "shared_storage": [n for n, p in model.named_parameters() if not _owns_storage(p)],
                "hooked": [n for n, m in model.named_modules() if m._backward_hooks],
                "group_while_plain": find_group(model),
            }
            sharded.sums.restore()
            facts |= {"apart": _num_sums(model), "logits_apart": _logits(model)}
        sharded.restore()  # a second call
        return facts | {
            "whole": _logits(whole),
            "styles": sorted({f"{type(m).__name__} {style}" for m, style in _styles(model)}),
            "changed": _differences(state, _state(model)),
            "same_after": torch.equal(before, _logits(model)),
        }

    def weights(self) -> dict[str, Any]:
        """Weights written while plain, in every possible way, are in HF's parameters afterwards."""
        model, _ = self.load("tied")
        layer = model.model.layers[0]
        modules = {
            "in_place": layer.self_attn.q_proj,
            "moved": layer.self_attn.o_proj,
            "through_dtensor": layer.mlp.up_proj,
            "replaced": layer.mlp.gate_proj,
            "converted": layer.mlp.down_proj,
            "tied": model.lm_head,
        }
        dtensors = {key: module.weight for key, module in modules.items()}
        expected = {key: d.to_local().detach().clone() * 2 for key, d in dtensors.items()}
        with self.made_plain(model), torch.no_grad():
            modules["in_place"].weight.mul_(2)
            modules["moved"].weight.data = modules["moved"].weight.data.clone()  # as for joined weights
            modules["moved"].weight.mul_(2)
            dtensors["through_dtensor"].mul_(2)
            modules["replaced"].weight = nn.Parameter(modules["replaced"].weight * 2)
            modules["converted"].weight.data = modules["converted"].weight.data.double() * 2
            modules["tied"].weight.mul_(2)
            modules["in_place"].weight.requires_grad_(False)
            tied_while_plain = modules["tied"].weight is model.model.embed_tokens.weight
            moved = (modules["moved"].weight, dtensors["moved"].to_local())
            stored_once = moved[0].data_ptr() == moved[1].data_ptr()
        locals_ = {key: module.weight.to_local() for key, module in modules.items()}
        return {
            "wrong": [k for k, local in locals_.items() if not torch.equal(local, expected[k].to(local.dtype))],
            "stored_once": stored_once,
            "others": [key for key, module in modules.items() if module.weight is not dtensors[key]],
            "dtypes": [modules["converted"].weight.dtype, locals_["converted"].dtype, locals_["moved"].dtype],
            "frozen": [key for key, module in modules.items() if not module.weight.requires_grad],
            "tied": [tied_while_plain, model.model.embed_tokens.weight is dtensors["tied"]],
        }

    def refused(self) -> dict[str, Any]:
        """Unknown styles are refused; the message names each once."""
        model, _ = self.load("qwen3")
        mesh = model.lm_head.weight.device_mesh
        layers = model.model.layers
        ALL_PARALLEL_STYLES["packed_rowwise"].install_forward(layers[1].mlp, mesh)
        _OtherStyle().install_forward(layers[2].mlp, mesh)
        ColwiseParallel(use_local_output=False).install_forward(layers[3].mlp, mesh)
        del layers[3].mlp.up_proj.__dict__["forward"]
        state = _state(model)
        message = _error(lambda: plain(model, self.name))
        return {"message": message, "changed": _differences(state, _state(model))}

    def half_way(self) -> dict[str, Any]:
        """An error in the middle of `plain` leaves the model unchanged."""
        model, _ = self.load("qwen3")
        state, calls = _state(model), []
        original = Sharded._replace_parameters

        def failing(self: Sharded, module: nn.Module) -> None:
            original(self, module)
            calls.append(module)
            if module is model.model.layers[2].self_attn.v_proj:
                raise RuntimeError("in the middle")

        Sharded._replace_parameters = failing
        try:
            message = _error(lambda: plain(model, self.name))
        finally:
            Sharded._replace_parameters = original
        return {"message": message, "changed": _differences(state, _state(model)), "calls": len(calls)}

    def traced(self) -> dict[str, Any]:
        """The layers traced as one graph, for any number of tokens."""
        model, _ = self.load("qwen3")
        del model.model.layers[2:]
        graphs = []

        def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph

        def stack(ids: torch.Tensor) -> torch.Tensor:
            return model.model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]

        with self.made_plain(model), torch.no_grad():
            compiled = torch.compile(stack, backend=keep, fullgraph=True)
            ids = IDS.flatten()
            torch._dynamo.mark_dynamic(ids, 0)
            equal = [torch.equal(compiled(x), stack(x)) for x in (ids, IDS[0].clone())]
        called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        return {
            "equal": equal,
            "graphs": len(graphs),
            "reduces": sum("all_reduce" in name for name in called),
            "distributed": [name for name in called if "c10d" in name or "dtensor" in name.lower()],
        }

    def deferred(self) -> dict[str, Any]:
        """Mixtures of experts that apply tanh to the shared expert's output, shift it slightly, or add a bias to it."""
        model, _ = self.load("glm4_moe")
        blocks = [layer.mlp for layer in model.model.layers[1:]]
        for block, after in zip(blocks, (nn.Tanh(), _Shift()), strict=False):
            block.shared_experts = nn.Sequential(block.shared_experts, after)
        blocks[2].shared_experts.down_proj.bias = nn.Parameter(torch.arange(float(model.config.hidden_size)).cos())
        before, graphs = _logits(model), []
        x = torch.arange(2.0 * model.config.hidden_size).sin().view(1, 2, -1)

        def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs.append(graph)
            return graph

        with self.made_plain(model), Experts(model).routed(), torch.no_grad():
            logits, counts = _logits(model), [_num_sums(block, x) for block in blocks]
            traced = torch.compile(lambda x: blocks[2](x), backend=keep, fullgraph=True)
            equal = torch.equal(traced(x), blocks[2](x))
        called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        return {
            "error": float((logits - before).abs().max() / before.abs().max()),
            "counts": counts,
            "traced": (equal, len(graphs), sum("all_reduce" in name for name in called)),
            "left": [block for block in blocks if "forward" in vars(block)],
        }

    def saved(self) -> dict[str, Any]:
        """A checkpoint saved while the parallelism is plain has whole weights."""
        model, whole = self.load("tied")
        with self.made_plain(model):
            keys = [n for n, t in model.state_dict().items() if isinstance(t, DTensor)]
            model.save_pretrained(self.folder / "saved")
        dist.barrier()
        again = tf.AutoModelForCausalLM.from_pretrained(self.folder / "saved").eval()
        left = [n for n, m in model.named_modules() if m._state_dict_hooks]
        return {"sharded": len(keys), "equal": torch.equal(_logits(again), _logits(whole)), "left": left}

    def by_hand(self) -> dict[str, Any]:
        """Styles that no model here uses: compare HF's output with ours."""
        mesh = init_device_mesh("cpu", (SIZE,))
        torch.manual_seed(self.rank)
        model = nn.ModuleDict({"all_reduce": nn.Linear(8, 8), "moe_identity_expert": nn.Identity()})
        for name, module in model.items():
            ALL_PARALLEL_STYLES[name].install_forward(module, mesh)
        x = torch.arange(24.0).view(3, 8)
        with torch.no_grad():
            before = {name: module(x) for name, module in model.items()}
            with self.made_plain(model):
                return {name: torch.equal(module(x), before[name]) for name, module in model.items()}

    def other_ways(self) -> dict[str, Any]:
        """Models parallelised in other ways."""
        flat, _ = self.load("llama")
        flat._device_mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "tp"))
        mixed, _ = self.load("llama")
        norm, own = mixed.model.norm, init_device_mesh("cpu", (SIZE,), mesh_dim_names=("mine",))
        norm.weight = nn.Parameter(DTensor.from_local(norm.weight.detach(), own))
        stages, _ = self.load("llama", tp_size=None, pp_size=SIZE)
        pieces, _ = self.load("llama", tp_size=None, fsdp_size=SIZE)
        models = {"flat": flat, "mixed": mixed, "stages": stages, "pieces": pieces}
        return {name: _error(lambda model=model: find_group(model)) for name, model in models.items()}


class _OtherStyle(ColwiseParallel):
    """A user's own style."""


class _Shift(nn.Module):
    """Adds too little to be seen in sums that are compared."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6


def _random_model(config: tf.PretrainedConfig) -> tf.PreTrainedModel:
    """A model in which no weight, bias or norm is zero or one."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = noise * 0.6 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + noise / 8
    return model


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def _num_sums(module: nn.Module, x: torch.Tensor = IDS) -> int:
    """Return the number of all-reduces in a forward."""
    calls: list[int] = []
    run = Communicator.all_reduce

    def noted(self: Communicator, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return run(self, x)

    with mock.patch.object(Communicator, "all_reduce", noted), torch.no_grad():
        module(x)
    return len(calls)


def _owns_storage(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _styles(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that have HF's closure, with the name of its style and options."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if forward is not None:
            cells = dict(zip(forward.__code__.co_freevars, (c.cell_contents for c in forward.__closure__), strict=True))
            options = [str(value) for key, value in vars(cells["self"]).items() if key.endswith("put_layouts")]
            yield module, " ".join([type(cells["self"]).__name__, *options])


def _state(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """What `restore` must restore, by name: objects that must be the same, values that must be equal."""
    state: dict[str, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        state[name] = (module.__dict__.get("forward"), getattr(module, "padding_idx", None))
        state[name + " hooks"] = (None, dict(module._backward_hooks))
        state[name + " state hooks"] = (None, dict(module._state_dict_hooks))
        for key, p in module._parameters.items():
            local = p.to_local() if isinstance(p, DTensor) else p
            state[f"{name}.{key}"] = (p, None if local is None else local.detach().clone())
    return state


def _differences(before: dict[str, tuple[Any, Any]], after: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return the names whose object or value differs."""

    def differ(a: Any, b: Any) -> bool:
        return not torch.equal(a, b) if isinstance(a, torch.Tensor) else a != b

    names = before.keys() | after.keys()
    none = (None, None)
    pairs = {name: (before.get(name, none), after.get(name, none)) for name in names}
    return sorted(name for name, (a, b) in pairs.items() if a[0] is not b[0] or differ(a[1], b[1]))


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AttachError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    torch._C._get_accelerator = lambda: torch.device("cpu")  # transformers calls it; CUDA builds give cuda, GPU or not
    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=30))
    cases = Cases(folder, rank)
    others = ("weights", "refused", "half_way", "traced", "deferred", "saved", "by_hand", "other_ways")
    runs: dict[str, Callable[[], Any]] = {case: lambda case=case: cases.model(case) for case in MODELS}
    runs |= {name: getattr(cases, name) for name in others}
    facts: dict[str, Any] = {}
    for case, run in runs.items():
        try:
            facts[case] = run()
        except Exception:
            facts[case] = traceback.format_exc()
    torch.save(facts, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
