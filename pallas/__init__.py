"""GPU kernels of fla_jax: Triton kernels, and Pallas kernels of the recurrent forms.

Imported as ``fla_jax.pallas`` (``fla_jax/pallas`` is a symbolic link to this folder), never as a top-level
``pallas``: that would import every kernel a second time under another name.
"""

if __name__ != "fla_jax.pallas":
    raise ImportError(
        "import this package as 'fla_jax.pallas'; the top-level folder 'pallas' only holds its files"
    )
