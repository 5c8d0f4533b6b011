"""Train a causal transformer on a rank: with the same bits on every GPU, and within a bound of float64 on the host.

`examine_training` runs the same deterministic training on every GPU, which must give the same bits after each step.
`examine_by_reference` compares training on a GPU with the same training in float64 on the host, within a measured
bound. The other examinations check training on several GPUs at once: a disagreement is an observation about the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.acceptance.cases import Trained, TransformerCase
from mgpu_check.devices.observations import Observation, Subject, SubjectKind, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CheckFailure, ReplicaMismatch
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.steps import PAIRS, MeasuredStep, assess, deviations
from mgpu_check.oracles.devices.operations import Stopwatch
from mgpu_check.oracles.generated_data import digests, integers
from mgpu_check.oracles.training.cases import TrainingSpec
from mgpu_check.oracles.training.training_steps import (
    assert_data_parallel_agrees,
    assert_distributed_agrees,
    assert_distributed_replicas_agree,
)
from mgpu_check.torch_hooks import switches
from mgpu_check.torch_hooks.switches import one_thread
from mgpu_check.torch_hooks.tensors import bytes_of, copied, plain

_DROPOUT = 0.1


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        mixed = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._dropped(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Transformer(nn.Module):
    """Predict the next token: int64 (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, case: TransformerCase) -> None:
        super().__init__()
        width, dropout = case.width, _DROPOUT * case.dropout
        self.embedding = nn.Embedding(case.vocabulary, width)
        self.position = nn.Parameter(torch.empty(case.length, width).normal_(std=0.02))
        self.blocks = nn.ModuleList(_TransformerBlock(width, case.heads, dropout) for _ in range(case.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, case.vocabulary, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_GRAIN = 10
"""Bits of the whole numbers that, times a power of two, are the parameters; so few that float32 holds them exactly."""
_RATE = {"sgd": 0.05, "adamw": 1e-3}
_HOST = torch.device("cpu")


def examine_training(rank: Rank, case: TransformerCase) -> list[Observation | Trained]:
    """Train on the device of `rank`, and return digests of loss and parameters after each step.

    The host makes data and parameters. Their arrival is checked on the device and from the host, and so are the final
    results. Return also observations of wrong copies to the device or back. A training that would have started from
    wrong data is left out.
    """
    training = prepared(case)
    sent = [*training.parameters.values(), training.tokens]
    expected = digests(sent).tolist()
    with torch.cuda.device(rank.device), arithmetic(case):
        on_device = placed(training, rank.device)
        value_names = [*on_device.parameters, "tokens"]
        arrived = [*on_device.parameters.values(), on_device.tokens]
        transfer_error = _compared(rank.index, case, value_names, expected, digests(arrived).tolist(), sent, arrived)
        if transfer_error is not None:
            return [transfer_error]
        watch = Stopwatch(rank.device)
        watch.start()
        step_digests = []
        for loss in on_device.steps():
            results = [loss, *on_device.parameters.values()]
            step_digests.append(digests(results))
        watch.stop()
        numbers = torch.stack(step_digests).tolist()
        ended = digests([plain(value) for value in results]).tolist()
    value_names = ["loss", *on_device.parameters]
    back = _read_back(rank.index, case, value_names, numbers[-1], ended)
    return [*back, Trained(case, tuple(value_names), tuple(map(tuple, numbers)), sum(watch.laps()))]


def bytes_after(rank: Rank, case: TransformerCase, step: int, name: str) -> bytes:
    """Train up to a step, counted from 1, and return the bits of the loss or of the parameter `name`."""
    with torch.cuda.device(rank.device), arithmetic(case):
        on_device = placed(prepared(case), rank.device)
        steps = on_device.steps()
        for _ in range(step):
            loss = next(steps)
        return bytes_of(loss if name == "loss" else on_device.parameters[name])


class Training:
    """A model and its batches on one device.

    `prepared` makes it on the host, and `placed` moves its model and tokens to a device. `steps` then trains it once.
    `tokens` has those of all steps: int64 (steps, batch, length + 1).
    """

    def __init__(self, case: TransformerCase, model: Transformer, tokens: torch.Tensor) -> None:
        self.case, self.model, self.tokens = case, model, tokens
        self.parameters = {name: value.detach() for name, value in model.named_parameters()}  # each once

    def steps(self) -> Iterator[torch.Tensor]:
        case = self.case
        torch.manual_seed(case.seed)
        optimizer = self._optimizer()
        device = self.tokens.device.type
        for tokens in self.tokens:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=case.precision == "autocast"):
                logits = self.model(tokens[:, :-1])
                wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
                loss = F.cross_entropy(logits.flatten(0, 1).to(wide), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            yield loss.detach()

    def _optimizer(self) -> torch.optim.Optimizer:
        rate = _RATE[self.case.optimizer]
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(self.model.parameters(), lr=rate)
        return torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)


def prepared(case: TransformerCase) -> Training:
    """Make model and tokens on the host, by integer arithmetic: the same bits on every machine."""
    return Training(case, model_of(case), tokens_of(case))


def model_of(case: TransformerCase) -> Transformer:
    with torch.random.fork_rng(devices=[]):
        model = Transformer(case)
    with torch.no_grad():
        for number, (name, value) in enumerate(model.named_parameters()):
            seed, most = 1000 * case.seed + number, 1 << _GRAIN
            grains = integers(value.shape, -most, most, seed=seed, device=_HOST, dtype=value.dtype)
            power = round(math.log2(case.width) / 2) if value.dim() > 1 else 4
            value.copy_(grains * 2.0 ** (-_GRAIN - power) + float("norm" in name and name.endswith("weight")))
    return model.to(torch.bfloat16) if case.precision == "bfloat16" else model


def tokens_of(case: TransformerCase) -> torch.Tensor:
    shape = (case.steps, case.batch, case.length + 1)
    return integers(shape, 0, case.vocabulary - 1, seed=1000 * case.seed + 999, device=_HOST)


def placed(training: Training, device: torch.device) -> Training:
    return Training(training.case, training.model.to(device), training.tokens.to(device))


def _compared(
    rank: int,
    case: TransformerCase,
    value_names: Sequence[str],
    expected: Sequence[int],
    got: Sequence[int],
    sent: Sequence[torch.Tensor],
    arrived: Sequence[torch.Tensor],
) -> Observation | None:
    """Return a failed observation if data arrived wrong: by the upload, the download, or the device's checksum."""
    on_device = {name for name, a, b in zip(value_names, expected, got, strict=True) if a != b}
    read = digests([plain(value) for value in arrived]).tolist()
    on_host = {name for name, a, b in zip(value_names, expected, read, strict=True) if a != b}
    if not on_device | on_host:
        return None
    value_name = next(name for name in value_names if name in on_device | on_host)
    index = value_names.index(value_name)
    subject_kind: SubjectKind
    if read == list(got):  # device and host have seen the same wrong data
        subject_kind, message = "upload", f"{value_name} has arrived with wrong bytes"
        pairs = list(zip(bytes_of(sent[index]), bytes_of(arrived[index]), strict=True))
        if offsets := [offset for offset, (a, b) in enumerate(pairs) if a != b]:
            message += f": {len(offsets)} of {len(pairs)} bytes, the first at offset {offsets[0]}"
    elif on_host:
        subject_kind, message = "download", f"{value_name}, read back before training, is not what the device has"
    else:
        subject_kind, message = "gpu", f"the device makes a wrong checksum of {value_name}, which has arrived"
    work = Work(bytes=sum(value.nbytes for value in sent))
    evidence = {"first": value_name, "wrong on the device": sorted(on_device), "wrong on the host": sorted(on_host)}
    return Observation("training", Subject(subject_kind, (rank,)), "failed", message, str(case), work, evidence)


def _read_back(
    rank: int, case: TransformerCase, value_names: Sequence[str], device: Sequence[int], host: Sequence[int]
) -> list[Observation]:
    mismatches = [name for name, a, b in zip(value_names, device, host, strict=True) if a != b]
    if not mismatches:
        return []
    message = f"{mismatches[0]}, read back after training, is not what the device has"
    subject, evidence = Subject("download", (rank,)), {"first": mismatches[0], "wrong": mismatches}
    return [Observation("training", subject, "failed", message, str(case), evidence=evidence)]


@contextmanager
def arithmetic(case: TransformerCase) -> Iterator[None]:
    """Use deterministic algorithms, and TF32 only if the case asks for it, for the time of the context.
    cuBLAS is deterministic only if CUBLAS_WORKSPACE_CONFIG was ":4096:8" or ":16:8" at its first call."""
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with switches.repeatable_precision(tf32=case.precision == "tf32"):
        try:
            torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])


