"""What runs in a rank, around each call."""
