"""Models on a mesh with explicit axes: errors raised, or differences. For test_on_devices.py.

A sharding that does not fit is a type error: most calls are traced and not compiled.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import small_models as small
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.layers import RWKV7FeedForward, token_shift
from fla_jax.training import chunked_cross_entropy, chunked_loss, cross_entropy

MESH = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
ROWS = NamedSharding(MESH, P("data"))
LAST = ("receptance", "key", "gate", "head", "w2", "a2", "g2", "v2", "w0", "a0", "v0", "k_k", "k_a")
LAST += ("time_decay_w2",)


def whole(path, x):
    return P()


def by_batch(path, x):
    """The batch axis splits the largest axis of every parameter, vectors included."""
    axis = int(np.argmax(x.shape))
    return P(*(None,) * axis, "data") if x.shape[axis] % 4 == 0 else P()


def by_heads(path, x):
    names = [key.key for key in path]
    if "receptance" in names and "ffn" in names:
        return P()
    if {*names} & {*LAST, "ln_x", "time_decay"}:
        return P(*(None,) * (x.ndim - 1), "tensor")
    if {*names} & {"output", "value", "emb", "r_k", "time_faaaa"}:
        first = "value" in names and "att" in names
        return P(*(None,) * (x.ndim - (1 if first else 2)), "tensor")
    return P()


def by_both(path, x):
    spec = [*by_heads(path, x), *(None,) * x.ndim][: x.ndim]
    for axis, size in enumerate(x.shape):
        if spec[axis] is None and size % 4 == 0:
            spec[axis] = "data"
            break
    return P(*spec)


def sharded(params, how):
    put = lambda path, x: jax.device_put(x, NamedSharding(MESH, how(path, x)))
    return jax.tree_util.tree_map_with_path(put, params)


def loss(model, params, tokens, state=None, segment_ids=None):
    hidden, state = model.apply({"params": params}, tokens[:, :-1], state, segment_ids, method="hidden")
    logits = model.apply({"params": params}, hidden, method="logits")
    other = chunked_cross_entropy(hidden, params["head"]["kernel"], tokens[:, 1:], block_tokens=24)
    return cross_entropy(logits, tokens[:, 1:]) + other + jnp.mean(state.wkv**2)


def steps(model, params, tokens, state=None):
    """A prompt, then tokens one by one in a loop; sorting the logits is what sampling does."""
    logits, state = model.apply({"params": params}, tokens, state)

    def step(carry, _):
        token, state = carry
        logits, state = model.apply({"params": params}, token[:, None], state)
        return (jnp.argsort(logits[:, -1])[:, -1].astype(token.dtype), state), token

    first = jnp.argmax(logits[:, -1], -1).astype(tokens.dtype)
    return jax.lax.scan(step, (first, state), None, length=3)[1]


def gradient(model, params, tokens, state=None, segment_ids=None):
    return jax.value_and_grad(loss, argnums=1)(model, params, tokens, state, segment_ids)


def jitted(fn):
    return jax.jit(fn, static_argnums=0)


def shifted_over_time(x, last, ids):
    """Largest difference of the token shift, and of its gradient, to that of one device."""
    run = jax.value_and_grad(lambda x, last: jnp.sum(jnp.sin(2 * token_shift(x, last, ids)) * x), (0, 1))
    got = jax.device_get(jax.jit(run)(x, last))
    with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])):
        x, last, ids = jax.device_get((x, last, ids))
        return small.largest_error(got, run(jnp.asarray(x), jnp.asarray(last)))


def traced(fn, *args):
    """Checks the types of everything that ``fn`` makes; a model comes first or not at all."""
    if isinstance(args[0], nn.Module):
        fn, args = functools.partial(fn, args[0]), args[1:]
    jax.eval_shape(fn, *args)
    return 0.0


def report(version):
    """Name of a call: the error it raised, or the largest difference to one device."""
    found = {}

    def attempt(name, call, *args):
        try:
            found[name] = call(*args)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]

    tokens = small.tokens(8, 6)
    ids = jnp.asarray(np.repeat([[0, 0, 2, 2, 2], [3, 1, 1, 1, 1]], 4, 0), jnp.int32)
    scanned = small.model(version, scan_layers=True, remat="dense")
    plain = small.model(version)
    params, one = small.params(scanned), small.params(plain)
    state = small.random_state(scanned, 8)
    with jax.enable_x64(True):  # what float32 rounds differently on other devices would say little
        exact = small.model(version, scan_layers=True, remat="dense", dtype="float64", param_dtype="float64")
        wide = [jax.tree.map(lambda x: x.astype(jnp.float64), tree) for tree in (params, state)]
        want = jitted(gradient)(exact, wide[0], tokens, wide[1], ids)
    with jax.set_mesh(MESH):
        text, segments = jax.device_put((tokens, ids), ROWS)
        attempt("init", traced, scanned.init, jax.random.key(0), text)
        for how in (whole, by_batch, by_heads, by_both):
            # `state` is whole on every device, as it comes from elsewhere: it is resharded with the batch
            for model, p, options in ((scanned, params, ()), (plain, one, (state, segments))):
                p, name = sharded(p, how), f"{how.__name__}, {'plain' if options else 'scanned'}"
                attempt(f"{name}, gradient", traced, gradient, model, p, text, *options)
                attempt(f"{name}, steps", traced, steps, model, p, text[:, :1], *options[:1])
        p = sharded(params, by_both)
        long = lambda p: chunked_loss(scanned, p, text[:, :5], chunk_size=2)[0]
        attempt("long context", traced, jax.grad(long), p)

        def compare():
            with jax.enable_x64(True):
                p = sharded(wide[0], by_both)
                got = jitted(gradient)(exact, p, text, wide[1], segments)
            for x, g in zip(jax.tree.leaves(p), jax.tree.leaves(got[1])):
                assert g.sharding.is_equivalent_to(x.sharding, g.ndim), (x.sharding, g.sharding)
            return small.largest_error(got, want)

        over_time = NamedSharding(MESH, P(None, "data"))
        attempt("numbers", compare)
        read = lambda p, tokens, state: scanned.apply({"params": p}, tokens, state)
        attempt("tokens over time", traced, read, p, jax.device_put(tokens[:, :4], over_time), state)
        x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 4, 3)), over_time)
        ids = jnp.asarray([[0, 0, 1, 1], [0, 1, 1, 2]] * 4)
        attempt("token shift over time", shifted_over_time, x, jnp.ones((8, 3)), ids)
        x = jax.device_put(jnp.zeros((8, 4, 32)), over_time)
        attempt("x over time", traced, RWKV7FeedForward(32).init, jax.random.key(0), x)
    return found
