"""Train on one device, as the reference that every parallel form must match, bit for bit where no result rounds.

- In whole numbers: models with integer outputs, and integer gradients for integer parameters, inputs and targets. Each
  maps (batch, 16) to (batch, 4). Every order of summation, also over devices and ranks, gives the same bits. Gradients
  are computed in float64 on the CPU, shard by shard, where they are exact; so a wrong device cannot affect them. The
  optimizer's step, which may round, runs on the device itself, with exact gradients.
- Exactly: training of which no result rounds, by `ExactTraining`.
- BatchNorm with momentum=None, whose running statistics are the plain average over all batches so far.
- Steps of SGD, Adam and AdamW as torch documents them, in plain operators. The Python code of an optimizer is the same
  on each device, so its results on the CPU do not show that it is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_check.asserts.findings import Findings
from mgpu_check.asserts.models import assert_gradients_agree, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import GradientMismatch
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.training.cases import ExactTraining, WholeRun
from mgpu_check.oracles.training.training_steps import split, weighted
from mgpu_check.torch_hooks.tensors import copied

FEATURES = 16
CLASSES = 4
_SIDE = 4
_WORDS = 12
_WIDE = 4200  # hidden units of "wide": its first weight has 67,200 elements, to cover sizes above 64 Ki
PER_BATCH = (1 << 58) + 5
"""Increment of the count of "counting" per batch, in addition to the rows. At this magnitude float64 holds only
multiples of 64. The count starts between -3 and 3 and has up to 50 rows per batch, so a count that passes through
float64 comes back wrong."""


def draw(model: nn.Module, seed: int, most: int = 3) -> nn.Module:
    """Set each parameter and buffer of `model` to random integers from -`most` to `most`, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            drawn = torch.randint(-most, most + 1, value.shape, generator=generator)
            value.copy_(drawn > 0 if value.dtype == torch.bool else drawn)
    return model


def settle(model: nn.Module, most: int = 3) -> None:
    """Round each parameter to integers, and wrap them into -`most` to `most`, so that the next step is exact as
    well."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.remainder(parameter.round() + most, 2 * most + 1) - most)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Map integers of any shape to word indices, int64."""
    return x.detach().abs().long() * 3 % _WORDS


class Mixed(nn.Module):
    """Two layers in float32 and an inner layer in another dtype, as in models of mixed precision.
    In float64, the gradients of the inner layer need more than the 24 bits of float32."""

    def __init__(self, inner: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.inner = nn.Linear(8, 8).to(inner)
        self.last = nn.Linear(8, CLASSES)
        self.scale = (1 << 24) + 43 if inner == torch.float64 else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        inner = self.inner(hidden.detach().to(self.inner.weight.dtype) * self.scale)
        return torch.as_tensor(self.last(hidden + inner.remainder(64).to(hidden.dtype)))


class WholeLeNet(nn.Module):
    """Two convolutions with ReLU, and sum pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x.view(len(x), 1, _SIDE, _SIDE)))
        pooled = F.avg_pool2d(F.relu(self.second(hidden)), 1, divisor_override=1)
        return torch.as_tensor(self.last(pooled.flatten(1)))


class WholeResidual(nn.Module):
    """A residual block with a 1x1 convolution in its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 2, stride=2)
        self.block = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(4, 4, 1, stride=2)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = F.relu(self.stem(x.view(len(x), 1, _SIDE, _SIDE)))
        return torch.as_tensor(self.last(F.relu(self.block(stem) + self.shortcut(stem)).flatten(1)))


class Embedded(nn.Module):
    """A bag of words and an embedding with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 5, padding_idx=0)
        self.bag = nn.EmbeddingBag(_WORDS, 5, mode="sum")
        self.last = nn.Linear(10, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = _words(x)
        return torch.as_tensor(self.last(torch.cat([self.words(words).sum(1), self.bag(words)], 1)))


class Attention(nn.Module):
    """Linear attention over four tokens of four features. It has no softmax, because softmax rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(_SIDE, 3, bias=False) for _ in range(3))
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(len(x), _SIDE, _SIDE)
        attended = self.queries(tokens) @ (self.keys(tokens).transpose(1, 2) @ self.values(tokens))
        return torch.as_tensor(self.last(attended.sum(1)))


