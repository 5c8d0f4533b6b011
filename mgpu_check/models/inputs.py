"""A batch and a loss for a model that comes without: tried from small shapes to larger ones, on the model itself.

`recipe_of` runs in a rank. It returns plain data. `make_batch` makes each batch from them, and `loss_of` the loss.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mgpu_check.gates.gate_arguments import first_line
from mgpu_check.models.targets import IMAGE, UnusableModel, library_of, member, module_of

LENGTH = 8
"""Length of sequences."""

LONG = 128
"""Length of sequences that ranks divide: torch cuts each rank's 64 tokens in two, and its kernel has rows of 32."""

_SAMPLES = 2  # of a trial
_BATCHES = ("batch", "make_batch", "example_batch", "example_inputs")
_LOSSES = ("loss", "loss_fn", "compute_loss")
_LABELS = ("labels", "targets", "target")


@dataclass(frozen=True)
class Input:
    """An argument of the model: normal numbers, or integers from 0 to below `high` if that is above 0."""

    name: str  # keyword of forward
    shape: tuple[int, ...]  # without the dimension of samples
    high: int = 0

    def __str__(self) -> str:
        kind = f"integers below {self.high}" if self.high else "normal numbers"
        return f"{self.name} [{', '.join(['n', *map(str, self.shape)])}] of {kind}"


@dataclass(frozen=True)
class Recipe:
    """How to make batches, and what to minimize.

    Attributes:
        inputs: the arguments of the model, unless `batch` makes them.
        target: shape of a drawn target without the samples, for a model without a loss of its own.
        batch: "module:function" of the user, ``function(n)``: a mapping of arguments of the model, a pair of inputs and
            target, or one tensor.
        loss: "module:function" of the user, ``function(output, target)``; without a target it gets the inputs.
    """

    inputs: tuple[Input, ...] = ()
    target: tuple[int, ...] | None = None
    batch: str = ""
    loss: str = ""

    def __str__(self) -> str:
        batch = f"{self.batch}(n)" if self.batch else "; ".join(map(str, self.inputs))
        shape = f"mean squared difference from a drawn target [{', '.join(['n', *map(str, self.target or ())])}]"
        return f"batch: {batch}\nloss: {self.loss or ('of the model itself' if self.target is None else shape)}"


def with_long_sequences(recipe: Recipe) -> Recipe:
    long = (replace(each, shape=(LONG,)) if each.shape == (LENGTH,) else each for each in recipe.inputs)
    return replace(recipe, inputs=tuple(long))


def function_of(place: str) -> Callable[..., Any]:
    return member(module_of(place), place.partition(":")[2])


def make_batch(recipe: Recipe, samples: int) -> dict[str, Any]:
    """Return a global batch: {"inputs": arguments of the model by name, "target": the target, if there is one}."""
    if recipe.batch:
        batch = function_of(recipe.batch)(samples)
        if isinstance(batch, Mapping):
            return {"inputs": dict(batch)}
        inputs, *rest = batch if isinstance(batch, tuple | list) else (batch,)
        parts: dict[str, Any] = {"inputs": {"": inputs}}
        parts |= {"target": rest[0] if len(rest) == 1 else tuple(rest)} if rest else {}
    else:
        parts = {"inputs": {each.name: _drawn(each, samples) for each in recipe.inputs}}
    if recipe.target is not None:
        parts["target"] = torch.randn(samples, *recipe.target)
    return parts


def _drawn(entry: Input, samples: int) -> torch.Tensor:
    shape = samples, *entry.shape
    return torch.randint(entry.high, shape) if entry.high else torch.randn(shape)


