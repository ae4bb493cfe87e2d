"""The insides of ops.py: what is measured, the peers, and the processes that measure them."""
