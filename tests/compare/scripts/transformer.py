"""Train a small transformer, as it was before a refactoring; `tests/compare/test_refactorings.py` has the refactorings."""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, HEADS, TOKENS, WORDS, PARTS = 8, 2, 6, 11, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(TOKENS))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def reduce(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def rate(step):
    return min(1.0, (step + 1) / 2) * 0.9**step


dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randint(WORDS, (24, TOKENS))
model = Model()
parameters = list(model.parameters())
decayed = [one for one in parameters if one.dim() > 1]
others = [one for one in parameters if one.dim() == 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for step in range(3):
    batch = data[step * 8 : (step + 1) * 8][rank::world]
    optimizer.zero_grad()
    for part in batch.chunk(PARTS):
        loss = loss_of(model(part), part)
        (loss / PARTS).backward()
    reduce(parameters)
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
