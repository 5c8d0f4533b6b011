"""Links between GPUs, and to the host: data and speed."""
