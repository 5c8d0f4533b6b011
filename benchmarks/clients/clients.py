"""The clients: scripts as people write them, and what each command has to say of each."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CLIENTS", "GATES", "MODELS", "Client", "Expected", "Gate"]


@dataclass(frozen=True)
class Expected:
    """An exit code, and words that the output must contain.

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


@dataclass(frozen=True)
class Gate:
    """A test in a file of `programs`, and what the gate says of it.

    Attributes:
        of: the name of the client that trains so; empty without one.
        mistake: the first that is named; empty where the test passes, or fails for what NCCL refuses.
        words: that its failure must contain.
        package: what must be installed for it.
        file: the file of the test, without its suffix.
        gpus: the simulated GPUs that it needs.
    """

    test: str
    of: str = ""
    mistake: str = ""
    words: str = ""
    package: str = ""
    file: str = "gates"
    gpus: int = 2


def torchao(test: str, words: str = "") -> Gate:
    return Gate(f"test_torchao{test}", words=words, package="torchao", file="gates_float8")


def megatron(test: str, words: str = "", gpus: int = 2, mistake: str = "") -> Gate:
    name, package, file = f"test_megatron{test}", "megatron", "gates_megatron"
    return Gate(name, words=words, package=package, file=file, gpus=gpus, mistake=mistake)


def refused(words: str) -> Expected:
    """By torch, with a traceback of its own."""
    return Expected(1, (words,), ("internal error",))


ONE_GPU = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
NOT_ON_GPUS = "No backend type associated with device type cpu"


def equal(steps: int, *words: str) -> Expected:
    return Expected(0, (f"equal: {steps} steps on 2 ranks", *words))


FOUR = "train the same 4 parameters"
ZERO = {
    "no ZeRO": ("--stage=0",),
    "ZeRO-1": ("--stage=1",),
    "ZeRO-2, offload": ("--stage=2", "--offload"),
    "ZeRO-3": ("--stage=3",),
}

