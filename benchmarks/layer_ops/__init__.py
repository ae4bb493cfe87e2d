"""The insides of layers.py: the layer operations and how ours are timed."""
