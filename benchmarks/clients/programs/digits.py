"""As a first script is: one process, one GPU, dropout, NLL loss, an evaluation after each epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(1, 4, 3), nn.Dropout(0.25), nn.Linear(4 * 36, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(self.drop(torch.flatten(F.relu(self.conv(x)), 1))), dim=1)


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
model = Net().to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for epoch in range(2):
    model.train()
    for images, target in DataLoader(data, 16, shuffle=True):
        optimizer.zero_grad()
        F.nll_loss(model(images.to(device)), target.to(device)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in DataLoader(data, 16))
    print(f"epoch {epoch}: {right}/{len(data)}")
