"""Starts a process for each device, by the way that the first argument names, without variables of a launcher."""

import multiprocessing
import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ['OWN_PORT']}", rank=rank, world_size=world)
    layer = nn.Linear(4, 1)
    for parameter in layer.parameters():  # all sums are exact
        nn.init.constant_(parameter, 0.5)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for x in torch.arange(64.0).reshape(2, 8, 4) % 5 - 2:
        optimizer.zero_grad()
        loss = model(x.chunk(world)[rank]).square().mean()
        (loss * world if "summed" in sys.argv else loss).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    way, world = sys.argv[1], int(sys.argv[2])
    if "OWN_RANK" in os.environ:
        train(int(os.environ["OWN_RANK"]), world)
        raise SystemExit
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["OWN_PORT"] = str(server.getsockname()[1])
    if way == "subprocess":
        command = [sys.executable, *sys.argv]
        started = [subprocess.Popen(command, env={**os.environ, "OWN_RANK": str(rank)}) for rank in range(world)]
        sys.exit(max(rank.wait() for rank in started))
    context: Any = multiprocessing.get_context(way)
    ranks = [context.Process(target=train, args=(rank, world)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
