"""Compare the arithmetic of a GPU with algebra, with the IEEE standard, or with the other GPUs."""
