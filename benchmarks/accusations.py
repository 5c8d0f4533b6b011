"""Plant faults of devices, links, ranks, groups and code below checks of the suite, and measure whom it accuses.

    python benchmarks/accusations.py [--draws=300] [--seed=0] [--json=FILE] [--numbers=3,17] [--gpus=N] [--gate]

Each draw is a fault of one kind, or two, and one check that can see it, in a simulated node of 2 to 8 GPUs. In a fifth
of the draws the fault is in effect during every other call. The check runs a few examples without shrinking, and a
failure takes its second look. The truth is a set of devices and links, or the code: a fault of a rank, a group or a
world size is one of the code. FILE has a line for each draw; draws that it has do not run again. ``--gpus`` runs only
the draws on N GPUs. ``--gate`` plants faults of hardware below the gate of two examples, where each named mistake is
wrong.

A draw is *right* if the second look names the truth, and *part* if it names one of two faults. It is *none* if nothing is
named, or *open* if also each failed rerun has all devices. Any other name is *wrong*; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.acceptance.faults import made_by
from mgpu_check.cli.suite import run as run_suite
from mgpu_check.plugin import second_look
from mgpu_check.plugin.planting import Planting
from mgpu_check.plugin.stash import SESSION
from mgpu_check.simulated.defects.parameters import PATTERNS, UNITS
from mgpu_check.suite.common import budget
from mgpu_check.suite.common.faults.registry import FAULTS, all_faults
from mgpu_check.suite.common.faults.registry import planted as code_planted

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
_MEMORY = 1 << 30
_EXAMPLES = 8
_REPEATS_OF_STEADY = 8
"""Unchanged reruns of a fault that is always in effect: more change no name."""
_SLOWEST = 30
"""The time of a second look may be longer than elsewhere, because other processes run beside it."""

_REDUCED = "allreduce.test_all_reduce allreduce.test_reduce_then_broadcast"
_COPIED = "collectives.test_copies_of_every_dtype collectives.test_sizes collectives.test_layouts"
_BY_HAND = "allreduce.test_ring_allreduce allreduce.test_tree_allreduce allreduce.test_hand_written_allreduce"
_ONE_PROCESS = "allreduce.test_reduce_add_and_broadcast scatter.test_gather_restores_the_batch"
_STEPS = "gradients.test_distributed_data_parallel gradients.test_data_parallel gradients.test_step_by_hand"
_DIVIDED = "parallelism.test_tensor_parallelism_by_hand parallelism.test_pipeline_by_hand"
_GROUPS = "allreduce.test_all_reduce_in_a_group collectives.test_programs_of_collectives"
_COMPUTED = "fixtures.test_every_gpu_computes"
_GATES = "test_mlp_ddp.test_step_scales test_lenet_by_hand.test_step_scales"
_SEEING = {
    "products": f"{_STEPS} {_DIVIDED} {_COMPUTED} {_COMPUTED}",
    "elementwise": f"{_STEPS} {_BY_HAND} {_BY_HAND} {_ONE_PROCESS} {_COMPUTED}",
    "sums": f"{_STEPS} {_DIVIDED}",
    "convolutions": "gradients.test_batchnorm_in_distributed_data_parallel gradients.test_batchnorm_in_data_parallel",
    "functions": "devices.test_elementwise_results",
    "sorting": "devices.test_reductions",
    "any": f"{_REDUCED} {_REDUCED} {_REDUCED} {_COPIED}",
    "all_reduce": f"{_REDUCED} {_REDUCED} collectives.test_all_reduce_of_every_dtype "
    "gradients.test_distributed_data_parallel",
    "broadcast": f"{_REDUCED} {_COPIED}",
    "all_gather": _COPIED,
    "reduce_scatter": "collectives.test_reductions_of_every_dtype",
    "all_to_all": _COPIED,
    "link": f"{_REDUCED} {_REDUCED} {_BY_HAND} {_BY_HAND} {_ONE_PROCESS} {_ONE_PROCESS} {_COPIED} {_STEPS} {_DIVIDED} "
    "collectives.test_messages devices.test_copies_of_every_dtype data_parallel.test_outputs",
    "rank": f"{_REDUCED} {_REDUCED} {_REDUCED} {_COPIED} {_GROUPS}",
    "world": f"{_REDUCED} {_REDUCED} {_REDUCED} {_COPIED}",
    "group": f"{_GROUPS} allreduce.test_all_reduce_in_a_group",
}
"""Checks that can see a fault, by its kind. Quick checks occur more often."""
_UNITS = (
    *("products", "elementwise", "elementwise", "elementwise", "sums") * 3,
    "convolutions",
    "functions",
    "sorting",
)
_TRANSFERS = ("any", "any", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_FROM_OTHERS = ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_KINDS = {"device": 24, "collective": 14, "link": 22, "rank": 12, "world": 8, "group": 4, "code": 10, "two": 6}
_OF_HARDWARE = ("device", "collective", "link")

Plant = list[Any]
"""A kind of fault with its arguments; "hardware" has module, class, parameters and arguments of a defect."""


@dataclass(frozen=True)
class Draw:
    """A planted fault, and the check that runs. `truth` has each part at fault: a device, or the two of a link."""

    number: int
    kind: str
    gpus: int
    check: str
    plants: Sequence[Plant]
    flaky: bool
    seed: int
    truth: Sequence[Sequence[int]]


def of_hardware(kind: str, gpus: int, chosen: random.Random) -> tuple[list[Plant], list[int], str]:
    """Draw a fault of hardware: what to plant, its device or devices, and a key of `_SEEING`."""
    devices = chosen.sample(range(gpus), 2)
    given: dict[str, Any] = {"device": devices[0], "seed": chosen.randrange(1000)}
    given["every"] = chosen.choice((1, 1, 1, 1, 1, 2))
    if kind == "device":
        unit, dtype, above = chosen.choice(_UNITS), chosen.choice(("any", "any", "any", "float32")), (0, 0, 0, 16)
        given |= {"pattern": chosen.choice(PATTERNS), "dtype": dtype, "above": chosen.choice(above)}
        return [["hardware", "compute", "Unit", given, {"operations": UNITS[unit]}]], devices[:1], unit
    if kind == "collective":
        operation = chosen.choice(_TRANSFERS)
        given |= {"operation": operation, "dtype": "any", "ranks": chosen.choice((2, 2, 2, min(3, gpus)))}
        pattern = {"pattern": chosen.choice(PATTERNS)}
        return [["hardware", "collectives", "WrongCollective", given, pattern]], devices[:1], operation
    what = chosen.choice(("zeros", "offset", "tail", "half", "bit", "lane", "stale"))
    given |= {"peer": devices[1], "above": chosen.choice((0, 0, 0, 0, 64))}
    made = ("Stale", {}) if what == "stale" else ("Link", {"what": what})
    plants = [["hardware", "copies", made[0], given, made[1]]]
    if chosen.random() < 0.4:
        plants.append(["hardware", "copies", made[0], given | {"device": devices[1], "peer": devices[0]}, made[1]])
    return plants, sorted(devices), "link"


def drawn(number: int, seed: int, gate: bool = False) -> Draw:
    """Draw a fault and a check."""
    chosen = random.Random(f"{seed} {number}")
    kind = chosen.choice(_OF_HARDWARE) if gate else chosen.choices(list(_KINDS), list(_KINDS.values()))[0]
    gpus = chosen.choices((2, 3, 4, 6, 8), (6, 22, 54, 10, 8))[0]
    plants: list[Plant] = []
    truth: list[list[int]] = []
    if kind in (*_OF_HARDWARE, "two"):
        found = [
            of_hardware(one, gpus, chosen) for one in (chosen.sample(_OF_HARDWARE, 2) if kind == "two" else [kind])
        ]
        plants = [plant for some, _, _ in found for plant in some]
        truth = [part for _, part, _ in found]
        shared = [set(_SEEING[seen].split()) for _, _, seen in found]
        checks = _GATES.split() if gate else sorted(set.intersection(*shared) or shared[0])
    elif kind == "code":
        name, checks = chosen.choice(sorted(_code_faults(gpus).items()))
        plants = [["code", name]]
    else:
        what, least = chosen.choice(("wrong", "stale")), chosen.choice([*range(1, min(gpus, 4) + 1), min(gpus, 3)])
        given = {"rank": [chosen.randrange(gpus), what], "world": [least, chosen.choice(("all", "last"))]}
        plants = [[kind, *given.get(kind, ())]]
        checks = _SEEING[kind].split()
    return Draw(number, kind, gpus, chosen.choice(checks), plants, chosen.random() < 0.2, seed, truth)


@functools.cache
def _code_faults(gpus: int) -> dict[str, list[str]]:
    known = {check for some in _SEEING.values() for check in some.split()}
    found = {}
    for fault in all_faults().values():
        checks = [name for one in fault.caught_by if (name := f"{fault.property}.{one}") in known]
        if checks and fault.least_gpus <= gpus:
            found[fault.name] = checks
    return found


@contextlib.contextmanager
def planted(text: str) -> Iterator[None]:
    """Plant the faults of a draw in this process; a flaky one during every other call, by chance."""
    from mgpu_check.simulated.hardware import planted as hardware_planted

    plants, flaky = json.loads(text)
    active = not flaky or random.SystemRandom().random() < 0.5
    with contextlib.ExitStack() as stack:
        for plant in _of_software(plants) if active else ():
            stack.enter_context(plant)
        if any(plant[0] == "hardware" for plant in plants):  # on all ranks or none, because it exchanges device numbers
            stack.enter_context(hardware_planted(_hardware(text if active else "[[]]")))
        yield


@functools.lru_cache(maxsize=2)
def _hardware(text: str) -> Any:
    """Return the hardware with the defects of a text; the same for each call, because it keeps its state."""
    from mgpu_check.simulated.hardware import Hardware

    plants = [plant[1:] for plant in json.loads(text)[0] if plant[0] == "hardware"]
    defects = [made_by(module, name, **given)(parameters) for module, name, parameters, given in plants]
    return Hardware(defects, _MEMORY)


def _of_software(plants: Sequence[Plant]) -> Iterator[contextlib.AbstractContextManager[None]]:
    from mgpu_check.suite.collectives.faults.planting import after, instead

    for kind, *given in plants:
        if kind == "code":
            yield code_planted(*given)
        elif kind == "rank":
            yield instead(*_IN_PLACE, *_FROM_OTHERS)(functools.partial(_contribution, *given))
        elif kind in ("world", "group"):
            yield after(*_IN_PLACE, *_FROM_OTHERS)(functools.partial(_result, *given))


def _result(*given: Any) -> None:
    """Change the result of a collective: in groups of some ranks; or in groups of a size, on all ranks or the last."""
    import torch.distributed as dist

    *where, seen = given
    some = 1 < seen.size < dist.get_world_size()
    if (seen.size >= where[0] if where else some) and (
        where[1:] != ["last"] or dist.get_rank(seen.group) == seen.size - 1
    ):
        _change(seen.first)


def _contribution(rank: int, what: str, seen: Any) -> Any:
    """Call a collective with a wrong contribution of one rank: changed, or that of an earlier call, which came late."""
    if seen.rank != rank or not seen.written:
        return NotImplemented
    in_place = len(seen.args) < 2 or not hasattr(seen.args[1], "is_cuda")
    given = seen.first if in_place else seen.args[1].clone()
    key, own = (tuple(given.shape), given.dtype), given.clone()
    if what == "wrong" or key not in seen.kept:
        _change(given)
    else:
        given.copy_(seen.kept[key])
    seen.kept[key] = own
    return seen.call() if in_place else seen.call(seen.args[0], given)


def _change(tensor: Any) -> None:
    if tensor.numel():
        narrow = tensor.dtype.itemsize == 1 and tensor.is_floating_point()
        tensor.copy_(~tensor if str(tensor.dtype) == "torch.bool" else (tensor.float() if narrow else tensor) + 1)


class Draws:
    """A pytest plugin that runs each check once for each of its draws, and writes what was named."""

    def __init__(self, draws: Sequence[Draw], file: Path) -> None:
        self.draws = {draw.number: draw for draw in draws}
        self.file = file
        self._own: dict[Any, Any] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        session.config.stash[SESSION].preload += [*FAULTS, "accusations"]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        name = f"{metafunc.module.__name__.rpartition('.test_')[2]}.{metafunc.definition.originalname}"
        metafunc.fixturenames.append("draw")
        metafunc.parametrize("draw", [number for number, draw in self.draws.items() if draw.check == name])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        from hypothesis import Phase, settings

        assert isinstance(item, pytest.Function)
        draw, session = self._of(item), item.config.stash[SESSION]
        session.fault = Planting("accusations:planted", json.dumps([draw.plants, draw.flaky]))
        session.looked = 0.0
        second_look._REPEATS = 20 if draw.flaky else _REPEATS_OF_STEADY
        second_look._SLOWEST = _SLOWEST
        function: Any = item.function
        if hasattr(function, "_hypothesis_internal_use_settings"):
            own = self._own.setdefault(function, function._hypothesis_internal_use_settings)
            own = budget.at_level(own, "standard")
            few: dict[str, Any] = {"phases": (Phase.explicit, Phase.generate)}
            few["max_examples"] = min(own.max_examples, _EXAMPLES)
            function._hypothesis_internal_use_settings = settings(own, **few)
            function._hypothesis_internal_use_seed = draw.seed * 1000 + draw.number

    def _of(self, item: pytest.Function) -> Draw:
        return self.draws[int(str(item.callspec.params["draw"]))]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        assert isinstance(item, pytest.Function)
        if call.when != "call":
            return report
        seen = item.config.stash[SESSION].test.seen
        error = None if call.excinfo is None else call.excinfo.value
        found = asdict(self._of(item)) | {
            "outcome": "passed" if error is None else type(error).__name__,
            "named": [] if seen is None else [cause.devices for cause in seen.named],
            "ranks": getattr(error, "ranks", ()),
            "mistakes": getattr(error, "mistakes", ()),
            "site": getattr(error, "site", ""),
            "reruns": [] if seen is None else [asdict(rerun) for rerun in (*seen.repeats, *seen.elsewhere)],
            "lines": [] if seen is None else seen.lines(),
            "error": str(error)[:300],
            "seconds": round(call.duration, 2),
        }
        with self.file.open("a") as out:
            out.write(json.dumps(found) + "\n")
        return report


def verdict(found: dict[str, Any]) -> str:
    """Return how the names of a draw compare with the truth."""
    if found["outcome"] == "passed":
        return "not caught"
    truth, named = ({tuple(one) for one in found[key]} for key in ("truth", "named"))
    if "mlp" in found["check"] or "lenet" in found["check"]:
        return "wrong" if found["mistakes"] else "none"
    failed = [rerun["devices"] for rerun in found["reruns"] if rerun["failed"]]
    if not named:
        return "open" if failed and min(map(len, failed)) == found["gpus"] else "none"
    return "right" if named == (truth or {()}) else "part" if named < truth else "wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("accusations.json"))
    parser.add_argument("--numbers", default="")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--gate", action="store_true")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, HERE.parent, EXAMPLES)))  # of the ranks
    numbers = [int(one) for one in given.numbers.split(",") if one] or range(given.draws)
    lines = given.json.read_text().splitlines() if given.json.exists() else []
    done = {(one["seed"], one["number"]) for one in map(json.loads, lines)}
    draws = [drawn(number, given.seed, given.gate) for number in numbers if (given.seed, number) not in done]
    for gpus in sorted({draw.gpus for draw in draws if given.gpus in (0, draw.gpus)}):
        mine = [draw for draw in draws if draw.gpus == gpus]
        checks = {tuple(draw.check.split(".")): None for draw in mine}
        files = [f"{EXAMPLES}/{name}.py::{test}" if given.gate else f"test_{name}.py::{test}" for name, test in checks]
        plugins = [Draws(mine, given.json.absolute())]
        options = (f"--gpus={gpus}", "--simulate", "--gpu-level=quick", "--tb=no", "--rank-timeout=20")
        if given.gate:
            pytest.main([*options, "-q", "-p", "no:cacheprovider", *files], plugins=plugins)
        else:
            run_suite([*options, *files], plugins)
    found = [json.loads(line) for line in given.json.read_text().splitlines()]
    counts = Counter((one["kind"], verdict(one)) for one in found if one["seed"] == given.seed)
    for kind in _KINDS:
        print(f"{kind:<12}", ", ".join(f"{count} {said}" for (of, said), count in sorted(counts.items()) if of == kind))
    return 1 if any(said == "wrong" for _, said in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
