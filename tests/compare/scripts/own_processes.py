"""Train in a forked process, too, and start an interpreter."""

import os
import subprocess
import sys

import torch
from torch import nn


def step():
    net = nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()


if os.fork() == 0:
    step()
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
step()
