"""What is put around functions of torch, and which of its global switches a test may have changed."""
