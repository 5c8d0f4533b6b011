"""Examine a model: try each way to train it, then each way with options, until the time has passed.

A way is tried for one and for three optimizer steps. Options are tried first alone, then so that each pair of values
occurs. A setting that fails is shrunk to the fewest options, and tried on one device, where it must be right.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from mgpu_check.diagnosis.observations import KINDS, Relations, Result
from mgpu_check.errors import CheckFailure, NotCompared, RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.gate_arguments import RanksFixture, first_line
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Effort, Expectations, Trial, Trials
from mgpu_check.gates.step_gate import mismatch_of
from mgpu_check.models.application import ModelSettings
from mgpu_check.models.inputs import with_long_sequences
from mgpu_check.models.targets import UnusableModel
from mgpu_check.models.training import Training, costs_of, inspected
from mgpu_check.models.training_options import (
    FIXED,
    HALVES,
    SYNCHRONIZED,
    UNTIED,
    UNUSED,
    Setting,
    described,
    settings_for,
)
from mgpu_check.models.verdict import OptionFailure, WayResult
from mgpu_check.models.ways import ONE_DEVICE, Way, way_of
from mgpu_check.oracles.pairs import fewest_options

_PER_RANK = 4  # samples: two micro-batches of two, which batch norm needs
_COLUMNS = {"grads": "gradients", "params": "parameters", "buffers": "buffers", "optimizer": "moments"}

_HALVES_DIFFER = (
    "so does one device that takes the batch in halves: the model computes over samples of a batch, or draws or counts "
    "in each call"
)


class OutOfTime(BaseException):
    """The time of the examination has passed. It is no Exception: a diagnosis without some of its runs may be wrong."""


class _Timed:
    """The ranks of an examination, until its limit. A call that has begun is not interrupted."""

    def __init__(self, examination: Examination) -> None:
        self._examination = examination

    def __getattr__(self, name: str) -> Any:
        if name in ("run", "_run_apart") and time.monotonic() >= self._examination.limit:
            raise OutOfTime
        return getattr(self._examination.ranks, name)


def _column(result: Result) -> str:
    return _COLUMNS.get(result.kind) or result.of


class Examination:
    """The examination of one model, in one pytest process.

    Raises:
        UnusableModel: the target names no model, or no inputs for it are known.
    """

    def __init__(self, ranks: RanksFixture, settings: ModelSettings, simulated: bool) -> None:
        self.ranks, self.settings, self.compiles = ranks, settings, not simulated
        self.ends = self.limit = time.monotonic() + settings.model_time
        target, batch, loss = settings.model_target or "", settings.model_batch or "", settings.model_loss or ""
        try:
            self.recipe, self.traits = ranks.run(inspected, target, batch, loss, size=1)[0]
        except RankFailure as failure:
            if isinstance(failure.__cause__, UnusableModel):
                raise failure.__cause__ from None
            raise
        self.bases: dict[str, Setting] = {}  # way that is equal -> the options that it needs
        self.failing: dict[str, list[Setting]] = {}  # way -> the smallest settings that fail, or differ on one device
        self.expectations: dict[Training, Expectations] = {}  # of one device -> its results, which all ways share
        self.outcomes: dict[tuple[str, Setting], WayResult] = {}
        self.alone = WayResult(ONE_DEVICE.name, "equal", devices=1)
        self._passed = f"the time of {settings.model_time:g} s has passed"
        self.options_tried = 0  # number of ways that were tried with options

    def try_way(self, name: str) -> tuple[WayResult, BaseException | None]:
        """Try a way without options. Return the result, and the error with the report of a failure."""
        way = way_of(name, self.traits)
        result = WayResult(name, "not applicable")
        result.reason = way.refusal(self.traits)
        if not result.reason and self.ranks.size < way.devices:
            result.reason = f"it needs {way.devices} devices, and --gpus={self.ranks.size}"
        if not result.reason and time.monotonic() >= self.ends:
            result.status, result.reason = "not tried", self._passed
        if result.reason:
            return result, None
        error = self._tried(way, (), result)
        if result.status == "raises" and way.derived:
            result.status, result.reason = "not applicable", f"the model cannot be divided so: {result.reason}"
            return result, None
        if result.status == "equal":
            self.bases[name] = ()
            # The costs of a step are unknown if it fails by then.
            for trained, row in ((ONE_DEVICE, self.alone), (way, result)):
                with contextlib.suppress(RankFailure, RankHang, OutOfTime):
                    if not row.memory:
                        trials, scenarios = self._trials(trained, ())
                        costs = trials.run_on_ranks(trials.program, scenarios[0], by=costs_of)
                        row.memory, row.sent = map(max, zip(*costs, strict=True))
        elif error is not None:
            error = self._explained(way, result, error)
        return result, error

    def _explained(self, way: Way, result: WayResult, error: BaseException) -> BaseException:
        """Look for a change of the model that makes the way equal. Return the error with the reason."""
        norms, tied = self.traits.batch_norms, self.traits.tied
        shown = ", ".join(norms[:2]) + ", …" * (len(norms) > 2)
        batches = f"batch norm ({shown}) uses the samples of its {'replica' if way.single_process else 'rank'} alone"
        reasons = {
            SYNCHRONIZED: batches,
            FIXED: batches,
            UNUSED: "a rank does not use all parameters in a step",
            UNTIED: f"{' and '.join(tied[0]) if tied else ''} are one tensor on one device, and several here",
        }
        applies = {
            SYNCHRONIZED: norms and not way.single_process,
            FIXED: norms,
            UNUSED: way.name == "ddp",
            UNTIED: tied,
        }
        for setting in filter(applies.get, reasons):
            if self._outcome(way, setting).status != "equal":
                continue
            result.reason = f"{reasons[setting]}: it is equal with {described(setting)}"
            if setting not in (FIXED, UNTIED):  # no user trains so
                self.bases[way.name], result.base = setting, described(setting)
            return ScalingMismatch(f"{self.traits.name} under {way.name}: {result.reason}")
        return self._diagnosed(way, (), result, error)

    def _diagnosed(self, way: Way, setting: Setting, result: WayResult, error: BaseException) -> BaseException:
        """Return the error with the report of the gate, if results differ."""
        if result.status != "differs":
            return error
        before = {column for column in result.columns if result.columns[column] == "differs"} - {"evaluation"}
        now, limit = time.monotonic(), self.limit
        self.limit = now + (limit - now) / 2  # the other ways need time, too
        try:
            trials, scenarios = self._trials(way, setting, diagnose=True, evaluates=not before)
            failed = next(filter(None, map(trials.run, scenarios)), None)
            if failed is None:
                return error
            report = mismatch_of(trials, failed, [failed.scenario.world_size])
        except OutOfTime:
            result.reason += (
                f"; the time did not suffice to explain it: give more than --time={self.settings.model_time:g}s"
            )
            return error
        finally:
            self.limit = limit
        result.site = report.site
        if failed.relations is not None:
            result.reason = _first_wrong(failed.relations)
        if report.mistakes:
            result.reason = ", ".join(report.mistakes)
        elif way.data != () and not setting and self._outcome(ONE_DEVICE, HALVES).status == "differs":
            result.reason += f"; {_HALVES_DIFFER}"
        return report

    def _tried(self, way: Way, setting: Setting, result: WayResult) -> BaseException | None:
        trials, scenarios = self._trials(way, setting)
        result.devices = scenarios[0].world_size
        try:
            for scenario in scenarios:
                failed = trials.run(scenario)
                if failed is not None and setting:
                    # The tolerance was measured without the options that must not change a result.
                    trials, shorter = self._trials(way, setting, diagnose=True)
                    failed = next(filter(None, map(trials.run, shorter)), None)
                if failed is not None:
                    return self._failed(failed, result)
            trials.finish([scenarios[0].place], {})
        except OutOfTime:
            result.status, result.reason = "not tried", self._passed
            return None
        except (NotCompared, ValueError) as error:
            result.status, result.reason = "not compared", first_line(error)
            return error
        except RankHang as error:
            result.status, result.reason = "raises", first_line(error)
            if error.is_of_reference:  # a slow machine; ranks are not to blame
                result.status, result.reason = "not compared", f"on one device, {result.reason}"
            return error
        expected = trials.expected(trials.current, effort=Effort.PROVISIONAL)
        result.status = "equal"
        result.columns = {_column(name): "equal" for name in expected.single.values}
        return None

    @staticmethod
    def _failed(failed: Trial, result: WayResult) -> BaseException:
        if failed.relations is None:
            assert failed.error is not None
            result.status, result.reason = "raises", _cause(failed.error)
            return failed.error
        result.status = "differs"
        result.columns = {_column(name): "equal" for name in failed.relations.held}
        result.columns |= {_column(name): "differs" for name in failed.relations.broken}
        result.reason = _first_wrong(failed.relations)
        return ScalingMismatch(result.reason)

    def _trials(
        self, way: Way, setting: Setting, diagnose: bool = False, evaluates: bool = True
    ) -> tuple[Trials, Sequence[Scenario]]:
        """Return trials and scenarios. Unless they are for a diagnosis, settings share the results of one device."""
        recipe = with_long_sequences(self.recipe) if way.name == "cp" else self.recipe
        training = Training(self.settings.model_target or "", recipe, way.name, setting, evaluates)
        world = 1 if way is ONE_DEVICE else way.devices
        program, name = training.program, f"{self.traits.name} under {way.name}"
        ranks = cast(RanksFixture, _Timed(self))
        kept = self.expectations.setdefault(training.reference, Expectations(ranks, program))
        trials = Trials(ranks, program, frozenset(KINDS), None, name, None if diagnose else kept)
        trials.remarks, trials.defined = False, self.traits.defined
        trials.is_ambiguous = True  # most models have norms, whose equal values do not show who has which slice
        # Three steps show all that options do; a failure is diagnosed in one step, if it is there.
        once = Scenario(world, _PER_RANK * world, mesh=way.mesh)
        return trials, [once, replace(once, steps=3)][bool(setting) and not diagnose :]

    def try_options(self, name: str) -> WayResult:
        """Try a way with options, until the time has passed. Return its result with them."""
        way, base = way_of(name, self.traits), self.bases[name]
        result = WayResult(name, "equal")
        now = time.monotonic()
        ends = self.limit = now + max(0.0, self.ends - now) / (len(self.bases) - self.options_tried)
        self.options_tried += 1
        self.outcomes[name, base] = result
        settings = deque(settings_for(name, self.traits, self.compiles, base))
        seen = {base, *settings}
        failing = self.failing.setdefault(name, [])
        while settings:
            if time.monotonic() > ends:
                result.untried += len(settings)
                break
            setting = settings.popleft()
            smallest = next((options for options in failing if {*options} <= {*setting}), None)
            if smallest is None:
                smallest = self._compared(way, base, setting, result)
            if smallest is not None:
                # A failure hides what the other options do, so they are tried without it.
                fewer = [tuple(other for other in setting if other != pair) for pair in smallest]
                settings.extend(each for each in dict.fromkeys(fewer) if each not in seen)
                seen.update(fewer)
        return result

    def _compared(self, way: Way, base: Setting, setting: Setting, result: WayResult) -> Setting | None:
        """Compare a setting, and add it to the result. Return the fewest options that fail; None if it is equal."""
        outcome = self._outcome(way, setting)
        if outcome.status == "not tried":
            result.untried += 1
            return None
        if outcome.status == "not compared":
            result.untried += 1
            result.not_compared.append(f"{described(setting)}: {outcome.reason}")
            return None
        if outcome.status == "equal":
            result.settings += 1
            return None

        def fails(options: dict[str, str]) -> bool:
            fewer = tuple(options.items())
            return {*base} < {*fewer} and self._outcome(way, fewer).status in ("differs", "raises")

        smallest = tuple(fewest_options(dict(setting), fails).items())
        alone = tuple(pair for pair in smallest if pair not in base)
        failed, control = self._outcome(way, smallest), self._outcome(ONE_DEVICE, alone)
        if control.status == "not tried":  # whether the way is to blame is not known
            result.untried += 1
        elif control.status != "equal":
            result.on_one_device.append(f"{described(alone)} {control.status} on one device, too: {control.reason}")
        else:
            result.settings += 1
            self._diagnosed(way, smallest, failed, ScalingMismatch(failed.reason))
            result.failures.append(OptionFailure(described(alone), failed.status, failed.reason))
        self.failing[way.name].append(alone)
        return alone

    def _outcome(self, way: Way, setting: Setting) -> WayResult:
        """Try a way with options, once."""
        if (way.name, setting) not in self.outcomes:
            self.outcomes[way.name, setting] = WayResult(way.name, "not tried")
            self._tried(way, setting, self.outcomes[way.name, setting])
        return self.outcomes[way.name, setting]


def _first_wrong(relations: Relations) -> str:
    """Return the first result that differs, and how."""
    name = relations.broken[0]
    return f"{name}: {relations.details.get(name, 'differs between ranks')}"


def _cause(error: CheckFailure) -> str:
    """Return the error of a rank in a line."""
    cause = error.__cause__
    return f"{type(cause).__name__}: {first_line(cause)}" if cause is not None else first_line(error)
