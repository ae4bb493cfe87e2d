"""What ops and kernels both stand on: descriptions of calls, sharding, the checked mode, names, chunks."""
