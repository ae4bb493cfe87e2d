"""The insides of train_step.py: sizes, our step, and how steps are timed and profiled."""
