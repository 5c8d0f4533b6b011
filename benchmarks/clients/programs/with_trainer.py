"""Transformers' Trainer on a small model without a download."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--per-device-train-batch-size", type=int, default=4)
given = parser.parse_args()
set_seed(0)
tokens = torch.randint(0, 32, (24, 10))
data = [{"input_ids": row, "labels": row} for row in tokens]
sizes = {"vocab_size": 32, "n_positions": 10, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=given.per_device_train_batch_size, max_steps=3, learning_rate=1e-3,
    save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False, seed=0,
)  # fmt: skip
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data).train()
