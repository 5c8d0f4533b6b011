"""The functions of libraries that read data or pretrained weights: how each is replaced when it is imported.

`_ROWS` names them. A replacement tries the original first, without a network, and makes data only if that fails.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_check.compare.fake_data import evidence, forms
from mgpu_check.compare.fake_data.forms import SAMPLES, Request
from mgpu_check.small_models import small_settings
from mgpu_check.torch_hooks.patches import Patches, around

if TYPE_CHECKING:
    from mgpu_check.compare.fake_data.paths import Area


def _open(area: Area, index: int, name: str, hints: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a missing path among the arguments of a function that opens files without Python.
    `hints`: what shows the form, or the name of the argument after the path that does."""
    path = kwargs[name] if name in kwargs else args[index] if len(args) > index else None
    if isinstance(hints, str):
        hints = {hints: kwargs.get(hints, next(iter(args[index + 1 :]), None))}
    is_missing = isinstance(path, (str, os.PathLike)) and not os.path.lexists(path)
    writes = any(isinstance(it, str) and it in ("w", "w+", "w-", "a", "x") for it in (*args, *kwargs.values()))
    call = re.sub(r"\.__\w+__$", "", original.__qualname__)
    if is_missing and not writes and (made := area.find(path, call, hints, directory="classes" in hints)):
        if name in kwargs:
            kwargs[name] = made
        else:
            args = (*args[:index], made, *args[index + 1 :])
    return original(*args, **kwargs)