def call(model: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """Call a model on a batch of `make_batch`."""
    inputs = dict(batch["inputs"])
    positional = [inputs.pop("")] if "" in inputs else []
    return model(*positional, **inputs)


def loss_of(recipe: Recipe, output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss as a scalar: the mean over samples.

    Raises:
        UnusableModel: the output has no loss, or the target does not fit it.
    """
    if recipe.loss:
        loss = function_of(recipe.loss)(output, batch.get("target", batch["inputs"]))
    elif recipe.target is not None:
        first = _first(output)
        loss = F.mse_loss(first, batch["target"].to(first.dtype))
    elif (own := _own_loss(output)) is not None:
        loss = own
    else:
        target = batch.get("target")
        if target is None:
            raise UnusableModel("the model returns no loss, and the batch has no target; give --loss=module:function")
        first = _first(output)
        loss = F.mse_loss(first, target) if target.is_floating_point() else F.cross_entropy(first, target)
    return loss.mean()


def _leaves(output: Any) -> list[torch.Tensor]:
    parts = dict(output) if isinstance(output, Mapping) else output
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    scalars = [leaf for leaf in _leaves(output) if leaf.numel() == 1 and leaf.requires_grad]
    return scalars[0] if len(scalars) == 1 else None


def _first(output: Any) -> torch.Tensor:
    leaves = [leaf for leaf in _leaves(output) if leaf.requires_grad or not torch.is_grad_enabled()]
    if not leaves:
        raise UnusableModel(f"the model returns {type(output).__name__} without a tensor that depends on parameters")
    return leaves[0]


def recipe_of(model: nn.Module, target: str, batch: str = "", loss: str = "") -> Recipe:
    """Find inputs that the model accepts, and its loss.

    Args:
        target: the target of the model; functions beside it with the names in `_BATCHES` and `_LOSSES` are taken.
        batch, loss: "module:function" of the user.

    Raises:
        UnusableModel: nothing that was tried runs. The message has the first errors.
    """
    place, module = target.partition(":")[0], module_of(target)
    functions = [] if library_of(target) else inspect.getmembers(module, inspect.isfunction)
    beside = {name for name, value in functions if value.__module__ == module.__name__}
    batch = batch or next((f"{place}:{name}" for name in _BATCHES if name in beside), "")
    loss = loss or next((f"{place}:{name}" for name in _LOSSES if name in beside), "")
    candidates: Iterator[tuple[Input, ...]] = iter([()]) if batch else _candidates(model)
    problems: list[str] = []
    thin: Recipe | None = None
    for inputs in itertools.islice(candidates, 64):
        recipe = Recipe(inputs, batch=batch, loss=loss)
        try:
            with _normalized(model) as counts:
                recipe = _completed(model, recipe)
            if batch or min(counts, default=_SAMPLES) >= 2 * _SAMPLES:
                return recipe
            thin = thin or recipe
        except Exception as error:  # code of the user and of libraries raises anything
            if batch:
                raise
            problems.append(f"{'; '.join(map(str, inputs))}: {type(error).__name__}: {first_line(error)}")
    if thin is not None:
        return thin
    latest = "\n".join(f"  {problem:.160}" for problem in problems[:4])
    raise UnusableModel(
        f"no inputs for {type(model).__name__} are known; {len(problems)} were tried, at first:\n{latest}\n"
        "give --batch=module:function, where function(n) returns n samples as a mapping of arguments"
    )


@contextlib.contextmanager
def _normalized(model: nn.Module) -> Iterator[list[int]]:
    """Give a list that gets the number of values of a channel that each batch norm normalizes."""
    counts: list[int] = []

    def note(layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        counts.append(inputs[0].numel() // inputs[0].shape[1])

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _completed(model: nn.Module, recipe: Recipe) -> Recipe:
    """Return the recipe with its target, after a forward and a backward pass."""
    with torch.random.fork_rng(devices=[]):
        batch = make_batch(recipe, _SAMPLES)
        output = call(model, batch)
    if not recipe.loss and "target" not in batch and _own_loss(output) is None:
        first = _first(output)
        if first.ndim and len(first) != _SAMPLES:
            raise UnusableModel(f"the output has the shape {list(first.shape)} for {_SAMPLES} samples")
        recipe = replace(recipe, target=tuple(first.shape[1:]))
        batch["target"] = torch.zeros_like(first)
    loss = loss_of(recipe, output, batch)
    if not math.isfinite(loss.item()):
        raise UnusableModel(f"the loss is {loss.item()}")
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    if all(gradient is None for gradient in gradients):
        raise UnusableModel("no parameter gets a gradient")
    return recipe


def _candidates(model: nn.Module) -> Iterator[tuple[Input, ...]]:
    """Yield arguments to try."""
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    main = getattr(model, "main_input_name", "")
    names = [main] if main in parameters else required or [*parameters][:1]
    shapes = [_shapes(model, name) for name in names]
    labels = next((name for name in _LABELS if name in parameters and name not in names), "")
    for choice in itertools.product(*shapes):
        inputs = tuple(Input(name, *shape) for name, shape in zip(names, choice, strict=True))
        for label in _labels(model) if labels else []:
            yield (*inputs, Input(labels, *label))
        yield inputs


def _config(model: nn.Module, name: str, default: int = 0) -> int:
    value = getattr(getattr(model, "config", None), name, None)
    return value if isinstance(value, int) else default


def _labels(model: nn.Module) -> list[tuple[tuple[int, ...], int]]:
    embedding = next((each for each in model.modules() if isinstance(each, nn.Embedding)), None)
    tokens = _config(model, "vocab_size") or (embedding.num_embeddings if embedding else 0)
    classes = _config(model, "num_labels")
    shapes: list[tuple[tuple[int, ...], int]] = [((LENGTH,), tokens)] if tokens else []
    return [*shapes, *([((), classes), ((LENGTH,), classes)] if classes else [])]


def _shapes(model: nn.Module, name: str) -> list[tuple[tuple[int, ...], int]]:
    """Return shapes and upper limits to try for one argument: by its name, else by the first layers of the model."""
    if name in ("timestep", "timesteps", "t"):
        return [((), 1000)]
    if name == "encoder_hidden_states":
        return [((LENGTH, _config(model, "cross_attention_dim", 32)), 0)]
    if name == "input_features":
        return [((_config(model, "num_mel_bins", 8), 2 * _config(model, "max_source_positions", LENGTH)), 0)]
    shapes: list[tuple[tuple[int, ...], int]] = []
    for layer in model.modules():
        shapes += [shape for shape in _of_layer(layer) if shape not in shapes]
        if len(shapes) >= 8:
            break
    return shapes or [((LENGTH,), 0)]


def _of_layer(layer: nn.Module) -> list[tuple[tuple[int, ...], int]]:
    if isinstance(layer, nn.Embedding):
        return [((LENGTH,), layer.num_embeddings)]
    if isinstance(layer, nn.Linear):
        return [((layer.in_features,), 0), ((LENGTH, layer.in_features), 0)]
    if isinstance(layer, nn.modules.conv._ConvNd):
        dimensions = len(layer.kernel_size)
        return [((layer.in_channels, *(size,) * dimensions), 0) for size in (8, 28, IMAGE, 64, 224)]
    if isinstance(layer, nn.RNNBase):
        return [((LENGTH, layer.input_size), 0)]
    return []
