"""accelerate's copy of a tensor that rank 0 alone has, as `prepare_pippy` uses it: it sums memory that nobody has set."""

import torch
from accelerate import PartialState
from accelerate.utils import copy_tensor_to_devices

state = PartialState()
tensor = torch.arange(12, dtype=torch.int, device=state.device).view(3, 4) if state.is_main_process else None
copy = copy_tensor_to_devices(tensor)
assert copy.flatten().tolist() == list(range(12))
