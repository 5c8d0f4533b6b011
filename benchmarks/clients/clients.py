"""The clients: scripts as people write them, and what each command has to say of each."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CLIENTS", "GATES", "Client", "Expected"]


@dataclass(frozen=True)
class Expected:
    """An exit code, and words that must stand in the output.

    Attributes:
        never: words that must not.
    """

    code: int
    words: tuple[str, ...] = ()
    never: tuple[str, ...] = ("Traceback", "internal error")


@dataclass(frozen=True)
class Client:
    """A script, and what the commands say of it on two simulated GPUs.

    Attributes:
        package: what must be installed for it, beside torch.
        arguments: of the script; those with W in braces are for `compare` only, where `simulated` gives others.
        launched: under torchrun where it is simulated; else as a single process.
    """

    name: str
    script: str
    compare: Expected
    arguments: tuple[str, ...] = ()
    launched: bool = True
    package: str = ""
    simulate: Expected = field(default=Expected(0))
    simulated: tuple[str, ...] | None = None
    options: tuple[str, ...] = ()


def equal(steps: int, *words: str) -> Expected:
    return Expected(0, (f"equal: {steps} steps on 2 ranks", *words))


CLIENTS = (
    Client(
        "ddp example",
        "toy_ddp.py",
        Expected(2, ("no optimizer step was seen on one device", "This example wants two GPUs")),
    ),
    Client("series, torchrun", "series.py", equal(4), ("--batch={16/W}",), simulated=()),
    Client(
        "series, snapshot",
        "series.py",
        equal(4),
        ("--batch={16/W}", "--snapshot=last.pt"),
        simulated=("--snapshot=simulated.pt",),
        options=("--fresh-directory",),
    ),
    Client(
        "series, one class",
        "series.py",
        Expected(2, ("the gradients of all parameters are zero in all 4 steps",)),
        ("--batch={16/W}", "--loss=ce"),
        simulated=("--loss=ce",),
    ),
    Client(
        "series, spawn",
        "series.py",
        Expected(2, ("the script starts its ranks itself",)),
        ("--spawn",),
        launched=False,
    ),
    Client("FSDP2", "parallelized.py", equal(3), ("--how=fsdp",)),
    Client("tensor parallel", "parallelized.py", equal(3), ("--how=tensor",)),
    Client("sequence parallel", "parallelized.py", equal(3), ("--how=sequence",)),
    Client(
        "images, DataParallel",
        "images.py",
        Expected(1, ("batch-statistics-per-rank", "2 GPUs of one process")),
        launched=False,
    ),
    Client(
        "images, group norm",
        "images.py",
        Expected(0, ("equal: 4 steps on 2 GPUs of one process",)),
        ("--norm=group",),
        launched=False,
    ),
    Client(
        "images, torchrun",
        "images.py",
        Expected(1, ("batch-statistics-per-rank", "step 1")),
        ("--distributed", "--batch-size={12/W}"),
        simulated=("--distributed",),
    ),
    Client(
        "images, spawn",
        "images.py",
        Expected(2, ("the script starts its ranks itself",)),
        ("--multiprocessing-distributed",),
        launched=False,
    ),
    Client("digits", "digits.py", Expected(1, ("dataset-not-split",)), launched=False),
    Client("GPT, split", "gpt.py", equal(3), ("--data=split",)),
    Client(
        "GPT, compiled",
        "gpt.py",
        equal(3),
        ("--data=split", "--compile"),
        simulate=Expected(0, ("torch.compile is left out on simulated GPUs",)),
    ),
    Client(
        "GPT, drawn",
        "gpt.py",
        Expected(2, ("the ranks together saw 16 samples", "divide the global batch")),
        ("--accumulation=2",),
    ),
    Client(
        "GPT, bfloat16",
        "gpt.py",
        Expected(2, ("gives bfloat16", "compute in float32 for the comparison")),
        ("--data=split", "--dtype=bfloat16"),
    ),
    Client(
        "GPT, dropout",
        "gpt.py",
        Expected(2, ("the forward pass of GPT", "set the probability of dropout to 0")),
        ("--data=split", "--dropout=0.1"),
    ),
    Client("textbook", "textbook.py", Expected(0, ("equal: 4 steps on 2 GPUs of one process",)), launched=False),
    Client("accelerate", "with_accelerate.py", equal(4), package="accelerate"),
    Client("Lightning", "with_lightning.py", equal(6), package="lightning"),
    Client("Fabric", "with_fabric.py", equal(3), package="lightning"),
    Client(
        "Trainer",
        "with_trainer.py",
        equal(3),
        ("--per-device-train-batch-size={8/W}",),
        package="transformers",
        simulated=(),
    ),
    Client("torchmetrics", "with_metrics.py", equal(2), package="torchmetrics"),
)

GATES = {
    "test_toy": "",
    "test_toy_without_ddp": "gradients-not-synchronized",
    "test_gpt[divided]": "",
    "test_gpt[not-divided]": "accumulation-factor",
    "test_images[batch]": "batch-statistics-per-rank",
    "test_images[group]": "",
    "test_metrics": "",
}
"""What the gate has to say of each test in `programs/gates.py`: the mistake, or nothing."""
