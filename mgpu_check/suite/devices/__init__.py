"""Property: every device computes, copies and keeps state like the CPU."""
