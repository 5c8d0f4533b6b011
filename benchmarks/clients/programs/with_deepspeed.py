"""A training loop with an engine of DeepSpeed, at a stage of ZeRO: initialize, backward, step."""

import argparse
import os

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--same-rows", action="store_true", help="each rank trains on the rows of rank 0")
given = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
inputs, targets = torch.randn(3, 8, 6), torch.randn(3, 8, 1)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
zero = {"stage": given.stage} | ({"offload_optimizer": {"device": "cpu"}} if given.offload else {})
config = {
    "train_micro_batch_size_per_gpu": 8 // world,
    "gradient_clipping": 1.0,
    "zero_optimization": zero,
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, because nothing is compiled
}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for x, y in zip(inputs, targets, strict=True):
    x, y = (whole.chunk(world)[0 if given.same_rows else rank].to(engine.device) for whole in (x, y))
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
print(f"last loss: {loss.item():.4f}")
