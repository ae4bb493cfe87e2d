"""The insides of train_step.py: the models that are trained, here and by the peers."""