_ROUNDOFF = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8, "autocast": 2.0**-8}


def examine_by_reference(rank: Rank, case: TransformerCase) -> list[Observation]:
    """Train on the device of `rank` by SGD, and compare the final loss and parameters with those of the host.

    The host computes in float64, and again with every intermediate result perturbed by some unit roundoffs of the
    case's precision. The spread is the tolerance for the device. So errors in the lowest few bits are not detected.

    Raises:
        ValueError: the case has dropout, whose random numbers depend on the device, or an optimizer other than SGD,
            whose steps are not continuous in the gradients.
    """
    if case.dropout or case.optimizer != "sgd":
        raise ValueError(f"examine_by_reference: case={case} must have SGD, and no dropout")
    with torch.cuda.device(rank.device), arithmetic(case):
        got = _ended(placed(prepared(case), rank.device))
    measured = referenced(case)
    subject, work = Subject("gpu", (rank.index,)), Work(operations=case.steps)
    compared = measured.reference.items()
    differences = {name: difference(got[name], value, measured.tolerance[name]) for name, value in compared}
    mismatches = {name: off for name, off in differences.items() if off is not None}
    if not mismatches:
        return [Observation("training", subject, "passed", case=str(case), work=work)]
    value_name = next(iter(mismatches))
    message = f"{value_name} is not that of the host after {case.steps} steps: {mismatches[value_name]}"
    return [Observation("training", subject, "failed", message, str(case), work, {"names": list(mismatches)})]


