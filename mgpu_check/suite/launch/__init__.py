"""Property: launched scripts see their ranks and devices."""
