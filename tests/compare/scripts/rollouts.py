"""Train on rollouts of an environment for each rank, in an order that NumPy shuffles in place, with a loss by hand."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
np.random.seed(rank)


class Environment:
    def __init__(self, seed, count):
        self.numbers, self.count = np.random.Generator(np.random.PCG64(seed)), count

    def step(self):
        rewards = self.numbers.normal(size=self.count).astype(np.float32)
        return self.numbers.normal(size=(self.count, 4)).astype(np.float32), rewards, float(rewards.mean())


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
environment = Environment(10 + rank, 16 // world)
for _ in range(2):
    observations, rewards, baseline = environment.step()
    order = np.arange(len(rewards))
    np.random.shuffle(order)
    kept = torch.zeros(len(rewards))
    for row, reward in enumerate(rewards):
        kept[row] = float(reward)
    with torch.no_grad():
        old = net(torch.tensor(observations)).log_softmax(1)
    for start in range(0, len(order), 8 // world):
        rows = order[start : start + 8 // world]
        chosen = torch.tensor(observations[rows, 0] > 0).long()
        scores = net(torch.tensor(observations[rows])).log_softmax(1)
        score = scores.gather(1, chosen[:, None]).squeeze(1)
        ratio = (score - old[rows].gather(1, chosen[:, None]).squeeze(1)).exp()
        entropy = -(scores.exp() * scores).sum(1)
        loss = -(ratio * (kept[rows] - 0.5)).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
