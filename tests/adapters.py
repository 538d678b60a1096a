"""Minimal LoRA layers with the plain attributes and the arithmetic of PEFT's."""

import json

import torch
from safetensors.torch import save_file
from torch import nn


class LoraLinear(nn.Module):
    """A linear layer with named low-rank adapters: adds the `active` ones; the `merged` ones are in its weight."""

    def __init__(self, base, names="ab", rank=4, dropout=0.3, seed=0):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B, self.dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.scaling, self.active, self.merged, self.disabled = {}, ["a"], [], False
        self.register_buffer("offset", torch.zeros(base.out_features))
        for i, name in enumerate(names):
            self.add(name, rank, dropout, seed + i)

    def add(self, name, rank=4, dropout=0.3, seed=9):
        generator = torch.Generator().manual_seed(seed)
        a = nn.Linear(self.base_layer.in_features, rank, bias=False)
        b = nn.Linear(rank, self.base_layer.out_features, bias=False)
        with torch.no_grad():
            for layer in (a, b):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 0.3)
        self.lora_A[name], self.lora_B[name], self.dropout[name] = a, b, nn.Dropout(dropout)
        self.to(self.offset.device)
        self.scaling[name] = 2.0

    def forward(self, x):
        out = self.base_layer(x) + self.offset
        if self.disabled or self.merged:
            return out
        for name in self.active:
            out = out + self.lora_B[name](self.lora_A[name](self.dropout[name](x))) * self.scaling[name]
        return out

    def merge(self, sign=1):
        """Add the active adapters to the base weights through `.data`, as PEFT does."""
        for name in self.active:
            self.base_layer.weight.data += (
                sign * self.scaling[name] * self.lora_B[name].weight.data @ self.lora_A[name].weight.data
            )
        self.merged = list(self.active) if sign > 0 else []


def with_lora(model, **settings):
    """Add adapters to two layers of a tiny Llama; return the model in eval mode."""
    for i, layer in enumerate(model.model.layers[:2]):
        layer.mlp.up_proj = LoraLinear(layer.mlp.up_proj, seed=10 * i, **settings)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, seed=10 * i + 5, **settings)
    return model.eval()


def save_lora(model, folder, kinds=("q_proj", "down_proj"), rank=4, seed=0):
    """Save an adapter for some linear layers in PEFT's format; return its folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(kinds):
            for part, shape in {"A": (rank, module.in_features), "B": (module.out_features, rank)}.items():
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora_layers(model):
    return [m for m in model.modules() if isinstance(m, LoraLinear)]
