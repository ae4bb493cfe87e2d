"""The parts of ``pretrain.py``: its options, data, compiled programs, checkpoints and metrics."""
