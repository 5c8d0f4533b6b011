"""Code for several devices as people write it by hand: device helpers, batch splitting, allreduce, models, training steps."""
