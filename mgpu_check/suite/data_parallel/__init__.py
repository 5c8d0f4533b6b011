"""Property: DataParallel trains like one device."""
