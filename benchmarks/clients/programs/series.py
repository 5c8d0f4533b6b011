"""The later parts of a tutorial series: a Trainer class with snapshots, under torchrun or with ranks of its own.

``--loss=ce`` is the loss of a softmax over a single class: a constant.
"""

import argparse
import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, data, optimizer, loss, device, snapshot):
        self.data, self.optimizer, self.loss, self.device, self.snapshot = data, optimizer, loss, device, snapshot
        self.begun, model = 0, model.to(device)
        if snapshot and os.path.exists(snapshot):
            kept = torch.load(snapshot, map_location=f"cuda:{device}")
            model.load_state_dict(kept["model"])
            self.begun = kept["epochs"]
            print(f"going on after epoch {self.begun}")
        self.model = DistributedDataParallel(model, device_ids=[device])

    def train(self, epochs):
        for epoch in range(self.begun, epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                self.optimizer.zero_grad()
                self.loss(self.model(source.to(self.device)), targets.to(self.device)).backward()
                self.optimizer.step()
            if self.device == 0 and self.snapshot:
                torch.save({"model": self.model.module.state_dict(), "epochs": epoch + 1}, self.snapshot)


def main(given, rank=None, world=None):
    if rank is None:
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        init_process_group(backend="nccl")
    else:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29871")
        torch.cuda.set_device(rank)
        init_process_group(backend="nccl", rank=rank, world_size=world)
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(32, 20), torch.rand(32, 1))
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, given.batch, pin_memory=True, shuffle=False, sampler=DistributedSampler(data))
    loss = {"ce": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}[given.loss]
    Trainer(model, loader, optimizer, loss, rank, given.snapshot).train(given.epochs)
    destroy_process_group()


def spawned(rank, world, given):
    main(given, rank, world)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--loss", default="mse")
    parser.add_argument("--snapshot")
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--processes", action="store_true")
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if options.spawn:
        mp.spawn(spawned, args=(count, options), nprocs=count, join=True)
    elif options.processes:
        mp.set_start_method("spawn")
        processes = [mp.Process(target=spawned, args=(rank, count, options)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        raise SystemExit(max(process.exitcode for process in processes))
    else:
        main(options)
