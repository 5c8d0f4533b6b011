"""Run the same deterministic training on every GPU, which must give the same bits after each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from mgpu_check.acceptance.training.cases import Trained, TransformerCase
from mgpu_check.acceptance.training.transformer import Transformer
from mgpu_check.devices.observations import Observation, Subject, SubjectKind, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.generated_data import digests, integers
from mgpu_check.suite.common.timing import Stopwatch
from mgpu_check.torch_hooks import precision
from mgpu_check.torch_hooks.tensors import bytes_of, plain

_GRAIN = 10
"""Bits of the whole numbers that, times a power of two, are the parameters; so few that float32 holds them exactly."""
_RATE = {"sgd": 0.05, "adamw": 1e-3}
_HOST = torch.device("cpu")


def examine_training(rank: Rank, case: TransformerCase) -> list[Observation | Trained]:
    """Train on the device of `rank`, and return digests of loss and parameters after each step.

    The host makes data and parameters. Their arrival is checked on the device and from the host, and so are the final
    results.

    Returns:
        Observations of wrong copies to the device or back; and the training, unless it would have started from wrong
        data.
    """
    training = prepared(case)
    sent = [*training.parameters.values(), training.tokens]
    expected = digests(sent).tolist()
    with torch.cuda.device(rank.device), arithmetic(case):
        here = placed(training, rank.device)
        names = [*here.parameters, "tokens"]
        arrived = [*here.parameters.values(), here.tokens]
        wrong = _compared(rank.index, case, names, expected, digests(arrived).tolist(), sent, arrived)
        if wrong is not None:
            return [wrong]
        watch = Stopwatch(rank.device)
        watch.start()
        said = []
        for loss in here.steps():
            results = [loss, *here.parameters.values()]
            said.append(digests(results))
        watch.stop()
        numbers = torch.stack(said).tolist()
        ended = digests([plain(value) for value in results]).tolist()
    names = ["loss", *here.parameters]
    back = _read_back(rank.index, case, names, numbers[-1], ended)
    return [*back, Trained(case, tuple(names), tuple(map(tuple, numbers)), sum(watch.laps()))]


def bytes_after(rank: Rank, case: TransformerCase, step: int, name: str) -> bytes:
    """Train up to a step, counted from 1, and return the bits of the loss or of the parameter `name`."""
    with torch.cuda.device(rank.device), arithmetic(case):
        here = placed(prepared(case), rank.device)
        steps = here.steps()
        for _ in range(step):
            loss = next(steps)
        return bytes_of(loss if name == "loss" else here.parameters[name])


class Training:
    """A model and its batches on one device.

    Attributes:
        parameters: name -> parameter, each once.
        tokens: the tokens of all steps: int64 (steps, batch, length + 1).
    """

    def __init__(self, case: TransformerCase, model: Transformer, tokens: torch.Tensor) -> None:
        self.case = case
        self.model = model
        self.tokens = tokens
        self.parameters = {name: value.detach() for name, value in model.named_parameters()}

    def steps(self) -> Iterator[torch.Tensor]:
        case = self.case
        torch.manual_seed(case.seed)
        optimizer = self._optimizer()
        device = self.tokens.device.type
        for tokens in self.tokens:
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=case.precision == "autocast"):
                logits = self.model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).to(_wide(logits.dtype)), tokens[:, 1:].flatten())
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
        model = Transformer(
            vocabulary=case.vocabulary,
            length=case.length,
            width=case.width,
            heads=case.heads,
            layers=case.layers,
            tied=case.tied,
            dropout=case.dropout,
        )
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compared(
    rank: int,
    case: TransformerCase,
    names: Sequence[str],
    expected: Sequence[int],
    got: Sequence[int],
    sent: Sequence[torch.Tensor],
    arrived: Sequence[torch.Tensor],
) -> Observation | None:
    """Return a failed observation if data arrived wrong: by the upload, the download, or the device's checksum."""
    on_device = {name for name, a, b in zip(names, expected, got, strict=True) if a != b}
    read = digests([plain(value) for value in arrived]).tolist()
    on_host = {name for name, a, b in zip(names, expected, read, strict=True) if a != b}
    if not on_device | on_host:
        return None
    first = next(name for name in names if name in on_device | on_host)
    place = names.index(first)
    kind: SubjectKind
    if read == list(got):  # device and host have seen the same wrong data
        kind, seen = "upload", f"{first} has arrived with wrong bytes"
        seen += _where(bytes_of(sent[place]), bytes_of(arrived[place]))
    elif on_host:
        kind, seen = "download", f"{first}, read back before training, is not what the device has"
    else:
        kind, seen = "gpu", f"the device makes a wrong checksum of {first}, which has arrived"
    work = Work(bytes=sum(value.nbytes for value in sent))
    evidence = {"first": first, "wrong on the device": sorted(on_device), "wrong on the host": sorted(on_host)}
    return Observation("training", Subject(kind, (rank,)), "failed", seen, str(case), work, evidence)


def _read_back(
    rank: int, case: TransformerCase, names: Sequence[str], device: Sequence[int], host: Sequence[int]
) -> list[Observation]:
    wrong = [name for name, a, b in zip(names, device, host, strict=True) if a != b]
    if not wrong:
        return []
    seen = f"{wrong[0]}, read back after training, is not what the device has"
    return [
        Observation(
            "training",
            Subject("download", (rank,)),
            "failed",
            seen,
            str(case),
            evidence={"first": wrong[0], "wrong": wrong},
        )
    ]


def _where(expected: bytes, got: bytes) -> str:
    differ = [place for place, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
    return f": {len(differ)} of {len(expected)} bytes, the first at offset {differ[0]}" if differ else ""


@contextmanager
def arithmetic(case: TransformerCase) -> Iterator[None]:
    """Use deterministic algorithms, and TF32 only if the case asks for it, for the time of the context.

    cuBLAS is deterministic only if CUBLAS_WORKSPACE_CONFIG was ":4096:8" or ":16:8" at its first call.
    """
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with precision.repeatable(tf32=case.precision == "tf32"):
        try:
            torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
