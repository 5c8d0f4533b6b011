"""Devices of this machine: which there are, who leases them, which a rank sees."""
