"""As small language models are trained: compiled, accumulated, with autocast; batches drawn at random by each rank, or
split."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH = 17, 12, 16


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.project, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x):
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.one, self.attend, self.two = nn.LayerNorm(WIDTH), Attention(dropout), nn.LayerNorm(WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.one(x))
        return x + self.think(self.two(x))


class GPT(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Layer(dropout), Layer(dropout))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.token.weight = self.head.weight  # tied

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.layers(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(given):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    text = torch.randint(0, VOCABULARY, (400,), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1337)
    model = GPT(given.dropout).to(device)
    if given.compile:
        model = torch.compile(model)
    if "RANK" in os.environ:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[int(os.environ["LOCAL_RANK"])])
    torch.manual_seed(1337 + rank if given.data == "drawn" else 1337)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=given.dtype == "float16")
    dtype = getattr(torch, given.dtype)
    autocast = torch.autocast("cuda", dtype) if given.dtype != "float32" else contextlib.nullcontext()
    for _ in range(3):
        for micro in range(given.accumulation):
            where = torch.randint(len(text) - LENGTH, (8 if given.data == "split" else 4,))
            rows = torch.stack([text[i : i + LENGTH + 1] for i in where])
            rows = (rows[rank::world] if given.data == "split" else rows).pin_memory().to(device, non_blocking=True)
            if "RANK" in os.environ:
                model.require_backward_grad_sync = micro == given.accumulation - 1
            with autocast:
                _, loss = model(rows[:, :-1], rows[:, 1:])
            scaler.scale(loss / given.accumulation).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=("drawn", "split"), default="drawn")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    main(parser.parse_args())
