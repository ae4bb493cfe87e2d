"""How benchmarks run things: processes, times, results files."""
