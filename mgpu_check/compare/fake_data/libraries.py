"""The functions of libraries that read data or pretrained weights: how each is replaced when it is imported.

`_ROWS` names them. A replacement tries the original first, without a network, and makes data only if that fails.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from email.message import Message
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.response import addinfourl

from mgpu_check.compare.fake_data import evidence, forms
from mgpu_check.compare.fake_data.forms import SAMPLES, Request
from mgpu_check.torch_hooks.patches import Patches, around

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mgpu_check.compare.fake_data.paths import Area


_WRITING = {"w", "w+", "w-", "a", "x"}


def _path(area: Area, index: int, name: str, hints: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a missing path among the arguments of a function that opens files without Python.
    `hints`: what shows the form, or the name of the argument after the path that does."""
    path = kwargs[name] if name in kwargs else args[index] if len(args) > index else None
    if isinstance(hints, str):
        hints = {hints: kwargs[hints] if hints in kwargs else next(iter(args[index + 1 :]), None)}
    is_path = isinstance(path, (str, os.PathLike)) and not os.path.lexists(path)
    reads = _WRITING.isdisjoint(word for word in (*args, *kwargs.values()) if isinstance(word, str))
    if is_path and reads and (made := area.find(path, _shown(original), hints, directory="classes" in hints)):
        kwargs = {**kwargs, name: made} if name in kwargs else kwargs
        args = args if name in kwargs else (*args[:index], made, *args[index + 1 :])
    with area.hinting(hints):
        return original(*args, **kwargs)


def _shown(function: Any) -> str:
    return re.sub(r"\.__\w+__$", "", getattr(function, "__qualname__", str(function)))


