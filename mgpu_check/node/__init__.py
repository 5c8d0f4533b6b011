"""The machine: its devices, real or simulated."""
