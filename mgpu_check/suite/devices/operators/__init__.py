"""Compare torch's operators on a device with the CPU, or with results that algebra predicts."""
