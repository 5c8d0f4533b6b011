"""Property: a reduction leaves on each rank what one device computes."""