def _download(area: Area, original: Any, url: Any, path: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Download nothing: the file is made when it is opened."""
    return (path, {}) if original.__name__ == "urlretrieve" else path


_VISION: Mapping[str, tuple[list[int], str, int]] = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST"), ([28, 28], "tensors", 10)),
    "CIFAR10": ([32, 32, 3], "targets", 10),
    "CIFAR100": ([32, 32, 3], "targets", 100),
    "SVHN": ([3, 32, 32], "labels", 10),
    "STL10": ([3, 96, 96], "labels", 10),
}
"""A class of torchvision -> the shape of a sample in its `data`, how its labels are kept, and the number of classes."""


def _vision(area: Area, name: str, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Initialize a dataset of torchvision; with random samples if its files are not there."""
    bound = inspect.signature(original).bind(dataset, *args, **kwargs)
    arguments = bound.arguments
    arguments["download"] = False
    part = str(arguments.get("split", "train" if arguments.get("train", True) else "test"))
    request = area.request(f"torchvision {name} {part}", name)
    try:
        return original(*bound.args, **bound.kwargs)
    except (RuntimeError, OSError):
        if request is None:
            raise
    import torch
    from torchvision.datasets import VisionDataset

    shape, kept, classes = _VISION[name]
    options = {"samples": SAMPLES, **area.plan.get(request.name, {})}
    transforms = (arguments.get(key) for key in ("transforms", "transform", "target_transform"))
    VisionDataset.__init__(dataset, str(arguments["root"]), *transforms)
    dataset.train, dataset.split = part == "train", part
    dataset.data = request.generator().integers(0, 256, (options["samples"], *shape), dtype="uint8")
    labels = request.generator().integers(0, classes, options["samples"])
    if kept == "tensors":
        dataset.data, labels = torch.from_numpy(dataset.data), torch.from_numpy(labels)
    setattr(dataset, "labels" if kept == "labels" else "targets", labels.tolist() if kept == "targets" else labels)
    if kept == "targets":
        dataset.classes = [str(number) for number in range(classes)]
        dataset.class_to_idx = {name: number for number, name in enumerate(dataset.classes)}
    return area.note("dataset", request, "random arrays", options)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from generators of a seed, and leave those of the script as they were."""
    import torch

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


_SEED = "seed of random weights"  # the only key of a dict that stands for downloaded weights


def _weights(area: Area, original: Any, url: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(url, *args, **kwargs)
    except Exception:
        if (request := area.request(url, original.__name__)) is None:
            raise
        area.note("weights", request, "random weights", {})
        return {_SEED: request.seed()}


def _load(area: Area, original: Any, module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.nn import init

    if _SEED not in state:
        return original(module, state, *args, **kwargs)
    with _seeded(state[_SEED]):
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                init.kaiming_uniform_(parameter)
            elif name.endswith("bias"):
                init.zeros_(parameter)
    return original(module, module.state_dict(), *args, **kwargs)


def _timm(area: Area, original: Any, model_name: str, pretrained: bool = False, **kwargs: Any) -> Any:
    request = area.request(model_name, "create_model") if pretrained else None
    if request is None:
        return original(model_name, pretrained, **kwargs)
    area.note("weights", request, "random weights", {})
    with _seeded(request.seed()):
        return original(model_name, False, **kwargs)


_TASKS = (("CausalLM", "llama"), ("Seq2Seq", "t5"), ("Image", "vit"), ("Speech|Audio|CTC", "wav2vec2"), ("", "bert"))
"""The class of a model -> the type of its model, if neither its name nor the class contain it."""
_ROLES = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
_SPECIAL = (*_ROLES.values(), "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _family(name: str, asked: type) -> str:
    """Return the type of a model that a class of transformers is asked for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    letters = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
    known = (key for key in CONFIG_MAPPING if re.sub(r"[^a-z0-9]", "", key) in letters)
    of_class = str(getattr(getattr(asked, "config_class", None) or asked, "model_type", ""))
    of_task = next(kind for task, kind in _TASKS if re.search(task, asked.__name__))
    return of_class or max(known, key=len, default=of_task)


def _tokenizer(path: str, family: str) -> None:
    """Write a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    numbers = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(numbers, []))
    tokenizer.add_special_tokens([*_SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first, last = ("[CLS]", "[SEP]") if re.search(r"bert|electra", family) else ("<s>", "</s>")
    if first == "[CLS]":
        special = [(token, numbers[token]) for token in (first, last)]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    options = {"model_max_length": 512, "chat_template": _CHAT, "bos_token": first, "eos_token": last, **_ROLES}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(path)


def _model_directory(path: str, request: Request, options: forms.Options) -> None:
    from safetensors.torch import save_file
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    os.makedirs(path)
    kind = request.hints["type"]
    settings = {"model_type": kind, **small_settings(CONFIG_MAPPING[kind]()), **options.setdefault("config", {})}
    Path(path, "config.json").write_text(json.dumps(settings), encoding="utf-8")
    Path(path, "preprocessor_config.json").write_text("{}", encoding="utf-8")
    _tokenizer(path, kind)
    save_file({}, os.path.join(path, "model.safetensors"), {"format": "pt"})  # a model initializes what is missing


def _exists(name: str) -> bool:
    """Return whether a model is in a directory or in the cache of models."""
    from huggingface_hub import try_to_load_from_cache

    if os.path.exists(name) or re.match(r"[./~]|.*/.*/", name):
        return os.path.exists(name)
    paths = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer.json", "adapter_config.json"))
    return any(isinstance(path, str) for path in paths)


def _pretrained(area: Area, original: Any, asked: type, name: Any, *args: Any, **kwargs: Any) -> Any:
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    made = None
    is_name = isinstance(name, str) and not re.search(r"checkpoint|ckpt|output|resume", name)
    if is_name and not area.busy and not _exists(name):
        kind = area.plan.get(name, {}).get("type") or _family(name, asked)
        if request := area.request(name, f"{asked.__name__}.from_pretrained", {"type": kind}):
            target = area.target(os.path.join("models", name.strip("./"), kind))
            made = area.made(target, request, "model", f"a small {kind} with random weights", _model_directory)
    if made is None:
        return original(asked, name, *args, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("revision", "subfolder", "variant")}
    if "okenizer" not in asked.__name__:
        with _seeded(Request(name, "", "", 0).seed()):
            return original(asked, made, *args, **kwargs)
    from transformers import PreTrainedTokenizerFast

    options = {key: value for key, value in kwargs.items() if key not in ("use_fast", "config")}  # of its own class
    return PreTrainedTokenizerFast.from_pretrained(made, **options)


_DIFFUSERS: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": (32, 32, 32, 32),  # latents are an eighth as wide, as those of Stable Diffusion
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    },
    "UNet2DConditionModel": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 32,  # `SIZES` of a text encoder
        "attention_head_dim": 8,
    },
}
"""A class of diffusers -> the settings of a small model; other models have no small default."""


def _diffusers(area: Area, models: bool, original: Any, asked: type, name: Any = None, *rest: Any, **how: Any) -> Any:
    """Load a model or a scheduler of diffusers: the original, or a small one with random weights."""
    try:
        return original(asked, name, *rest, **how)
    except OSError:
        settings = _DIFFUSERS.get(asked.__name__) if models else {}
        request = area.request(str(name), f"{asked.__name__}.from_pretrained")
        if settings is None or request is None:
            raise
    area.note("model", request, f"a small {asked.__name__} with random weights", {})
    with _seeded(request.seed()):
        result = asked(**settings)
    return result.to(how["torch_dtype"]) if models and how.get("torch_dtype") else result


class _Metric:
    """A metric of `evaluate` in place of one that is not there: each of its results is 0."""

    def add(self, *args: Any, **kwargs: Any) -> None: ...

    add_batch = add

    def compute(self, *args: Any, **kwargs: Any) -> defaultdict[str, float]:
        return defaultdict(float)


def _metric(area: Area, original: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(name, *args, **kwargs)
    except OSError:
        if (request := area.request(str(name), "evaluate.load")) is None:
            raise
    area.note("metric", request, "results are 0", {})
    return _Metric()


_KNOWN = (
    (r"glue mnli", "premise hypothesis label=class.3 idx"),
    (r"glue qqp", "question1 question2 label idx"),
    (r"glue qnli", "question sentence label idx"),
    (r"glue (mrpc|rte|wnli)", "sentence1 sentence2 label idx"),
    (r"glue", "sentence label idx"),
    (r"imdb|rotten_tomatoes|yelp_polarity|amazon_polarity|tweet", "text label"),
    (r"ag_news", "text label=class.4"),
    (r"fashion_mnist|mnist", "image=image.28.28.L label=class.10"),
    (r"cifar100", "img=image.32.32.RGB fine_label=class.100 coarse_label=class.20"),
    (r"cifar10|cifar-10", "img=image.32.32.RGB label=class.10"),
    (r"imagenet|food101|beans|cats|pets|flowers|eurosat", "image label=class.10"),
    (r"caption|laion|pokemon|naruto", "image text"),
    (r"ultra(chat|feedback)|capybara|no_robots", "prompt chosen=chat rejected=chat messages"),
    (r"speech_commands|superb|librispeech|common_voice", "audio text sentence label=class.10"),
    (r"wikitext|c4|openwebtext|pile|bookcorpus|wikipedia|fineweb|tinystories|pajama|ptb|lm1b|enwik|dclm", "text"),
)
"""The name of a dataset -> its columns: a name, and its kind if the name does not show it."""


def _columns(name: str) -> dict[str, str]:
    spec = next((spec for pattern, spec in _KNOWN if re.search(pattern, name.lower())), "")
    pairs = [word.partition("=") for word in spec.split()]
    columns = {column: kind.replace(".", " ") or forms.column_kind(column) for column, _, kind in pairs}
    return columns or forms.columns_of(evidence.user_files(), "text label")


def _rows(request: Request, options: Mapping[str, Any], split: str) -> Any:
    """Return a dataset of the columns of `options`."""
    import datasets

    own = Request(f"{request.name} {split}", request.call, request.file, request.line)
    columns, numbers = options["columns"], range(options["samples"])
    rows = {name: [forms.value(kind, own, name, row) for row in numbers] for name, kind in columns.items()}
    result = datasets.Dataset.from_dict(rows, split=datasets.NamedSplit(split))
    for name, kind in columns.items():
        if kind.startswith("class"):
            names = [str(number) for number in range(int(kind.split()[1]))]
            result = result.cast_column(name, datasets.ClassLabel(names=names))
        elif kind == "audio":
            result = result.cast_column(name, datasets.Audio())
    return result


def _data_files(area: Area, builder: str, files: Any) -> Any:
    """Return the paths of data files, with made ones in place of those that do not exist."""
    if isinstance(files, Mapping):
        return {key: _data_files(area, builder, value) for key, value in files.items()}
    if isinstance(files, (list, tuple)):
        return [_data_files(area, builder, value) for value in files]
    suffix = {"text": ".txt", "json": ".jsonl"}.get(builder, f".{builder}")
    is_there = os.path.lexists(files) or re.search(r"[*?\[]|://", str(files))
    return files if is_there else area.find(files, "load_dataset", {"suffix": suffix}) or files


def _load_dataset(area: Area, original: Any, path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load a dataset: files that are made, if they do not exist; else the original, or rows that are made."""
    import datasets

    path = os.fspath(path)
    files, folder, split = (kwargs.get(option) for option in ("data_files", "data_dir", "split"))
    if path in ("json", "csv", "text", "parquet") and files is not None:
        kwargs["data_files"] = _data_files(area, path, files)
        if kwargs["data_files"] != files:
            kwargs["cache_dir"] = os.path.join(area.root, "cache")
    if path == "imagefolder" and folder is not None and not os.path.lexists(folder):
        kwargs["data_dir"] = area.find(folder, "load_dataset", _FOLDER, directory=True)
    try:
        return original(path, *([] if name is None else [name]), *args, **kwargs)
    except Exception:
        keys = {key for file in evidence.user_files() for key in evidence.keys(file)}
        if original.__name__ == "load_from_disk" and keys.isdisjoint(("train", "validation", "test")):
            split = "train"
        request = area.request(" ".join(str(word) for word in (path, name) if word), "load_dataset")
        if request is None or files is not None or evidence.is_handled():
            raise
    options = {"columns": _columns(request.name), "samples": SAMPLES, **area.plan.get(request.name, {})}
    area.note("dataset", request, "rows", options)
    wanted: Request = request

    class Splits(datasets.DatasetDict):  # type: ignore[misc]  # the library is not installed where types are checked
        """Has a split of any name, which is made when it is first asked for."""

        def __missing__(self, split: str) -> Any:
            self[split] = _rows(wanted, options, split)
            return self[split]

    result = Splits()
    is_list = isinstance(split, (list, tuple))
    names: Any = split if is_list else [split] if split else ("train", "validation", "test")
    chosen = [result[re.split(r"\W", str(name))[0] or "train"] for name in names]
    if kwargs.get("streaming"):
        chosen = [value.to_iterable_dataset() for value in chosen]
        result = datasets.IterableDatasetDict(zip(names, chosen, strict=True))
    return result if split is None else chosen if is_list else chosen[0]


_FOLDER = {"suffix": ".jpg", "classes": 4}
_ROWS: tuple[tuple[str, str, Callable[..., Any], tuple[Any, ...]], ...] = (
    ("numpy", "memmap.__new__", _open, (1, "filename", "dtype")),
    ("numpy", "fromfile", _open, (0, "file", "dtype")),
    ("pandas", "read_parquet", _open, (0, "path", {})),
    ("pyarrow.parquet", "read_table", _open, (0, "source", {})),
    ("pyarrow.parquet", "ParquetFile.__init__", _open, (1, "source", {})),
    ("h5py", "File.__init__", _open, (1, "name", {})),
    ("soundfile", "SoundFile.__init__", _open, (1, "file", {})),
    ("torchaudio", "load", _open, (0, "uri", {})),
    ("cv2", "imread", _open, (0, "filename", {})),
    *(("torchvision.datasets", f"{name}Folder.__init__", _open, (1, "root", _FOLDER)) for name in ("Image", "Dataset")),
    *(("torchvision.io", name, _open, (0, "path", {})) for name in ("read_image", "read_file", "decode_image")),
    ("torch.hub", "download_url_to_file", _download, ()),
    ("urllib.request", "urlretrieve", _download, ()),
    *((module, "download", _download, ()) for module in ("wget", "gdown")),
    *(("torchvision.datasets", f"{name}.__init__", _vision, (name,)) for name in _VISION),
    ("torch.hub", "load_state_dict_from_url", _weights, ()),
    ("torch.nn.modules.module", "Module.load_state_dict", _load, ()),
    ("timm.models._factory", "create_model", _timm, ()),
    ("transformers.configuration_utils", "PretrainedConfig.from_pretrained", _pretrained, ()),
    ("transformers.models.auto.configuration_auto", "AutoConfig.from_pretrained", _pretrained, ()),
    ("transformers.modeling_utils", "PreTrainedModel.from_pretrained", _pretrained, ()),
    ("transformers.models.auto.auto_factory", "_BaseAutoModelClass.from_pretrained", _pretrained, ()),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.from_pretrained", _pretrained, ()),
    ("transformers.models.auto.tokenization_auto", "AutoTokenizer.from_pretrained", _pretrained, ()),
    ("transformers.models.auto.image_processing_auto", "AutoImageProcessor.from_pretrained", _pretrained, ()),
    ("transformers.image_processing_base", "ImageProcessingMixin.from_pretrained", _pretrained, ()),
    ("diffusers.models.modeling_utils", "ModelMixin.from_pretrained", _diffusers, (True,)),
    ("diffusers.schedulers.scheduling_utils", "SchedulerMixin.from_pretrained", _diffusers, (False,)),
    ("evaluate.loading", "load", _metric, ()),
    *(("datasets.load", name, _load_dataset, ()) for name in ("load_dataset", "load_from_disk")),
)
"""Module, attribute, its replacement, and the first arguments of the replacement after the area."""


def rows(area: Area) -> dict[str, Callable[[], None]]:
    """Return module -> what replaces its functions, once it is imported. Act at once on imported modules."""

    def replace(module: str) -> None:
        patches = Patches()
        for _, attribute, new, arguments in (row for row in _ROWS if row[0] == module):
            *owners, name = attribute.split(".")
            owner: Any = sys.modules[module]
            for part in owners:
                owner = getattr(owner, part, None)
            if hasattr(owner, name):
                patches.wrap(owner, name, around(functools.partial(new, area, *arguments)))

    later: dict[str, Callable[[], None]] = {module: functools.partial(replace, module) for module, *_ in _ROWS}
    for module in sys.modules.keys() & later.keys():
        later.pop(module)()
    return later
