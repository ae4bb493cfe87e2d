"""The foundation of ops and kernels: descriptions of calls, sharding, the checked mode, names, chunks."""
