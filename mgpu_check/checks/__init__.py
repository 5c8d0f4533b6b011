"""Check tensors, devices and ranks by plain functions that do not depend on pytest."""
