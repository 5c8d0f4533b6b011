"""A training file whose ranks part ways. `docs/how-to/write-tests.md` names its lines, so keep their numbers."""

import os
import signal

import torch
import torch.distributed as dist


def load_batch(rank):
    if rank.index == 1:
        signal.pause()


def step(rank):
    x = torch.ones(512, 10)
    dist.all_reduce(x)
    load_batch(rank)
    dist.all_reduce(x)


def evaluate(rank):
    x = torch.ones(10, dtype=torch.int32 if rank.index == 2 else torch.float32)
    dist.all_reduce(x)


def crash(rank):
    if rank.index == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
