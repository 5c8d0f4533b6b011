"""The arithmetic of a GPU, held against what algebra, the IEEE standard, or the other GPUs say."""
