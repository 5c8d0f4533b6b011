"""Compare operators on devices with the CPU, on the sample inputs that torch ships for its own tests."""
