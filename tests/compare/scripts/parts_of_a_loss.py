"""Losses of parts: over texts of unequal length (labels), or over embeddings that are gathered (gather).

With gather, no gradient flows to the embeddings of other ranks, and on one device none to its own.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
embed, head = nn.Embedding(16, 8), nn.Linear(8, 16)
net = DistributedDataParallel(nn.Sequential(embed, head).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    tokens, lengths = torch.randint(1, 16, (8, 12)), torch.randint(2, 12, (8, 1))
    labels = tokens.masked_fill(torch.arange(12) >= lengths, -100).chunk(world)[rank].cuda()
    logits = net(tokens.chunk(world)[rank].cuda())
    if "labels" in sys.argv:
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        own = logits.mean(1)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        loss = cross_entropy(own @ torch.cat(parts).T, torch.arange(len(own), device="cuda") + rank * len(own))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
