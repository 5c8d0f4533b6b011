"""Devices of this machine: their inventory, their leases, and the masks that make them visible to a rank."""
