"""The public scripts: their arguments, and what `compare` has to say of each, also with a mistake planted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SCRIPTS", "Mistake", "Script"]


@dataclass(frozen=True)
class Mistake:
    """A change of a checkout that makes its training wrong on several ranks.

    Attributes:
        old, new: a text that occurs once in `file`, and the text that replaces it.
        words: that the report must contain, such as the name of the mistake.
    """

    name: str
    file: str
    old: str
    new: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """A script of a public repository.

    Attributes:
        checkout: directory of the repository, in that of all checkouts.
        command: the script and its arguments; ``@`` is the directory of its data.
        data: kind of data; see `data.MAKERS`.
        code, words: of `compare`: its exit code, and words that the report must contain.
        files: further files, which a user would write.
        path: directories of the checkout that Python must search.
        packages: a further directory of packages, in that of all packages.
        options: further options of `compare`.
    """

    name: str
    checkout: str
    command: str
    data: str = ""
    code: int = 0
    words: tuple[str, ...] = ("equal: 2 steps on 2 ranks",)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    packages: str = ""
    options: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()


_DENOISING = """\
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=100, sampling_timesteps=10)
trainer = Trainer(
    diffusion,
    "@",
    train_batch_size=16,
    train_num_steps=4,
    gradient_accumulate_every=2,
    save_and_sample_every=100,
    calculate_fid=False,
)
trainer.train()
"""
_OF_DENOISING = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"

SCRIPTS = (
    Script(
        "llm.c",
        "llm.c",
        "train_gpt2.py --input_bin=@/train.bin --model=d12 --batch_size=1 --sequence_length=16 "
        "--total_batch_size=64 --write_tensors=0 --overfit_single_batch=0 --num_iterations=3",
        "tokens",
        mistakes=(
            Mistake(
                "no sync",
                "train_gpt2.py",
                "model.require_backward_grad_sync = (micro_step == grad_accum_steps - 1)",
                "model.require_backward_grad_sync = False",
                ("gradients-not-synchronized",),
            ),
            Mistake(
                "loader",
                "train_gpt2.py",
                "self.process_rank = process_rank",
                "self.process_rank = 0",
                ("dataset-not-split",),
            ),
        ),
    ),
    Script("modded-nanogpt", "modded-nanogpt", "train_gpt.py", code=2, words=("ModuleNotFoundError",)),
    Script(
        "nanochat",
        "nanochat",
        "-m scripts.base_train --depth=2 --head-dim=32 --aspect-ratio=32 --max-seq-len=64 --device-batch-size=2 "
        "--total-batch-size=512 --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --num-iterations=4",
        "documents",
        environment={"NANOCHAT_BASE_DIR": "@", "NANOCHAT_DTYPE": "float32"},
        mistakes=(
            Mistake(
                "accumulation",
                "scripts/base_train.py",
                "loss = loss / grad_accum_steps",
                "loss = loss",
                ("accumulation-factor",),
            ),
            Mistake(
                "sum",
                "nanochat/optim.py",
                "future = dist.all_reduce(grad, op=dist.ReduceOp.AVG",
                "future = dist.all_reduce(grad, op=dist.ReduceOp.SUM",
                ("optimizer-differs",),
            ),
        ),
    ),
    Script(
        "open_clip",
        "open_clip",
        "-m open_clip_train.main --dataset-type=csv --train-data=@/captions.csv --batch-size=2 --workers=1 "
        "--model=ViT-S-32-alt --precision=fp32 --epochs=1 --warmup=1 --gather-with-grad --local-loss",
        "captions",
        path=("src",),
        mistakes=(
            Mistake(
                "cut",
                "src/open_clip/loss.py",
                "_all_gather_with_grad(image_features)",
                "_all_gather_with_grad(image_features.detach())",
                ("gradient-cut-by-collective",),
            ),
            Mistake(
                "sampler",
                "src/open_clip_train/data.py",
                "shared_epoch)\n\n    num_samples = len(dataset)\n    sampler = DistributedSampler(dataset)",
                "shared_epoch)\n\n    num_samples = len(dataset)\n    sampler = DistributedSampler(dataset, 1, 0)",
                ("dataset-not-split",),
            ),
        ),
    ),
    Script(
        "timm",
        "pytorch-image-models",
        "train.py --data-dir=@ --model=test_vit --num-classes=2 -b=4 --epochs=1 --workers=1 --img-size=64",
        "classes",
        mistakes=(
            Mistake(
                "not wrapped",
                "train.py",
                "task.prepare_distributed(device_ids=[device], broadcast_buffers=not args.no_ddp_bb)",
                "pass",
                ("different-initialization",),
            ),
            Mistake(
                "sampler",
                "timm/data/loader.py",
                "torch.utils.data.distributed.DistributedSampler(dataset)",
                "torch.utils.data.distributed.DistributedSampler(dataset, 1, 0)",
                ("dataset-not-split",),
            ),
        ),
    ),
    Script(
        "MAE",
        "mae",
        "main_pretrain.py --data_path=@ --model=mae_vit_base_patch16 --batch_size=2 --epochs=1 --warmup_epochs=0 --num_workers=1",
        "classes",
        packages="lib_mae",
        options=("--float32",),
        mistakes=(
            Mistake(
                "not wrapped",
                "main_pretrain.py",
                "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], find_unused_parameters=True)\n"
                "        model_without_ddp = model.module",
                "pass",
                ("different-initialization",),
            ),
            Mistake(
                "sampler",
                "main_pretrain.py",
                "num_replicas=num_tasks, rank=global_rank",
                "num_replicas=1, rank=0",
                ("dataset-not-split",),
            ),
        ),
    ),
    Script(
        "DINO",
        "dino",
        "main_dino.py --data_path=@/train --arch=vit_tiny --patch_size=32 --out_dim=64 --batch_size_per_gpu=2 --local_crops_number=2 "
        "--use_fp16=false --num_workers=1 --epochs=1 --warmup_epochs=0",
        "classes",
        environment={"TORCH_HOME": "@"},
        mistakes=(
            Mistake("center", "main_dino.py", "dist.all_reduce(batch_center)", "pass", ("buffers-drift",)),
            Mistake(
                "sampler",
                "main_dino.py",
                "DistributedSampler(dataset, shuffle=True)",
                "DistributedSampler(dataset, num_replicas=1, rank=0)",
                ("dataset-not-split",),
            ),
        ),
    ),
    Script(
        "Barlow Twins",
        "barlowtwins",
        "main.py @ --batch-size=4 --workers=1 --epochs=1 --projector=64-64",
        "classes",
        code=1,  # no gradient flows through its all_reduce, and DistributedDataParallel takes the mean of the parts
        words=("world-size-factor", "0.5"),
        options=("--float32",),
        mistakes=(
            Mistake(
                "not wrapped",
                "main.py",
                "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu])",
                "pass",
                ("different-initialization",),
            ),
            Mistake(
                "batch norm",
                "main.py",
                "model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
                "pass",
                ("batch-statistics-per-rank",),
            ),
        ),
    ),
    Script(
        "EDM",
        "edm",
        "train.py --outdir=runs --data=@ --batch=8 --cbase=8 --cres=1,2 --duration=0.001 --tick=1 --workers=1 --seed=1",
        "numbered",
        mistakes=(
            Mistake(
                "factor",
                "training/training_loop.py",
                "mul(loss_scaling / batch_gpu_total)",
                "mul(loss_scaling / batch_size)",
                ("world-size-factor",),
            ),
            Mistake(
                "no_sync",
                "training/training_loop.py",
                "misc.ddp_sync(ddp, (round_idx == num_accumulation_rounds - 1))",
                "misc.ddp_sync(ddp, False)",
                ("gradients-not-synchronized",),
            ),
        ),
    ),
    Script(
        "ignite cifar10",
        "ignite",
        "examples/cifar10/main.py run --data_path=@ --output_path=runs --model=squeezenet1_1 --batch_size=8 "
        "--num_epochs=2 --num_warmup_epochs=1 --num_workers=1 --backend=nccl",
        "cifar",
        mistakes=(
            Mistake(
                "factor",
                "examples/cifar10/main.py",
                "scaler.scale(loss).backward()",
                "scaler.scale(loss * idist.get_world_size()).backward()",
                ("world-size-factor",),
            ),
            Mistake(
                "not wrapped",
                "examples/cifar10/main.py",
                "model = idist.auto_model(model)",
                "model = model.to(idist.device())",
                ("different-initialization",),
            ),
        ),
    ),
    Script(
        "denoising-diffusion",
        "denoising-diffusion-pytorch",
        "train.py",
        "numbered",
        files={"train.py": _DENOISING},
        mistakes=(
            Mistake(
                "loader",
                _OF_DENOISING,
                "dl = self.accelerator.prepare(dl)",
                "pass",
                ("dataset-not-split",),
            ),
            Mistake(
                "not wrapped",
                _OF_DENOISING,
                "self.model, self.opt = self.accelerator.prepare(self.model, self.opt)",
                "self.model.to(self.accelerator.device)",
                ("different-initialization",),
            ),
        ),
    ),
)
