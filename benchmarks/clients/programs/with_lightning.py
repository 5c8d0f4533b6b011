"""A LightningModule and its Trainer, on as many devices as there are ranks."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


world = int(os.environ.get("WORLD_SIZE", 1))
L.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
trainer = L.Trainer(
    accelerator="gpu", devices=world, strategy="ddp", max_epochs=2, gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Regression(), DataLoader(data, 8 // world, shuffle=True))
