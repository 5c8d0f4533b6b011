"""Machine: cores and memory of the host, and what its kernel says of NICs, PCIe and NUMA."""
