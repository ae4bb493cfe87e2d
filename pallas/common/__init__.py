"""Device functions, records and host code that several kernel families use."""
