"""Oracles of one device: operators, products, elementwise functions and copies, judged by algebra or by their bits."""
