"""The broken twins: each makes one mistake that is often made, and that the gate refutes by its name."""
