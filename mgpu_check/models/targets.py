"""The model that a command line names: loaded by name, and built small, with the same values on each rank.

A target is ``package.module:name``, ``file.py:name`` or ``LIBRARY:name``. The name is a function that returns a module,
or a class of modules that needs no arguments. `LIBRARIES` has the libraries that bring models by name: theirs are built
from a small configuration with random weights, and nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from mgpu_check.gates.gate_arguments import first_line
from mgpu_check.small_models import small_settings

IMAGE = 32
"""Height and width of images, in pixels."""

_SETTINGS = {"image_size": IMAGE, "patch_size": 8, "max_source_positions": 8, "num_mel_bins": 8, "num_labels": 4}
"""Settings of transformers that also make the inputs small."""

_STAGES = {"hidden_sizes": 32, "depths": 1, "num_heads": 4}
"""Settings that have a size for each stage of a network."""


class UnusableModel(ValueError):
    """The target names no model that can be built."""


def library_of(target: str) -> str:
    """Return the library that brings the model; "" for a model of the user."""
    name = target.partition(":")[0]
    return name if name in LIBRARIES else ""


def module_of(target: str) -> ModuleType:
    """Import the module, the file or the library of a target.

    Raises:
        UnusableModel: it is not written as a target, or cannot be found.
    """
    place, colon, name = target.partition(":")
    if not (place and colon and name):
        libraries = ", ".join(f"{library}:NAME" for library in LIBRARIES)
        raise UnusableModel(f"{target!r} names no model; give package.module:NAME, file.py:NAME, or {libraries}")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UnusableModel(f"there is no file {place}; give the path of a Python file before the colon")
        if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path):
            return sys.modules[path.stem]
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        advice = (
            f"pip install {place}"
            if place in LIBRARIES
            else "start in its directory, or give its file: DIR/FILE.py:NAME"
        )
        raise UnusableModel(f"{target!r}: there is no module {error.name!r}; {advice}") from None


def build(target: str) -> nn.Module:
    """Build the model, without dropout: ranks draw other masks than one device.

    Raises:
        UnusableModel: the name is missing, needs arguments, or gives no module.
    """
    module = module_of(target)
    name = target.partition(":")[2]
    make = LIBRARIES.get(library_of(target), _of_user)
    model = make(module, name)
    if not isinstance(model, nn.Module):
        raise UnusableModel(f"{target} gives a {type(model).__name__}; name what gives an nn.Module")
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
    return model


def member(module: ModuleType, name: str) -> Any:
    """Return what a module has under a dotted name."""
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        models = [value.__name__ for value in own if isinstance(value, type) and issubclass(value, nn.Module)]
        known = f"it has {', '.join(models[:8])}" if models else "it defines no module of torch"
        raise UnusableModel(f"{module.__name__} has no {name}; {known}") from None


def parallelism_of(target: str) -> tuple[Callable[[Any, Any], Any] | None, tuple[tuple[str, int], ...]]:
    """Return the function ``parallelize(model, mesh)`` beside a model of the user, and the axes of its mesh.

    Raises:
        UnusableModel: the function is there, and no usable MESH.
    """
    module = module_of(target)
    function = None if library_of(target) else getattr(module, "parallelize", None)
    if function is None:
        return None, ()
    mesh = getattr(module, "MESH", None)
    if not isinstance(mesh, dict) or not mesh or not all(type(size) is int and size > 0 for size in mesh.values()):
        raise UnusableModel(
            f"{module.__name__} has parallelize, and MESH = {mesh!r}; give axes and their sizes: "
            'MESH = {"dp": 2, "tp": 2}'
        )
    return function, tuple(mesh.items())


def _of_user(module: ModuleType, name: str) -> Any:
    maker = member(module, name)
    if isinstance(maker, nn.Module):
        raise UnusableModel(f"{module.__name__}:{name} is a module already; name a function that builds it anew")
    if isinstance(maker, type) and hasattr(maker, "config_class"):  # a model of the user, as transformers has them
        return _configured(maker)
    if not callable(maker):
        raise UnusableModel(f"{module.__name__}:{name} is a {type(maker).__name__}; name a function or a class")
    parameters = inspect.signature(maker).parameters.values()
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [each.name for each in parameters if each.default is each.empty and each.kind not in positional]:
        example = f"def build():\n    return {name}({', '.join(f'{argument}=…' for argument in needed)})"
        raise UnusableModel(f"{name} needs {', '.join(needed)}; name a function that builds it, such as\n\n{example}")
    return maker()


def _configured(cls: Any) -> nn.Module:
    """Build a model of transformers from a small configuration, with each rate of dropout 0."""
    settings = small_settings(cls.config_class())
    config = cls.config_class(**settings)
    for key, value in _SETTINGS.items():
        if hasattr(config, key):
            default = getattr(config, key)  # some sizes are [height, width]
            settings[key] = [value] * len(default) if isinstance(default, list | tuple) else value
    if getattr(config, "is_encoder_decoder", False):
        settings["decoder_start_token_id"] = 0
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            settings[key] = 0.0
        if key in _STAGES and isinstance(value, list):
            settings[key] = [_STAGES[key]] * len(value)
    try:
        model: nn.Module = cls(cls.config_class(**settings))
    except Exception as error:  # configurations check their values in many ways
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UnusableModel(
            f"{cls.__name__} cannot be built with small sizes: {problem:.200}; name a function that builds it"
        ) from error
    return model


def _transformers(module: ModuleType, name: str) -> nn.Module:
    cls = getattr(module, name, None)
    if not hasattr(cls, "config_class"):
        raise UnusableModel(
            f"transformers {module.__version__} has no model {name}; give a class, such as LlamaForCausalLM"
        )
    return _configured(cls)


def _torchvision(module: ModuleType, name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    options = {"image_size": IMAGE} if name.startswith("vit") else {}
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=8, **options)
    except ValueError:
        raise UnusableModel(f"torchvision has no model {name}; torchvision.models.list_models() has all") from None
    return model


def _timm(module: ModuleType, name: str) -> nn.Module:
    if name not in module.list_models():
        raise UnusableModel(f"timm has no model {name}; timm.list_models() has the names")
    options = {"img_size": IMAGE} if "vit" in name or "deit" in name else {}
    return module.create_model(name, pretrained=False, num_classes=8, **options)


_UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}


def _diffusers(module: ModuleType, name: str) -> nn.Module:
    cls = getattr(module, name, None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise UnusableModel(f"diffusers {module.__version__} has no model {name}; give a class, such as UNet2DModel")
    defaults = {each.name: each.default for each in inspect.signature(cls).parameters.values()}
    options: dict[str, Any] = {key: value for key, value in _UNET.items() if key in defaults}
    for key in ("down_block_types", "up_block_types"):
        if key in defaults:
            options[key] = tuple(sorted(set(defaults[key])))[:2] * (2 // min(2, len(set(defaults[key]))))
    if "cross_attention_dim" in defaults:
        options["cross_attention_dim"] = 32
    return cls(**options)


LIBRARIES: dict[str, Callable[[ModuleType, str], nn.Module]] = {
    "transformers": _transformers,
    "torchvision": _torchvision,
    "timm": _timm,
    "diffusers": _diffusers,
}
"""Library -> the function that builds one of its models by name."""
