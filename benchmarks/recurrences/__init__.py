"""The insides of ops.py: what is measured, and the processes that measure it."""
