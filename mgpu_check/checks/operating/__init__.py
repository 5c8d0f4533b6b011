"""What torch's operators give on a device, held against what the CPU gives, or against what is known by algebra."""
