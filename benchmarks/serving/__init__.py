"""Load, clients and the `Generator` of `serve.py`."""