def _nothing_downloaded(area: Area, index: int, result: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a download to a file: the file is made when it is opened."""
    return result(args[index] if len(args) > index else None) if callable(result) else result


def _content(area: Area, url: object, call: str) -> bytes:
    name = re.sub(r"[?#].*", "", str(url))
    request = area.request(name, call)
    form = forms.form_of(name)
    path = area.made(area.target(name), request, "download", *form) if request and form else None
    if path is None:
        if request is not None:
            area.note("missing", request, "nothing shows the form of this download", {}, "download it before")
        raise OSError(f"{url}: --fake-data uses no network")
    return Path(path).read_bytes()


def _urlopen(area: Area, original: Any, url: Any, *args: Any, **kwargs: Any) -> Any:
    text = getattr(url, "full_url", url)
    if _is_local(text):
        return original(url, *args, **kwargs)
    return addinfourl(BytesIO(_content(area, text, "urlopen")), Message(), text, 200)


def _is_local(url: object) -> bool:
    return re.match(r"\w+://(localhost|127\.|\[::1)|file:", str(url)) is not None


def _request(area: Area, original: Any, session: Any, method: str, url: str, *args: Any, **kwargs: Any) -> Any:
    if _is_local(url) or method.upper() != "GET" or evidence.is_handled():
        return original(session, method, url, *args, **kwargs)
    import requests

    response = requests.Response()
    response._content, response.status_code, response.url = _content(area, url, "requests.get"), 200, url
    response.encoding = "utf-8"
    return response


def _hub_file(area: Area, original: Any, repo_id: str, filename: str = "", *args: Any, **kwargs: Any) -> Any:
    try:
        return original(repo_id, filename, *args, **kwargs)
    except Exception:
        name, form = f"hub/{repo_id}/{filename}", forms.form_of(filename)
        request = None if form is None or evidence.is_handled() else area.request(name, "hf_hub_download")
        made = request and form and area.made(area.target(name), request, "download", *form)
        if not made:
            raise
        return made


# torchvision

_ARRAYS: Mapping[str, tuple[list[int], str, int]] = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST"), ([28, 28], "tensors", 10)),
    "CIFAR10": ([32, 32, 3], "targets", 10),
    "CIFAR100": ([32, 32, 3], "targets", 100),
    "SVHN": ([3, 32, 32], "labels", 10),
    "STL10": ([3, 96, 96], "labels", 10),
}
"""A class of torchvision -> the shape of a sample in its `data`, how its labels are kept, and the number of classes."""
_TEN = ("ImageNet", "EuroSAT", "Imagenette", "Places365", "Caltech101", "Caltech256", "INaturalist")
_MORE = (
    "Flowers102=102 Food101=101 OxfordIIITPet=37 StanfordCars=196 DTD=47 FGVCAircraft=100 GTSRB=43 SUN397=397 PCAM=2"
)
_IMAGES = dict.fromkeys(_TEN, 10) | {name: int(count) for name, _, count in (w.partition("=") for w in _MORE.split())}
"""A class of torchvision with images in files -> the number of classes."""


def _vision(area: Area, name: str, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Initialize a dataset of torchvision; with random samples if its files are not there."""
    bound = inspect.signature(original).bind(dataset, *args, **kwargs)
    if "download" in bound.arguments:
        bound.arguments["download"] = False
    try:
        return original(*bound.args, **bound.kwargs)
    except (RuntimeError, OSError, ModuleNotFoundError):
        part = str(bound.arguments.get("split", "train" if bound.arguments.get("train", True) else "test"))
        request = area.request(f"torchvision {name} {part}", name)
        if request is None:
            raise
    import torch
    from torchvision.datasets import VisionDataset

    options = dict(area.plan.get(request.name, {}))
    shape, kept, count = _ARRAYS[name] if name in _ARRAYS else ([], "", _IMAGES[name])
    samples, classes = options.setdefault("samples", SAMPLES), options.setdefault("classes", count)
    transforms = {key: bound.arguments.get(key) for key in ("transform", "target_transform")}
    VisionDataset.__init__(dataset, str(bound.arguments.get("root", "")), **transforms)
    dataset.train, dataset.split = part == "train", part
    labels = [row % classes for row in range(samples)]
    if len(getattr(type(dataset), "classes", None) or ()) != classes:
        dataset.classes = [str(number) for number in range(classes)]
    if not isinstance(getattr(type(dataset), "class_to_idx", None), property):
        dataset.class_to_idx = {word: number for number, word in enumerate(dataset.classes)}
    if kept:
        numbers = request.array().integers(0, 256, (samples, *shape), dtype="uint8")
        dataset.data = torch.from_numpy(numbers) if kept == "tensors" else numbers
        own = {"tensors": torch.tensor(labels), "targets": labels, "labels": request.array().permutation(labels)}
        setattr(dataset, "labels" if kept == "labels" else "targets", own[kept])
    else:
        pictures = [forms.image(request.array(row), options.setdefault("size", [256, 256])) for row in range(samples)]
        dataset.samples = dataset.imgs = [(f"{row:05}.png", label) for row, label in enumerate(labels)]
        dataset.targets, dataset._labels, dataset._fake = labels, labels, [*zip(pictures, labels, strict=True)]
    return area.note("dataset", request, "random images", options)


def _item(original: Any, dataset: Any, index: int) -> Any:
    if "_fake" not in vars(dataset):
        return original(dataset, index)
    sample = dataset._fake[index]
    return sample if dataset.transforms is None else dataset.transforms(*sample)


def _length(original: Any, dataset: Any) -> int:
    return len(dataset._fake) if "_fake" in vars(dataset) else original(dataset)


def _vision_classes(area: Area, module: Any, patches: Patches) -> None:
    for name in (*_ARRAYS, *_IMAGES):
        if kind := getattr(module, name, None):
            patches.wrap(kind, "__init__", around(functools.partial(_vision, area, name)))
            if name in _IMAGES:
                patches.wrap(kind, "__getitem__", around(_item))
                patches.wrap(kind, "__len__", around(_length))


# Weights


class _Weights(dict[str, Any]):
    """Stands for downloaded weights: a module that loads it gets random ones, seeded by `name`."""

    name = ""


def randomize(module: Any, request: Request) -> None:
    """Give the parameters of a module values that depend on their names, their shapes and the request only."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                generator = torch.Generator().manual_seed(request.seed(name))
                numbers = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(numbers / math.sqrt(max(parameter[0].numel(), 1)))
            elif name.endswith("bias"):
                parameter.zero_()


def _weights(area: Area, index: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except Exception:
        name = str(args[index] if len(args) > index else kwargs.get("url", ""))
        request = area.request(name, "load_state_dict_from_url")
        if request is None:
            raise
        area.note("weights", request, "random weights", {})
        weights = _Weights()
        weights.name = name
        return weights


def _load(area: Area, original: Any, module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(state, _Weights):
        return original(module, state, *args, **kwargs)
    randomize(module, Request(state.name, "", "", 0))
    return original(module, module.state_dict(), *args, **kwargs)


def _timm(area: Area, original: Any, model_name: str, pretrained: bool = False, **kwargs: Any) -> Any:
    request = area.request(model_name, "create_model") if pretrained else None
    if request is None:
        return original(model_name, pretrained, **kwargs)
    model = original(model_name, False, **kwargs)
    randomize(model, request)
    area.note("weights", request, "random weights", {})
    return model


# transformers

_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "dim", "d_kv"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "head_dim": 8,
    "vocab_size": 512,
    "moe_intermediate_size": 32,
    "projection_dim": 32,
    "embedding_size": 32,
}
_FAMILIES = (
    (r"deberta.?v[23]", "deberta-v2"),
    (r"tinyllama|smollm|vicuna|alpaca|yi-|zephyr|minimind", "llama"),
    (r"pythia", "gpt_neox"),
    (r"gemma.?2", "gemma2"),
    (r"phi.?3", "phi3"),
    (r"distilgpt2|dialogpt", "gpt2"),
    (r"minilm|bge|e5-|gte-|scibert|finbert", "bert"),
)
"""The name of a model -> its type, if the name does not contain the type."""
_TASKS = (("CausalLM", "llama"), ("Seq2Seq", "t5"), ("Image", "vit"), ("Speech|Audio|CTC", "wav2vec2"), ("", "bert"))
"""The class of a model -> the type of its model, if neither name nor class have it."""
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _family(name: str, asked: type) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = getattr(getattr(asked, "config_class", None) or asked, "model_type", "")
    if own:
        return str(own)
    low = name.rpartition("/")[2].lower()
    if alias := next((kind for pattern, kind in _FAMILIES if re.search(pattern, low)), None):
        return alias
    plain = re.sub(r"[^a-z0-9]", "", low)
    known = [key for key in CONFIG_MAPPING if re.sub(r"[^a-z0-9]", "", key) in plain]
    return max(known, key=len, default=next(kind for task, kind in _TASKS if re.search(task, asked.__name__)))


def _configuration(kind: str) -> dict[str, Any]:
    """Return the settings of a small model of a type of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    small: dict[str, Any] = {key: size for key, size in _SIZES.items() if isinstance(getattr(default, key, None), int)}
    for part in ("text_config", "vision_config", "audio_config"):
        if (inner := getattr(default, part, None)) is not None and hasattr(inner, "to_dict"):
            small[part] = {key: size for key, size in _SIZES.items() if isinstance(getattr(inner, key, None), int)}
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    small |= {key: number for key, number in tokens.items() if getattr(default, key, None) is not None}
    return {**small, "model_type": kind}


def _tokenizer(path: str, family: str) -> None:
    """Write a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    numbers = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(numbers, []))
    tokenizer.add_special_tokens([*_SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first, last = ("[CLS]", "[SEP]") if re.search(r"bert|electra", family) else ("<s>", "</s>")
    if first == "[CLS]":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, numbers[token]) for token in (first, last)],
        )
    tokenizer.save(os.path.join(path, "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "chat_template": _CHAT}
    settings |= {f"{name}_token": token for name, token in _ROLES.items()} | {"bos_token": first, "eos_token": last}
    Path(path, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _model_directory(path: str, request: Request, options: forms.Options) -> None:
    from safetensors.torch import save_file

    os.makedirs(path)
    kind = request.hints["type"]
    settings = {**_configuration(kind), **options.setdefault("config", {})}
    Path(path, "config.json").write_text(json.dumps(settings), encoding="utf-8")
    Path(path, "preprocessor_config.json").write_text("{}", encoding="utf-8")
    _tokenizer(path, kind)
    save_file({}, os.path.join(path, "model.safetensors"), {"format": "pt"})  # a model initializes what is missing


def _is_there(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if re.search(r"checkpoint|ckpt|output|resume", name) or os.path.exists(name):
        return True  # a checkpoint of the script is no data
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return False
    cached = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer.json", "adapter_config.json"))
    return any(isinstance(path, str) for path in cached)


def _pretrained(area: Area, what: str, original: Any, asked: type, name: Any, *args: Any, **kwargs: Any) -> Any:
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    if area.busy or not isinstance(name, str) or name.startswith(area.root) or _is_there(name):
        return original(asked, name, *args, **kwargs)
    kind = area.plan.get(name, {}).get("type") or _family(name, asked)
    if (request := area.request(name, f"{asked.__name__}.from_pretrained", {"type": kind})) is None:
        return original(asked, name, *args, **kwargs)
    target = area.target(os.path.join("models", name.strip("./"), kind))
    made = area.made(target, request, "model", f"a small {kind} with random weights", _model_directory)
    if made is None:
        return original(asked, name, *args, **kwargs)
    if what == "tokenizer":
        import transformers

        result = transformers.PreTrainedTokenizerFast.from_pretrained(made, **_known(kwargs))
    else:
        with _seeded(request.seed()):
            result = original(asked, made, *args, **kwargs)
    for holder in (result, getattr(result, "config", None)):
        for attribute in ("name_or_path", "_name_or_path"):
            if isinstance(getattr(holder, attribute, None), str):
                setattr(holder, attribute, name)
    return result


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options of a tokenizer that say which class and file it has."""
    return {key: value for key, value in options.items() if key not in ("use_fast", "config", "revision", "subfolder")}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from generators of a seed, and leave those of the script as they were."""
    import torch

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


# datasets

_TEXTS = "wikitext|c4|openwebtext|the_?pile|book|wikipedia|fineweb|tinystories|redpajama|slimpajama|ptb|lm1b|enwik|dclm"
_GLUE = "cola=sentence sst2=sentence mrpc=sentence1,sentence2 qqp=question1,question2 stsb=sentence1,sentence2 "
_GLUE += "mnli=premise,hypothesis qnli=question,sentence rte=sentence1,sentence2 wnli=sentence1,sentence2"
_KNOWN = (
    (r"imdb|rotten_tomatoes|yelp_polarity|amazon_polarity|tweet", "text label=class.2"),
    (r"ag_news", "text label=class.4"),
    (r"emotion", "text label=class.6"),
    (r"yelp_review_full|amazon_reviews", "text label=class.5"),
    (r"squad", "id=string title context question answers"),
    (r"fashion_mnist|mnist", "image=image.28.28.L label=class.10"),
    (r"cifar100", "img=image.32.32.RGB fine_label=class.100 coarse_label=class.20"),
    (r"cifar10|cifar-10", "img=image.32.32.RGB label=class.10"),
    (r"imagenet|food101|beans|cats|pets|flowers|eurosat", "image label=class.10"),
    (r"alpaca", "instruction input output text"),
    (r"dolly", "instruction context response category=string"),
    (r"ultrafeedback", "prompt chosen=chat rejected=chat messages"),
    (r"ultrachat|capybara|no_robots", "prompt prompt_id=string messages"),
    (r"hh-rlhf", "chosen rejected"),
    (r"cnn_dailymail", "article highlights id=string"),
    (r"xsum", "document summary id=string"),
    (r"samsum|dialogsum", "dialogue summary id=string"),
    (r"conll", "tokens pos_tags ner_tags"),
    (r"wmt|opus|iwslt", "translation"),
    (r"gsm8k", "question answer"),
    (r"speech_commands|superb", "audio file=string label=class.10"),
    (r"librispeech", "audio text"),
    (r"common_voice", "audio sentence"),
    (_TEXTS, "text"),
)
"""The name of a dataset -> its columns: a name, and its kind if the name does not show it."""
_BUILDERS = ("json", "csv", "text", "parquet", "arrow", "pandas")


def _columns(name: str, part: object) -> dict[str, str]:
    if (row := dict(pair.split("=") for pair in _GLUE.split()).get(str(part))) and "glue" in name:
        kind = "float" if part == "stsb" else f"class {3 if part == 'mnli' else 2}"
        return {**dict.fromkeys(row.split(","), "string"), "label": kind, "idx": "int"}
    spec = next((spec for pattern, spec in _KNOWN if re.search(pattern, name.lower())), "")
    pairs = [word.partition("=") for word in spec.split()]
    columns = {column: kind.replace(".", " ") or str(forms.column_kind(column)) for column, _, kind in pairs}
    return columns or forms.columns_of(evidence.user_files(), "text label")


def _rows(request: Request, columns: Mapping[str, str], samples: int, split: str) -> Any:
    import datasets

    own = Request(f"{request.name} {split}", request.call, request.file, request.line)
    plain = {name: kind for name, kind in columns.items() if not kind.startswith(("image", "audio"))}
    rows: dict[str, list[Any]] = {
        name: [forms.value(kind, own, name, i) for i in range(samples)] for name, kind in plain.items()
    }
    result: Any = datasets.Dataset.from_dict(rows, split=datasets.NamedSplit(split)) if rows else None
    for name, kind in columns.items():
        if name not in plain:
            values = [forms.value(kind, own, name, row) for row in range(samples)]
            feature = datasets.Image() if kind.startswith("image") else datasets.Audio()
            more = datasets.Dataset.from_dict({name: values}, features=datasets.Features({name: feature}))
            result = more if result is None else datasets.concatenate_datasets([result, more], axis=1)
        elif kind.startswith(("class", "tags")):
            names = [str(number) for number in range(int(kind.split()[1]))]
            label = datasets.ClassLabel(names=names)
            result = result.cast_column(name, label if kind.startswith("class") else datasets.Sequence(label))
    return result


def _from_disk(area: Area, original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    if os.path.lexists(path):
        return original(path, *args, **kwargs)
    splits = {"train", "validation", "test"}.isdisjoint(
        key for file in evidence.user_files() for key in evidence.keys(file)
    )
    return _load_dataset(area, original, os.fspath(path), split="train" if splits else None)


def _load_dataset(area: Area, original: Any, path: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load a dataset: files that are made, if they do not exist; else the original, or rows that are made."""
    import datasets

    files = kwargs.get("data_files")
    if path in _BUILDERS and files is not None:
        suffix = {"text": ".txt", "json": ".jsonl"}.get(path, f".{path}")

        def made(file: Any) -> Any:
            if isinstance(file, Mapping):
                return {key: made(value) for key, value in file.items()}
            if isinstance(file, (list, tuple)):
                return [made(value) for value in file]
            there = os.path.lexists(file) or re.search(r"[*?\[]|://", str(file))
            return file if there else area.find(file, "load_dataset", {"suffix": suffix}) or file

        own = made(files)
        cache = {} if own == files else {"cache_dir": os.path.join(area.root, "cache")}
        return original(path, name, *args, **{**kwargs, "data_files": own, **cache})
    if path == "imagefolder" and "data_dir" in kwargs and not os.path.lexists(kwargs["data_dir"]):
        kwargs["data_dir"] = area.find(kwargs["data_dir"], "load_dataset", _FOLDER, directory=True)
    split = kwargs.get("split")
    try:
        return original(path, *([] if name is None else [name]), *args, **kwargs)
    except Exception:
        request = area.request(" ".join(map(str, filter(None, (path, name)))), "load_dataset")
        if request is None or evidence.is_handled():
            raise
    options = dict(area.plan.get(request.name, {}))
    wanted: forms.Request = request
    columns = options.setdefault("columns", _columns(str(path), name))
    samples = options.setdefault("samples", SAMPLES)
    area.note("dataset", request, "rows", options)

    class Splits(datasets.DatasetDict):  # type: ignore[misc]
        """Has a split of any name, which is made when it is first asked for."""

        def __missing__(self, split: str) -> Any:
            self[split] = _rows(wanted, columns, samples, re.sub(r"\W", "_", split))
            return self[split]

    def chosen(split: Any) -> Any:
        if isinstance(split, (list, tuple)):
            return [chosen(each) for each in split]
        return Splits()[re.sub(r"\[.*?\]|\W.*", "", str(split)) or "train"]

    result = Splits() if split is None else chosen(split)
    for common in ("train", "validation", "test") if split is None else ():
        result[common]
    if not kwargs.get("streaming"):
        return result
    if split is None:
        return datasets.IterableDatasetDict({key: value.to_iterable_dataset() for key, value in result.items()})
    return result.to_iterable_dataset()


# Others


def _encoding(area: Area, original: Any, name: str, *args: Any) -> Any:
    """Return an encoding of tiktoken, of single bytes if its ranks are not there."""
    try:
        return original(name, *args)
    except Exception:
        import tiktoken

        if (request := area.request(name, "tiktoken.get_encoding")) is None:
            raise
        area.note("tokenizer", request, "single bytes", {})
        ranks = {bytes([byte]): byte for byte in range(256)}
        end = {"<|endoftext|>": 50256 if name in ("gpt2", "r50k_base", "p50k_base") else 100257}
        return tiktoken.Encoding(name, pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=end)


def _metric(area: Area, original: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(path, *args, **kwargs)
    except Exception:
        if (request := area.request(path, "evaluate.load")) is None:
            raise
        area.note("metric", request, "always 0", {})

        def zero(**_: Any) -> dict[str, float]:
            return dict.fromkeys((path, "accuracy", "f1", "loss"), 0.0)

        def add(**_: Any) -> None:
            pass

        return SimpleNamespace(compute=zero, add=add, add_batch=add, name=path)


def _gopen(area: Area, original: Any, url: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
    """Open a shard of webdataset: of a web address, or of a command that fetches it, one that is made."""
    name = (re.findall(r"\S+\.tar", url) or [url])[-1]
    if mode != "rb" or ("://" not in name and not url.startswith("pipe:")) or os.path.lexists(name):
        return original(url, mode, *args, **kwargs)
    return BytesIO(_content(area, name, "WebDataset"))


def _same(path: Any) -> Any:
    return path


_TRANSFORMERS = {
    "transformers.configuration_utils": ("PretrainedConfig", "PreTrainedConfig"),
    "transformers.models.auto.configuration_auto": ("AutoConfig",),
    "transformers.modeling_utils": ("PreTrainedModel",),
    "transformers.models.auto.auto_factory": ("_BaseAutoModelClass",),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase",),
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer",),
    "transformers.models.auto.processing_auto": ("AutoProcessor",),
    "transformers.models.auto.image_processing_auto": ("AutoImageProcessor",),
    "transformers.models.auto.feature_extraction_auto": ("AutoFeatureExtractor",),
    "transformers.image_processing_base": ("ImageProcessingMixin",),
    "transformers.feature_extraction_utils": ("FeatureExtractionMixin",),
}
_FOLDER = {"suffix": ".jpg", "classes": 4}
_ROWS: tuple[tuple[str, str, Callable[..., Any], tuple[Any, ...]], ...] = (
    ("numpy", "memmap.__new__", _path, (1, "filename", "dtype")),
    ("numpy", "fromfile", _path, (0, "file", "dtype")),
    ("pandas", "read_parquet", _path, (0, "path", {})),
    ("pyarrow.parquet", "read_table", _path, (0, "source", {})),
    ("pyarrow.parquet", "ParquetFile.__init__", _path, (1, "source", {})),
    ("h5py", "File.__init__", _path, (1, "name", {})),
    ("soundfile", "SoundFile.__init__", _path, (1, "file", {})),
    *(("torchaudio", name, _path, (0, "uri", {})) for name in ("load", "info")),
    ("librosa", "load", _path, (0, "path", {})),
    ("cv2", "imread", _path, (0, "filename", {})),
    *(
        ("torchvision.datasets", f"{name}.__init__", _path, (1, "root", _FOLDER))
        for name in ("ImageFolder", "DatasetFolder")
    ),
    *(("torchvision.io", name, _path, (0, "path", {})) for name in ("read_image", "read_file", "decode_image")),
    ("torch.hub", "download_url_to_file", _nothing_downloaded, (1, None)),
    ("torch.hub", "load_state_dict_from_url", _weights, (0,)),
    ("torch.nn.modules.module", "Module.load_state_dict", _load, ()),
    ("torchvision.datasets.utils", "download_url", _nothing_downloaded, (1, None)),
    ("torchvision.datasets.utils", "download_and_extract_archive", _nothing_downloaded, (1, None)),
    ("urllib.request", "urlretrieve", _nothing_downloaded, (1, lambda path: (path, {}))),
    ("urllib.request", "urlopen", _urlopen, ()),
    ("requests.sessions", "Session.request", _request, ()),
    ("wget", "download", _nothing_downloaded, (1, _same)),
    ("gdown", "download", _nothing_downloaded, (1, _same)),
    ("huggingface_hub.file_download", "hf_hub_download", _hub_file, ()),
    ("datasets.load", "load_dataset", _load_dataset, ()),
    ("datasets.load", "load_from_disk", _from_disk, ()),
    ("timm.models._factory", "create_model", _timm, ()),
    ("tiktoken.registry", "get_encoding", _encoding, ()),
    ("evaluate.loading", "load", _metric, ()),
    ("webdataset.gopen", "gopen", _gopen, ()),
    *(
        (module, f"{name}.from_pretrained", _pretrained, ("tokenizer" if "okeniz" in module else "",))
        for module, names in _TRANSFORMERS.items()
        for name in names
    ),
)
"""Module, attribute, its replacement, and the first arguments of the replacement after the area."""


def rows(area: Area) -> dict[str, Callable[[], None]]:
    """Return module -> what replaces its functions, once it is imported. Act at once on imported modules."""

    def replace(module_name: str) -> None:
        module, patches = sys.modules[module_name], Patches()
        for _, attribute, new, arguments in (row for row in _ROWS if row[0] == module_name):
            *owners, name = attribute.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            if hasattr(owner, name):
                patches.wrap(owner, name, around(functools.partial(new, area, *arguments)))
        if module_name == "torchvision.datasets":
            _vision_classes(area, module, patches)

    names = dict.fromkeys(row[0] for row in _ROWS)
    for name in names:
        if name in sys.modules:
            replace(name)
    return {name: functools.partial(replace, name) for name in names if name not in sys.modules}
