"""As small reproductions of GPT are trained: a Trainer under torchrun, snapshots, a GradScaler, a loader for each
rank."""

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gpt import GPT, LENGTH, VOCABULARY
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


class Characters(Dataset):
    def __init__(self):
        self.text = torch.randint(0, VOCABULARY, (LENGTH + 40,), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.text) - LENGTH

    def __getitem__(self, i):
        rows = self.text[i : i + LENGTH + 1]
        return rows[:-1], rows[1:]


@dataclass
class Snapshot:
    model_state: Any
    optimizer_state: Any
    finished_epoch: int


class Trainer:
    def __init__(self, given, model, optimizer, train, test):
        self.given, self.local_rank, self.global_rank = given, int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.train_loader, self.test_loader = self.prepared(train), self.prepared(test)
        self.epochs_run, self.model, self.optimizer = 0, model.to(self.local_rank), optimizer
        self.scaler = torch.amp.GradScaler("cuda", enabled=given.amp)
        self.load()
        self.model = DistributedDataParallel(self.model, device_ids=[self.local_rank])

    def prepared(self, data):
        return DataLoader(data, self.given.batch_size, pin_memory=True, shuffle=False, sampler=DistributedSampler(data))

    def load(self):
        try:
            with open(self.given.snapshot, "rb") as file:
                snapshot = Snapshot(**torch.load(file, map_location="cpu"))
        except FileNotFoundError:
            print("no snapshot: training begins")
            return
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch
        print(f"going on after epoch {self.epochs_run}")

    def save(self, epoch):
        snapshot = Snapshot(self.model.module.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.given.snapshot)

    def batch(self, source, targets, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cuda", dtype=torch.float16, enabled=self.given.amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        for number, (source, targets) in enumerate(loader):
            loss = self.batch(source.to(self.local_rank), targets.to(self.local_rank), train)
            print(f"GPU{self.global_rank} epoch {epoch}, {'train' if train else 'test'} loss {number}: {loss:.5f}")

    def train(self):
        for epoch in range(self.epochs_run + 1, self.given.epochs + 1):
            self.epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0:
                self.save(epoch)
            self.epoch(epoch, self.test_loader, train=False)


def main(given):
    init_process_group(backend="nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    train, test = random_split(Characters(), [32, 8])
    model = GPT(given.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    Trainer(given, model, optimizer, train, test).train()
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--snapshot", default="mini_gpt.pt")
    main(parser.parse_args())