def referenced(case: TransformerCase) -> MeasuredStep[str]:
    """Return the final loss and parameters of the case, with the tolerance for rounding in its precision."""
    with one_thread():  # because with small matrices threads mostly wait for each other
        with arithmetic(case):
            single = _ended(prepared(case))
        reference = _ended(_widened(case))
        spread = deviations(sum(value.numel() for value in reference.values()))
        generator = torch.Generator().manual_seed(case.seed)
        roundoff = _ROUNDOFF[case.precision]
        moved = []
        for _ in range(PAIRS):
            before = generator.get_state()
            for direction in (1, -1):
                generator.set_state(before)
                start = _widened(case)
                with Perturbed(direction * spread, generator, roundoff):
                    moved.append(_ended(start))
        return assess(reference, [single], moved, roundoff, spread)


def _widened(case: TransformerCase) -> Training:
    start = prepared(case)
    return Training(replace(case, precision="float32"), start.model.double(), start.tokens)


def _ended(training: Training) -> dict[str, torch.Tensor]:
    *_, loss = training.steps()
    return {"loss": copied(loss), **{name: copied(value) for name, value in training.parameters.items()}}


def examine_data_parallel(devices: Sequence[torch.device], training: TrainingSpec) -> list[Observation]:
    group = range(len(devices))
    return [_looked(group, "DataParallel", training, lambda: assert_data_parallel_agrees(training, devices))]


def examine_distributed(rank: Rank, training: TrainingSpec) -> list[Observation]:
    return _of_ranks(rank, "DDP", training, lambda: assert_distributed_agrees(training, rank))


def examine_replicas(rank: Rank, training: TrainingSpec) -> list[Observation]:
    """Check that DDP keeps all ranks equal bit for bit. A collective."""
    return _of_ranks(rank, "DDP replicas", training, lambda: assert_distributed_replicas_agree(training, rank))


def _of_ranks(rank: Rank, label: str, training: TrainingSpec, check: Callable[[], None]) -> list[Observation]:
    observation = _looked(range(rank.size), label, training, check)
    # All ranks observe the same group, so only the first reports success, but every rank reports a failure.
    return [observation] if observation.outcome == "failed" or rank.index == 0 else []


def _looked(members: Sequence[int], label: str, training: TrainingSpec, check: Callable[[], None]) -> Observation:
    subject, case, work = Subject("group", tuple(members)), f"{label}, {training}", Work(operations=training.steps)
    try:
        check()
    except CheckFailure as failure:
        # If replicas differ, those in the minority are suspects. Wrong gradients do not show whose contribution is
        # wrong.
        odd = failure.ranks if isinstance(failure, ReplicaMismatch) and 2 * len(failure.ranks) < len(members) else ()
        evidence = {"message": str(failure), "kind": type(failure).__name__}
        return Observation("training", subject, "failed", str(failure).splitlines()[0], case, work, evidence, odd)
    return Observation("training", subject, "passed", case=case, work=work)