CLIENTS = (
    Client(
        "ddp example",
        "toy_ddp.py",
        Expected(2, ("no optimizer step was seen on one device", "This example wants two GPUs")),
    ),
    Client("first DDP", "first_ddp.py", equal(4)),
    Client(
        "first DDP, all on one GPU",
        "first_ddp.py",
        refused(ONE_GPU),
        ("--mistake=device",),
        simulate=refused(ONE_GPU),
    ),
    Client(
        "first DDP, module on the CPU",
        "first_ddp.py",
        refused(NOT_ON_GPUS),
        ("--mistake=module",),
        simulate=refused(NOT_ON_GPUS),
    ),
    Client("first DDP, one order", "first_ddp.py", Expected(1, ("epochs-not-reshuffled",)), ("--mistake=order",)),
    Client(
        "first DDP, not wrapped", "first_ddp.py", Expected(1, ("gradients-not-synchronized",)), ("--mistake=wrapper",)
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
        equal(2, "replayed, because"),
        ("--spawn",),
        launched=False,
    ),
    Client(
        "series, processes",
        "series.py",
        equal(2, "replayed, because"),
        ("--processes",),
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
        Expected(1, ("batch-statistics-per-rank", "replayed, because")),
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
        simulate=Expected(0, ("torch.compile has no effect on simulated GPUs",)),
    ),
    Client(
        "GPT, drawn",
        "gpt.py",
        equal(2, "replayed, because", "the ranks together saw 16 samples"),
        ("--accumulation=2",),
    ),
    Client(
        "GPT, bfloat16",
        "gpt.py",
        Expected(2, ("2 of 28 trained parameters were not compared", "compute in float32, as narrower dtypes")),
        ("--data=split", "--dtype=bfloat16"),
    ),
    Client(
        "GPT, dropout",
        "gpt.py",
        equal(2, "replayed, because", "GPT.forward"),
        ("--data=split", "--dropout=0.1"),
    ),
    Client(
        "mini GPT",
        "mini_gpt.py",
        equal(2, "replayed, because", "the ranks together saw 32 samples", "the batches of the DataLoader"),
        simulated=("--snapshot=mini.pt",),
        options=("--fresh-directory",),
    ),
    Client(
        "mini GPT, comparable",
        "mini_gpt.py",
        equal(4),
        ("--no-amp", "--dropout=0", "--batch-size={16/W}"),
        simulated=("--no-amp", "--dropout=0", "--snapshot=other.pt"),
        options=("--fresh-directory",),
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
    Client(
        "accelerate, a shape",
        "accelerate_shape.py",
        Expected(2, ("no optimizer step was seen on one device",)),
        package="accelerate",
        simulate=Expected(1, ("in copy_tensor_to_devices",), ("internal error",)),  # uninitialised memory is summed
    ),
    *(
        Client(f"DeepSpeed, {name}", "with_deepspeed.py", equal(3, FOUR), options, package="deepspeed")
        for name, options in ZERO.items()
    ),
    Client(
        "DeepSpeed, same rows",
        "with_deepspeed.py",
        Expected(1, ("the gradient of 0.weight",)),
        ("--stage=2", "--same-rows"),
        package="deepspeed",
    ),
)

MEGATRON = (
    *("tp", "tp-sp", "tp-swiglu", "tp-offset", "pp", "pp-tied", "pp-interleaved", "dp", "dp-distributed", "ep"),
)
MEGATRON_PAIRS = ("dp-tp", "pp-tp", "pp-dp-distributed", "ep-tp")

GATES = (
    Gate("test_toy", "ddp example"),
    Gate("test_toy_on_one_gpu", "first DDP, all on one GPU", words=ONE_GPU),
    Gate("test_toy_on_the_cpu", "first DDP, module on the CPU", words=NOT_ON_GPUS),
    Gate("test_toy_without_ddp", "first DDP, not wrapped", mistake="gradients-not-synchronized"),
    Gate("test_loader[True]", "first DDP"),
    Gate("test_loader[False]", "first DDP, one order", mistake="epochs-not-reshuffled"),
    Gate("test_gpt[divided]", "GPT, split"),
    Gate("test_gpt[not-divided]", mistake="accumulation-factor"),
    Gate("test_images[batch]", "images, torchrun", mistake="batch-statistics-per-rank"),
    Gate("test_images[group]", "images, group norm"),
    Gate("test_textbook", "textbook"),
    Gate("test_fsdp", "FSDP2"),
    Gate("test_metrics", "torchmetrics", package="torchmetrics"),
    *(torchao(f"[{recipe}]") for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    torchao("_factor", "results on 2 ranks differ from one device"),
    torchao("_all_gather"),
    torchao("_wide_all_gather", "declared: float8_e4m3fn"),
    *(megatron(f"[{case}]") for case in MEGATRON),
    *(megatron(f"_pairs[{case}]", gpus=4) for case in MEGATRON_PAIRS),
    *(Gate(f"test_small_gpt[{axis}]", package="megatron", file="gates_megatron_page") for axis in ("tp", "pp", "dp")),
    megatron("_context_parallel", "Context parallelism is only supported by TEDotProductAttention"),
    megatron("_gradient_not_reduced", "input_layernorm.weight"),
    megatron("_wrong_dimension", "linear_fc1.weight: dimension 1 is divided among 2 ranks"),
    megatron("_wrong_stride", "linear_fc1.weight", mistake="blocks-in-other-order"),
)

TIED = "are one tensor on one device, and several here: it is equal with tied weights: untied"
MODELS = {
    "transformers:Qwen3ForCausalLM": Expected(0, ("trains as on one device under ddp, fsdp2, tp, tp-layers\n",)),
    "transformers:MixtralForCausalLM": Expected(0, ("trains as on one device under ddp, fsdp2, tp, tp-layers, ep\n",)),
    "transformers:GPT2LMHeadModel": Expected(1, (TIED, "trains as on one device under ddp, fsdp2; differs under tp-l")),
}
"""Target of `mgpu-check model` -> what it says on two simulated GPUs; the first part is the library that it needs."""
