"""Weights that a library quantises: which of a module's they are, and what they then look like.

Promises: what is quantised, and how, is the library's own choice for the same settings, so that a
module built here without weights wants exactly what `from_pretrained` of its class gives; nothing
is imported of the library until a model asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from diffusers import ModelMixin
from diffusers.quantizers import DiffusersAutoQuantizer
from torch import nn

from offload_protocol.errors import ModelLoadFailed
from offloadd.channel.specs import QuantizationSpec

METHOD = "torchao"
"""The one `quant_method` of stored configurations that is hosted."""

_NOT_CONVERTED = "modules_to_not_convert"


def check_library(model: str) -> None:
    """Raise `ModelLoadFailed` that says what to install where the library is not there."""
    if find_spec(METHOD) is None:
        raise ModelLoadFailed(
            f"model {model!r} is to be quantised, which takes {METHOD}, and that is not installed",
            hint="install it beside the daemon: pip install 'offloadd[quantization]'",
            details={"kind": "not_installed", "package": METHOD},
        )


def library_version() -> str:
    """The library's version, on which quantised bytes depend; empty where it is not there."""
    try:
        return version(METHOD)
    except PackageNotFoundError:
        return ""


def settings_for(kind: type[Any], quantization: QuantizationSpec) -> Any:
    """What `from_pretrained` of a class of diffusers or transformers takes to quantise."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    configs: dict[str, Any] = {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}
    # Left out, it would change how inductor compiles everything else of the process.
    quant_type = configs[quantization.type](set_inductor_config=False)
    skip = list(quantization.skip) or None
    if issubclass(kind, ModelMixin):
        from diffusers import TorchAoConfig

        return TorchAoConfig(quant_type, modules_to_not_convert=skip)
    from transformers import TorchAoConfig as OfTransformers

    return OfTransformers(quant_type, modules_to_not_convert=skip)


def quantise_blank(module: nn.Module, settings: Any, *, is_stored: bool) -> int:
    """Give a module without weights those weights that quantising leaves in it; says how many.

    `settings` are an object of `settings_for`, or what a stored configuration says (`is_stored`).
    Raises what the library raises for settings that it does not know.
    """
    from torchao.quantization import quantize_

    quantizer = _quantizer(module, settings, is_stored=is_stored)
    config = quantizer.quantization_config.get_apply_tensor_subclass()
    if hasattr(config, "set_inductor_config"):
        config.set_inductor_config = False
    wanted = [
        name for name, one in module.named_parameters() if _is_wanted(module, quantizer, name, one)
    ]
    count = 0
    for name in wanted:
        layer = module.get_submodule(name.rpartition(".")[0])
        before = layer._parameters["weight"]
        quantize_(layer, config)
        count += layer._parameters["weight"] is not before
    module.hf_quantizer = quantizer
    return count


def _quantizer(module: Any, settings: Any, *, is_stored: bool) -> Any:
    """The library's object that decides, prepared for the module as `from_pretrained` does."""
    settings = dict(settings) if isinstance(settings, Mapping) else settings
    if isinstance(module, ModelMixin):
        kept = getattr(type(module), "_keep_in_fp32_modules", None) or []
        quantizer = DiffusersAutoQuantizer.from_config(settings, pre_quantized=is_stored)
        quantizer.validate_environment()
        quantizer.preprocess_model(
            model=module,
            device_map=None,
            keep_in_fp32_modules=[kept] if isinstance(kept, str) else list(kept),
        )
    else:
        from transformers.quantizers import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=is_stored)
        quantizer.validate_environment()
        quantizer.preprocess_model(model=module)
        module.config.quantization_config = quantizer.quantization_config
    return quantizer


def _is_wanted(module: nn.Module, quantizer: Any, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, ModelMixin):
        found = quantizer.check_if_quantized_param(module, parameter, name, {})
    else:
        found = quantizer.param_needs_quantization(module, name)
    return bool(found)
