"""Oracles of collectives: calls that repeat on data made on the devices, whose results are exact or bounded."""
