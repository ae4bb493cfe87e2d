"""Products of one token with quantised weights, against float64 with the weights that are stored."""

import jax
import jax.numpy as jnp
import numpy as np

from fla_jax.core.decode_layers import NONE, Matrix, Quantisation, quantised

# bits, group, channels: groups of 1024 in int8 have smaller numbers, 768 is not a power of two
PRODUCTS = [(8, 16, 768), (8, 128, 1024), (8, 1024, 1024), (4, 16, 1024), (4, 32, 768), (4, 128, 1024)]
SCALES = [1e-6, 1.0, 1e3]  # of the token


def operands(
    bits: int, group: int, K: int, scale: float, dtype: str, N: int = 192
) -> tuple[Matrix, jax.Array]:
    """A matrix [N, K] and a token [1, K] one channel of which is 100 times as large as the others."""
    rng = np.random.default_rng([bits, group, K])
    weight = rng.normal(size=(N, K)) * 10 ** rng.uniform(-3, 0, size=(N, 1))
    token = scale * rng.normal(size=(1, K))
    token[0, 3] = 100 * scale
    matrix = Matrix(jnp.asarray(weight, jnp.float32), None, ((N, 0, NONE),))
    return quantised(matrix, Quantisation(bits, group)), jnp.asarray(token, dtype)


def exact(matrix: Matrix, token: jax.Array) -> np.ndarray:
    """The product in float64."""
    return np.float64(token) @ np.float64(matrix.dense(jnp.float32)).T


def error(got: jax.Array, matrix: Matrix, token: jax.Array) -> float:
    """The largest error of a row, in units of the norms of its weights and of the token."""
    sizes = np.linalg.norm(np.float64(matrix.dense(jnp.float32)), axis=1) * np.linalg.norm(np.float64(token))
    return float(np.max(np.abs(np.float64(got) - exact(matrix, token)) / sizes))


def bound(bits: int, group: int, token: jax.Array) -> float:
    """Of `error`: in float32 1e-6; else five standard deviations of what rounding every channel to 16 bits,
    or to so few that the sums of a group fit in 32 bits, adds up to.
    """
    if token.dtype == jnp.float32:
        return 1e-6
    levels = min(2**15 - 1, (2**31 - 1) // (group * (127 if bits == 8 else 15)))
    size = np.abs(np.float64(token))
    return float(5 / np.sqrt(12) / levels * size.max() / np.linalg.norm(size))
