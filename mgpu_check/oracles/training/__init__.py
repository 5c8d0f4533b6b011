"""Oracles of training: one step on one device and on several, by hand and by torch, exact or within a tolerance."""
