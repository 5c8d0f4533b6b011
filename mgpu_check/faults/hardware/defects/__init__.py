"""What the faults of hardware do, in a simulated node. These modules import torch; those that register the faults do not."""