class Tied(nn.Module):
    """A language model whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, CLASSES, bias=False)
        self.output.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(F.relu(self.hidden(self.words(_words(x) % CLASSES).sum(1)))))


class Heads(nn.Module):
    """A trunk with three heads; each call uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 6)
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return torch.as_tensor(self.heads[head](F.relu(self.trunk(x))))


class Listed(nn.Module):
    """A model with its weights in a ParameterList and its biases in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, 6, CLASSES)
        self.weights = nn.ParameterList(torch.zeros(after, before) for before, after in pairwise(widths))
        self.biases = nn.ParameterDict({"first": torch.zeros(6), "last": torch.zeros(CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.linear(x, self.weights[0], self.biases["first"]))
        return torch.as_tensor(F.linear(hidden, self.weights[1], self.biases["last"]))


class Reused(nn.Module):
    """A model with a layer that is used twice, with checkpointed activations, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.twice = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=False)
        return torch.as_tensor(self.last(hidden))


class Counting(nn.Module):
    """A layer with statistics, updated in training only: rows (int64, see `PER_BATCH`), their sum (float32), flags
    (bool).

    The state dict does not contain the flags.
    """

    rows: torch.Tensor
    sums: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("rows", torch.tensor(0))
        self.register_buffer("sums", torch.zeros(CLASSES))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Before the update, so that the output depends on the statistics at the start of the call.
        out: torch.Tensor = self.layer(x) + self.sums.remainder(64) + self.rows.remainder(64)
        if self.training:
            with torch.no_grad():
                self.rows.add_(PER_BATCH + len(x))
                self.sums.add_(x[:, :CLASSES].sum(0))
                self.seen.logical_xor_(x[:, :2].sum(0) > 0)
        return out


class _Added(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.shift + self.scale


BUILDERS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    "wide": lambda: nn.Sequential(nn.Linear(FEATURES, _WIDE), nn.ReLU(), nn.Linear(_WIDE, CLASSES)),
    # Many small parameters, which fill many buckets of DDP if the buckets are small.
    "deep": lambda: nn.Sequential(nn.Linear(FEATURES, 5), *(_Added(5) for _ in range(6)), nn.Linear(5, CLASSES)),
    "lenet": WholeLeNet,
    "residual": WholeResidual,
    "embedding": Embedded,
    "attention": Attention,
    "tied": Tied,
    "heads": Heads,
    "listed": Listed,
    "reused": Reused,
    "counting": Counting,
    "float64 inside": lambda: Mixed(torch.float64),
    "bfloat16 inside": lambda: Mixed(torch.bfloat16),
    "float16 inside": lambda: Mixed(torch.float16),
}
"""The builder of each model, by name. `draw` sets the parameters afterwards."""


Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of some rows of a batch
Gradients = dict[str, torch.Tensor | None]
Prepare = Callable[[nn.Module], object]  # freezes, marks or casts parts of a model


def plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(x))


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Compute float32 without TF32, and without cuDNN, whose Winograd convolutions round even whole numbers."""
    with full_precision(), torch.backends.cudnn.flags(enabled=False):
        yield


@contextlib.contextmanager
def judged() -> Iterator[Findings]:
    """Compute exactly, collect findings, and raise the first at the end."""
    with Findings() as findings, exact_arithmetic():
        yield findings


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters by name, detached, in the memory of the model."""
    return {name: value.detach() for name, value in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers by name, detached, in the memory of the model."""
    return {name: value.detach() for name, value in model.named_buffers()}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, detached, in the memory of the model."""
    return parameters_of(model) | buffers_of(model)


def put_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(values[name])


def freeze_first(model: nn.Module) -> None:
    for parameter in next(model.children()).parameters():
        parameter.requires_grad_(False)


def as_it_is(model: nn.Module) -> None:
    """Prepare nothing."""


def counting_statistics(before: Mapping[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of `recipes.whole.Counting` after another batch with the rows `x`."""
    return {
        "rows": before["rows"] + PER_BATCH + len(x),
        "sums": before["sums"] + x[:, :CLASSES].sum(0),
        "seen": before["seen"] ^ (x[:, :2].sum(0) > 0),
    }


def assert_devices_are(tensors: Mapping[str, torch.Tensor], device: torch.device, label: str) -> None:
    for name, value in tensors.items():
        if value.device != device:
            text = f"{label}: {name} is on {value.device}, expected on {device}"
            raise GradientMismatch(text, ranks=[device.index or 0])


class OneDevice:
    """A run on one device: exact gradients from the CPU, steps of the optimizer on `device`.
    A check makes it beside a parallel model, and steps it once for each step of the model. `settle` follows the
    comparison."""

    def __init__(self, run: WholeRun, device: torch.device, prepare: Prepare = as_it_is) -> None:
        """Build the initial model; `prepare` freezes, marks or casts parts of it."""
        self.run = run
        self.held, self.exact = run.build(), run.build()
        prepare(self.held)
        prepare(self.exact)
        self.held.to(device)
        # All arithmetic in float64; `double` does not convert integer and boolean buffers.
        self.exact.double()
        self.optimizer = run.optimize(self.held)

    def outputs(self, x: torch.Tensor, forward: Forward = plainly) -> torch.Tensor:
        """Return the exact outputs, float64 on the CPU; buffers do not change."""
        with self._buffers_kept(), torch.no_grad():
            return forward(self.exact, x.double())

    def parts(self, shards: Sequence[Rows], forwards: Sequence[Forward] | Forward = plainly) -> list[Gradients]:
        """Return the exact gradients of each shard's summed loss; None for a parameter that the loss does not use."""
        shard_gradients: list[Gradients] = []
        for index, (x, targets) in enumerate(shards):
            forward = forwards if callable(forwards) else forwards[index]
            self.exact.zero_grad()
            with self._buffers_kept():
                weighted(forward(self.exact, x.double()), targets.double()).backward()
            shard_gradients.append({name: value.grad for name, value in self.exact.named_parameters()})
        return shard_gradients

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        before = {name: value.clone() for name, value in self.exact.named_buffers()}
        yield
        put_buffers(self.exact, before)

    def step(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        for name, parameter in self.held.named_parameters():
            value = gradients[name]
            parameter.grad = None if value is None else value.to(parameter.device, parameter.dtype)
        self.optimizer.step()

    def settle(self) -> None:
        """Make parameters whole numbers again, after their comparison."""
        settle(self.held, self.run.most)
        with torch.no_grad():
            for exact, parameter in zip(self.exact.parameters(), self.held.parameters(), strict=True):
                exact.copy_(parameter.cpu())


def terms_of(shard_gradients: Sequence[Gradients], name: str) -> list[torch.Tensor]:
    """Return the gradients of one parameter from the shards that have one."""
    return [value for gradients in shard_gradients if (value := gradients[name]) is not None]


def total(shard_gradients: Sequence[Gradients]) -> Gradients:
    """Sum the gradients of shards; None for a parameter without a gradient in any shard."""
    terms = {name: terms_of(shard_gradients, name) for name in shard_gradients[0]}
    return {name: torch.stack(values).sum(0) if values else None for name, values in terms.items()}


def slack(dtype: torch.dtype, size: int, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, for each element, the tolerance of the mean of `size` ranks around the exact sum of their `terms`.

    Each rank's part is scaled by the number of ranks, and the mean divides by it, which is exact for a power of two. A
    sum of whole numbers is exact if the significand of `dtype` holds the sum of their magnitudes. Other elements have
    at most size + 2 roundings (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    magnitudes = torch.stack([term.abs() for term in terms]).sum(0)
    eps = torch.finfo(dtype).eps
    bound = (size + 2) * eps * magnitudes
    return bound if size & (size - 1) else torch.where(magnitudes <= 2 / eps, 0.0, bound)


def assert_gradients_are(
    model: nn.Module, shard_gradients: Sequence[Gradients], *, label: str, rank: int | None = None, size: int = 1
) -> None:
    """Assert that the gradients of `model` are the sums of `shard_gradients`, and None if no part has a gradient.

    `label` names the gradients in the message, and `rank` holds the model. The gradients were averaged over `size`
    ranks; 1 if they were summed without a mean.
    """
    got = {name: value.grad for name, value in model.named_parameters()}
    ranks = () if rank is None else (rank,)
    subject = label if rank is None else f"{label}, rank {rank}"
    expected = total(shard_gradients)
    for name, value in expected.items():
        if (got[name] is None) != (value is None):
            text = "has no gradient, expected one" if value is not None else "has a gradient, but no shard uses it"
            raise GradientMismatch(f"{subject}: {name} {text}", ranks=ranks)
    present, wanted = (
        {name: value for name, value in gradients.items() if value is not None} for gradients in (got, expected)
    )
    split = {
        name: [torch.zeros_like(value) if (own := gradients[name]) is None else own for gradients in shard_gradients]
        for name, value in wanted.items()
    }
    assert_gradients_agree(
        present,
        wanted,
        tolerance={name: slack(value.dtype, size, split[name]) for name, value in present.items()},
        rank=rank,
        parts=split,
        constants={"ranks": size, "shards": len(shard_gradients)},
        what=label,
    )


ADAM_RATE = 0.25
"""The learning rate of Adam: about as large as the parameters, because rounding errors are relative to both."""


def sgd(training: ExactTraining, model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer of a training, for the parameters of `model`."""
    return torch.optim.SGD(model.parameters(), lr=training.rate, momentum=training.momentum)


def own_part(batch: tuple[torch.Tensor, torch.Tensor], rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of inputs and factors, on its device."""
    inputs, factors = (split(tensor, rank.size)[rank.index].to(rank.device) for tensor in batch)
    return inputs, factors


def own_results(training: ExactTraining, expected: Mapping[str, torch.Tensor], rank: Rank) -> dict[str, torch.Tensor]:
    """Return the results of one device that this rank must have: outputs of its own samples, and all others."""
    own = split(torch.arange(training.batch), rank.size)[rank.index]
    return {name: value[own] if name.endswith("outputs") else value for name, value in expected.items()}


def seen(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Copy gradients and parameters to the CPU, by names that contain the step, counted from 1."""
    copies = {}
    for name, value in model.named_parameters():
        copies[f"step {step}: gradient of {name}"] = copied(gradient_or_zeros(value))
        copies[f"step {step}: {name}"] = copied(value)
    return copies


def gathered(model: nn.Module, step: int, but: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Gather sharded gradients and parameters, by the names that `seen` gives. A collective.
    A gradient that this rank lacks is left out, and so are the parameters `but`."""
    from torch.distributed.tensor import DTensor

    copies = {}
    for name, value in model.named_parameters():
        if name in but:
            continue
        assert isinstance(value, DTensor), "a parameter that is divided is a DTensor"
        # A rank without a gradient takes part with zeros, because the others would wait for it.
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        assert isinstance(gradient, DTensor), "the gradient of a DTensor is one"
        full_tensor = copied(gradient.full_tensor())
        if value.grad is not None:
            copies[f"step {step}: gradient of {name}"] = full_tensor
        copies[f"step {step}: {name}"] = copied(value.full_tensor())
    return copies


def one_device(
    training: ExactTraining, model: nn.Module | None = None, *, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Train on the CPU in float64; return outputs, gradients and parameters after each step. `model`, which is changed,
    replaces the model of `training`, and `scale`, a power of two, multiplies the loss."""
    model = (training.model() if model is None else model).double()
    optimizer = sgd(training, model)
    results = {}
    for step, (inputs, factors) in enumerate(training.batches(), 1):
        optimizer.zero_grad()
        outputs = model(inputs.double())
        (weighted(outputs, factors.double()) * scale).backward()
        optimizer.step()
        results[f"step {step}: outputs"] = copied(outputs)
        results |= seen(model, step)
    return results


def adam_tolerance(values: Mapping[str, torch.Tensor], rate: float) -> dict[str, torch.Tensor]:
    """Return the tolerance for float32 rounding of parameters and moments in a step or two of Adam with given
    gradients.

    Each element goes through about fifteen operations that round once each: decay, two moments, their corrections,
    root, quotient, product, difference. Only the last one can cancel, and its operands are at most as large as
    parameter and rate together. So the tolerance is 32 unit roundoffs of 2^-24 of this sum.
    """
    return {name: (value.double().abs() + rate) * 2.0**-19 for name, value in values.items()}


STEPS = 3
_CHANNELS = 3


def averaging() -> nn.BatchNorm1d:
    """Return a BatchNorm layer with averaged statistics, on the CPU."""
    return nn.BatchNorm1d(_CHANNELS, momentum=None)


def drawn(rows: int, seed: int) -> list[torch.Tensor]:
    """Return a batch of whole numbers for each step, on the CPU; the statistics of the batches differ widely."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(-3, 4, (rows, _CHANNELS), generator=generator).float() for _ in range(STEPS)]
    return [batch * step + step for step, batch in enumerate(batches, 1)]


def wrong_statistics(layer: nn.BatchNorm1d, batches: Sequence[torch.Tensor]) -> str | None:
    """Describe the first statistic that is wrong after these batches; None if all are right.

    In a batch of n rows a mean and a variance are sums of n terms, each at most the square of the largest number. About
    eight more roundings follow in each step.
    """
    exact = [batch.double() for batch in batches]
    largest = max(float(batch.square().max()) for batch in exact)
    bound = len(exact) * (max(map(len, exact)) + 8) * torch.finfo(torch.float32).eps * max(largest, 1.0)
    for name, expected, tolerance in (
        ("running_mean", torch.stack([batch.mean(0) for batch in exact]).mean(0), bound),
        ("running_var", torch.stack([batch.var(0) for batch in exact]).mean(0), bound),
        ("num_batches_tracked", torch.tensor(len(exact)), 0.0),
    ):
        if (off := difference(buffers_of(layer)[name], expected, tolerance)) is not None:
            return f"{name} after {len(exact)} batches: {off}"
    return None


_State = dict[str, Any]
_Options = Mapping[str, Any]
_Step = Callable[[Any, Any, _State, int, _Options], Any]


def _sgd(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    if not o["momentum"]:
        return p - o["lr"] * g
    # The gradient of the first momentum is not documented: torch detaches it.
    velocity = g.detach() if t == 1 else o["momentum"] * state["held"] + (1 - o["dampening"]) * g
    state["held"] = velocity
    return p - o["lr"] * (g + o["momentum"] * velocity if o["nesterov"] else velocity)


def _moments(g: Tensor, state: _State, o: _Options) -> tuple[Tensor, Tensor]:
    beta1, beta2 = o["betas"]
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    return state["m"], state["v"]


def _adam(p: Any, g: Any, state: _State, t: int, o: _Options) -> Any:
    (beta1, beta2), (m, v) = o["betas"], _moments(g, state, o)
    if o["amsgrad"]:
        v = state["most"] = torch.maximum(v, state.get("most", v))
    return p - o["lr"] * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + o["eps"])


_STEPS: Mapping[Any, _Step] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam}


class DocumentedSteps:
    """Steps of parameters, each with options of its own, by an `optimizer_type`: SGD or Adam."""

    def __init__(self, optimizer_type: Any) -> None:
        self.step = _STEPS[optimizer_type]
        self.states: dict[int, _State] = {}  # the state of each parameter, by its number

    def stepped(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], options: Sequence[_Options]
    ) -> list[Tensor]:
        updated = []
        for number, (p, g, o) in enumerate(zip(parameters, gradients, options, strict=True)):
            state = self.states.setdefault(number, {"steps": 0})
            state["steps"] += 1
            updated.append(self.step(p, g, state, state["steps"], o))
        return updated
