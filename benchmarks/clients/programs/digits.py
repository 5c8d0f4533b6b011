"""As a first script is: one process, one GPU, dropout, NLL loss, a schedule, an evaluation after each epoch."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(1, 4, 3), nn.Dropout(0.25), nn.Linear(4 * 36, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(self.drop(torch.flatten(F.relu(self.conv(x)), 1))), dim=1)


def train(model, device, loader, optimizer):
    model.train()
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def test(model, device, loader):
    model.eval()
    lost, right = 0.0, 0
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            lost += F.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(1, True))).sum().item()
    return lost / len(loader.dataset), right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--save-model", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(1)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    options = {"num_workers": 0, "pin_memory": True} if device.type == "cuda" else {}
    data = TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    loader = DataLoader(data, given.batch_size, shuffle=True, **options)
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=given.gamma)
    for epoch in range(1, given.epochs + 1):
        loss = train(model, device, loader, optimizer)
        average, right = test(model, device, DataLoader(data, 32, **options))
        print(f"epoch {epoch}: loss {loss:.4f}, test loss {average:.4f}, accuracy {right:.0%}")
        schedule.step()
    if given.save_model:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
