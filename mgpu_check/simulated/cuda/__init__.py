"""What is under ``torch.cuda``: the runtime, its memory, streams, graphs and generators."""
