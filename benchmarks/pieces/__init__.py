"""The insides of layers.py: the layer operations ("pieces") and how ours are timed."""
