"""The insides of layers.py: the fused pieces of the layers and FLA's, and how they are timed."""
