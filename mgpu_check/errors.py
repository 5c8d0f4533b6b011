"""Errors that mgpu-check raises, each with the ranks that it is about.

A user's mistake (a wrong argument or option) is a ``ValueError`` or ``pytest.UsageError``; what stands here is a
*finding*: the code under test, or the machine under it, did something wrong. All findings but a hang are
``AssertionError``, so pytest reports them as failures and Hypothesis shrinks them.
"""

from __future__ import annotations

from collections.abc import Iterable


class CheckFailure(AssertionError):
    """A property does not hold.

    ``ranks`` names the ranks (or the indices of the devices) at fault, empty where they cannot be told.
    """

    ranks: tuple[int, ...]

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class DeviceEnumerationError(CheckFailure):
    """The devices are not those that were asked for, not distinct, or not usable."""


class ShardError(CheckFailure):
    """Shards do not cover a batch exactly, in order, disjoint, each on its device."""


class AllreduceMismatch(CheckFailure):
    """A reduction over ranks or devices differs from the single-device result."""


class CollectiveMismatch(CheckFailure):
    """A collective has left something else than a model of it leaves, or has changed what is not its own."""


class GradientMismatch(CheckFailure):
    """Gradients, parameters or buffers of a parallel step differ from those of one device."""


class ReplicaMismatch(CheckFailure):
    """Replicas that should hold the same values do not."""


class ScalingMismatch(CheckFailure):
    """A step, metric, loader or script does not do on several ranks what it does on one device.

    ``mistakes`` names the classes of mistakes that it looks like, the likeliest first; see ``docs/classes``. ``site``
    is the line of the code under test that it is about, such as "src/train.py:40"; "" if no line is known.
    """

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), mistakes: Iterable[str] = (), site: str = ""
    ) -> None:
        super().__init__(message, ranks=ranks)
        self.mistakes = tuple(mistakes)
        self.site = site


class NotCompared(CheckFailure):
    """Nothing is known to be wrong, but some of what was trained could not be compared with one device.

    ``names`` has the parameters that were not compared. ``untrained`` is true if a script ended before its first step,
    although all that it imports is installed: it may lack data.
    """

    def __init__(
        self, message: str, *, ranks: Iterable[int] = (), names: Iterable[str] = (), untrained: bool = False
    ) -> None:
        super().__init__(message, ranks=ranks)
        self.names = tuple(names)
        self.untrained = untrained


class DeviceMismatch(CheckFailure):
    """A device did not give what the CPU gives, or an operator over several raised, or did not, or said, what it should
    not have."""


class UnexpectedError(CheckFailure):
    """A call in a check of the suite raised an error that the check does not expect."""


class RankFailure(CheckFailure):
    """At least one rank raised while it ran a function of the test.

    ``account`` holds, for code that looks for the cause, how the call ended on each rank; None where it was no call.
    """

    account: object = None


class RankDied(RankFailure):
    """At least one rank's process ended: by a signal, or by an exit that the engine did not ask for."""


NO_IMPORT = "ImportError"
"""The cause of a `StartupFailure` if torch, or a module that all ranks need, cannot be imported."""


class StartupFailure(RankFailure):
    """The ranks of a world did not come up: an import failed, or the process group could not be formed.

    ``cause`` names the class of what a rank raised, such as "DeviceRefused", or is `NO_IMPORT`; None where none did.
    """

    cause: str | None = None


class RankHang(BaseException):
    """Ranks did not finish in time.

    No ``Exception``, because Hypothesis would run the example again and again to shrink it, each time for the whole
    deadline. ``mistakes`` and ``site`` are those of `ScalingMismatch`, where a gate was at work; ``account`` is that of
    `RankFailure`. ``is_of_reference``: the device that did not finish runs the reference of a gate.
    """

    ranks: tuple[int, ...]
    mistakes: tuple[str, ...] = ()
    site: str = ""
    account: object = None
    is_of_reference = False

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankHangInFixture(RankHang, Exception):
    """Ranks did not finish in time, in a fixture: pytest keeps account of what is set up only where Exceptions end
    it."""


class AgentLost(RankHang):
    """The process that had a rank as its child is gone, or its host is, in a run beyond one machine.

    Not shrunk either, because no example brings it about.
    """
