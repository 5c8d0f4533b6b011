"""A training loop with Hugging Face Accelerate: prepare, accumulate, clip, gather_for_metrics."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
)
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
accelerator.print(f"mean of the last losses: {losses.mean().item():.4f}")
accelerator.end_training()
