"""Checks where a model's weights are and in what form: reasons why kernels and graphs could not read them.

An engine keeps one KV pool on one device, and graphs that hold the addresses of weights. So weights must be on that
device, stay there, and be plain floating-point tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from specdec.reach.checkpoints.tensors import FLOATS
from specdec.reach.targets.admission.quantised import is_quantised, quantised_reasons

PACKED = (torch.int8, torch.uint8, torch.int32)  # matrices of these dtypes hold packed weights (GPTQ, AWQ)
QUANTISERS = ("bitsandbytes", "optimum.quanto", "quanto", "torchao", "torch.ao", "auto_gptq", "gptqmodel", "awq", "hqq")
UNQUANTISED = (
    "use a checkpoint that is not quantised; bitsandbytes models have model.dequantize(), and FP8 and MXFP4 ones load "
    "with dequantize=True in their quantization_config"
)


def placement_reasons(model: nn.Module) -> list[str]:
    """Return the reasons that are visible without running `model`."""
    return [*_device_reasons(model), *_form_reasons(model), *_compiled_reasons(model)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and buffers with more than one element, by name."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.dim())


def _device_reasons(model: nn.Module) -> Iterator[str]:
    offloaded = [name or "the model" for name, m in model.named_modules() if _offloads(getattr(m, "_hf_hook", None))]
    by_device: dict[str, list[str]] = {}
    for name, tensor in _tensors(model):
        by_device.setdefault(str(tensor.device), []).append(name)
    missing = by_device.pop("meta", [])
    if offloaded:
        yield (
            f"accelerate offloads {offloaded[0]} ({len(offloaded)} modules): weights leave the device between "
            "forwards; load the whole model onto one device (device_map={'': 0}, or .to(device) without offloading)"
        )
    elif missing:
        yield f"{missing[0]} is on the meta device ({len(missing)} tensors): it holds no values; load the weights first"
    if len(by_device) > 1:
        where = ", ".join(f"{names[0]} on {device}" for device, names in by_device.items())
        yield (
            f"it is on {len(by_device)} devices ({where}); an engine runs on one: load it with "
            "device_map={'': 0}, or move it with .to(device)"
        )


def _offloads(hook: Any) -> bool:
    """Return whether an accelerate hook loads weights for a forward, or offloads them after it."""
    inner = getattr(hook, "hooks", ())
    is_moving = type(hook).__name__ in ("CpuOffload", "LayerwiseCastingHook")
    return bool(getattr(hook, "offload", False)) or is_moving or any(_offloads(h) for h in inner)


def _form_reasons(model: nn.Module) -> Iterator[str]:
    method = _quantisation(getattr(model, "hf_quantizer", None))
    if is_quantised(model):
        yield from quantised_reasons(model)
        return
    if method:
        yield f"it is quantised ({method}): its weights are packed; {UNQUANTISED}"
        return
    foreign = [(n, m) for n, m in model.named_modules() if type(m).__module__.startswith(QUANTISERS)]
    if foreign:
        name, module = foreign[0]
        yield (
            f"{name} is a {type(module).__module__}.{type(module).__name__} ({len(foreign)} quantised modules): their "
            f"weights are packed; {UNQUANTISED}"
        )
        return
    odd = [(name, f"of {t.dtype}") for name, t in model.named_parameters() if t.dtype not in FLOATS]
    odd += [(name, f"of {b.dtype}") for name, b in model.named_buffers() if b.dtype in PACKED and b.dim() > 1]
    odd += [(n, f"a {type(p).__name__}") for n, p in model.named_parameters() if type(p) is not nn.Parameter]
    if odd:
        name, what = odd[0]
        yield (
            f"{name} is {what} ({len(odd)} such tensors): expected plain parameters of float64, float32, bfloat16 or "
            f"float16, not quantised or sharded ones; {UNQUANTISED}"
        )


def _quantisation(quantizer: Any) -> str:
    """Return the method by which transformers keeps a model quantised; "" if it was dequantised at load time."""
    config = getattr(quantizer, "quantization_config", None)
    method = getattr(config, "quant_method", None) or type(quantizer).__name__
    name = str(getattr(method, "value", method))
    return "" if quantizer is None or name == "gguf" or getattr(config, "dequantize", False) is True else name


def _compiled_reasons(model: nn.Module) -> Iterator[str]:
    """Yield a reason if compiled code contains attention, which cannot be routed there. Other modules may be
    compiled."""
    for name, module in model.named_modules():
        if _is_compiled(module) and any(hasattr(child, "layer_idx") for child in module.modules()):
            yield (
                f"{name or 'the model'} was compiled (torch.compile or .compile()), with attention inside: attach the "
                "model before it is compiled, and pass compile=True to attach()"
            )
            return


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    is_replaced = hasattr(forward, "_torchdynamo_orig_callable")
    return "_orig_mod" in module._modules or is_replaced or module.__dict__.get("_compiled_call_impl") is not None
