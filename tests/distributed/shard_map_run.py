"""Ops, layers and models in `jax.shard_map` with its check, on eight devices. For test_on_devices.py.

Inputs vary over different axes. Gradients of an input that devices share are sums over these devices.
"""

import jax
import jax.numpy as jnp
import small_models as small
from harness.cases import OPS, Case, HeadCase, MixCase, build, call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fla_jax.core.mesh import varying_axes
from fla_jax.layers import RWKV6Attention, RWKV6FeedForward, RWKV7Attention, RWKV7FeedForward

SIZES = {"data": 4, "model": 2}
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
BATCH, HEADS, BOTH = P("data"), P(None, None, "model"), P("data", None, "model")
LAYERS = {6: (RWKV6Attention, RWKV6FeedForward), 7: (RWKV7Attention, RWKV7FeedForward)}


def local(x, all_axes, spec):
    """The parts of ``x`` by ``spec``, side by side: only the first part of an axis that devices share."""
    split = [*spec, *(None,) * x.ndim]
    parts = [slice(x.shape[i] // SIZES[a]) if a and not split[i] else slice(None) for i, a in all_axes]
    return x[tuple(parts)]


def whole(x, all_axes, spec):
    """The inverse of `local`, where devices share the same."""
    split = [*spec, *(None,) * x.ndim]
    return jnp.tile(x, [SIZES[a] if a and not split[i] else 1 for i, a in all_axes])


def axes(x, spec):
    return list(enumerate([*spec, *(None,) * x.ndim][: x.ndim]))


class Sharded:
    """A function of arrays by name in shard_map and on one device.

    Args:
        fn: of whole arrays or of one device's parts, to an array or a tree of them.
        arrays: whole ones by name.
        finest: spec of each, with everything split that may be.
        specs: specs to use, of those that are to lie otherwise.
        out: of the results.
    """

    def __init__(self, fn, arrays, finest, specs, out=BOTH):
        self.specs = {**finest, **specs}
        self.all = {name: axes(x, finest[name]) for name, x in arrays.items()}
        self.args = {name: local(x, self.all[name], self.specs[name]) for name, x in arrays.items()}
        self.fn, self.out = fn, out

    def inside(self, fn, out):
        return jax.shard_map(fn, mesh=MESH, in_specs=(self.specs,), out_specs=out)

    def alone(self, args):
        return self.fn({name: whole(x, self.all[name], self.specs[name]) for name, x in args.items()})

    def eager(self):
        return small.largest_error(self.inside(self.fn, self.out)(self.args), jax.jit(self.alone)(self.args))

    def gradients(self):
        """The loss of all devices, and its gradients, which JAX sums over devices that share an input."""

        def both(args):
            value, grads = jax.value_and_grad(lambda args: weighed(self.fn(args)))(args)
            return jax.lax.psum(value, tuple(varying_axes(value))), grads

        got = jax.jit(self.inside(both, (P(), self.specs)))(self.args)
        want = jax.jit(jax.value_and_grad(lambda args: weighed(self.alone(args))))(self.args)
        return max(abs(got[0] - want[0]) / abs(want[0]), small.largest_error(got[1], want[1]))

    def traced(self):
        """Checks the types of everything, forward and backward."""
        jax.eval_shape(self.inside(jax.grad(lambda args: weighed(self.fn(args))), self.specs), self.args)
        return 0.0


def weighed(made):
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(made))


def recurrence(op, implementation, T=9, form="chunk", **specs):
    arrays = build(Case(op, B=8, T=T, H=2, K=4, V=4)).arrays
    if specs.pop("no_state", False):
        arrays = {name: x for name, x in arrays.items() if name != "initial_state"}
    finest = {n: {"u": P("model"), "initial_state": P("data", "model")}.get(n, BOTH) for n in arrays}
    run = lambda x: call(op, x, form=form, implementation=implementation)["o"]
    return Sharded(run, arrays, finest, specs)


def on_heads(op, implementation, **specs):
    arrays = build(HeadCase(op, B=8, T=3, H=2, N=4)).arrays
    finest = {n: BOTH if x.ndim == 4 else P("model") for n, x in arrays.items()}
    return Sharded(lambda x: call(op, x, implementation=implementation), arrays, finest, specs)


def mixes(implementation, **specs):
    arrays = build(MixCase(B=8, T=5, C=6, M=2)).arrays
    finest = {n: BATCH if n in ("x", "y", "last") else P() for n in arrays}
    run = lambda x: call("norm_shift_mix", x, implementation=implementation)["mixed"]
    return Sharded(run, arrays, finest, specs, P(None, "data"))


def model(version, T=5, state=False, lengths=False, **options):
    """Parameters that all devices have, tokens; perhaps a state that they share."""
    one = small.model(version, implementation="xla", **options)
    arrays = {"params": small.params(one), "tokens": small.tokens(8, T)}
    held = small.random_state(one, 2) if state else None  # for the examples of each device

    def run(params, tokens):
        given = None
        if held is not None:
            given = jax.tree.map(lambda x: jnp.tile(x, (1, tokens.shape[0] // 2, *(1,) * (x.ndim - 2))), held)
        ends = jnp.full(tokens.shape[:1], T - 1, jnp.int32) if lengths else None
        return one.apply({"params": params}, tokens, given, None, ends)[0]

    return run, arrays


def model_inside(version, numbers, **options):
    run, arrays = model(version, **options)
    split = dict(mesh=MESH, in_specs=(P(), BATCH))
    each = jax.shard_map(jax.grad(lambda p, t: weighed(run(p, t))), out_specs=P(), **split)
    if not numbers:
        jax.eval_shape(each, *arrays.values())
        return 0.0
    through = jax.shard_map(run, out_specs=BATCH, **split)
    got = jax.jit(lambda *args: (through(*args), each(*args)))(*arrays.values())
    want = jax.jit(lambda *args: (run(*args), jax.grad(lambda p, t: weighed(run(p, t)))(*args)))
    return small.largest_error(got, want(*arrays.values()))


def layers(version, T):
    for layer in LAYERS[version]:
        sizes = dict(head_dim=16) if "Attention" in layer.__name__ else {}
        one = layer(hidden_size=32, num_layers=2, **sizes)
        x = jnp.ones((8, T, 32))
        variables = jax.eval_shape(one.init, jax.random.key(0), x)

        def grad(variables, x, one=one):
            return jax.grad(lambda v, x: weighed(one.apply(v, x)), (0, 1))(variables, x)

        specs = P(), BATCH
        jax.eval_shape(jax.shard_map(grad, mesh=MESH, in_specs=specs, out_specs=specs), variables, x)
    return 0.0


def report(version, implementation):
    """Name of a call: the error that it raised, or its largest difference to one device."""
    found = {}

    def attempt(name, run, *args, **options):
        try:
            found[name] = run(*args, **options)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]

    op = OPS[version - 6]
    shared = dict(k=P(), v=HEADS, w=BATCH, initial_state=P(None, "model"))
    attempt("op", recurrence(op, implementation, **shared).gradients)
    if implementation == "triton":
        specs = dict(o=BATCH, gate=HEADS, scale=P()), dict(v_first=P(), k=BATCH, w0=P())
        name, specs = (f"{op}_readout", specs[0]) if version == 6 else ("rwkv7_keys", specs[1])
        attempt(name, on_heads(name, implementation, **specs).gradients)
        return found
    attempt("op without state", recurrence(op, implementation, no_state=True).traced)
    attempt("op, eager", recurrence(op, implementation, **shared).eager)
    if version == 7:
        attempt("keys", on_heads("rwkv7_keys", implementation, v_first=P(), k=BATCH, w0=P()).gradients)
    else:
        attempt("mixes", mixes(implementation, y=P(), last=P()).gradients)
    for T, form in ((1, "fused_recurrent"), (5, "fused_recurrent"), (5, "chunk")):
        attempt(f"reference, {form}, {T}", recurrence(op, "reference", T, form, **shared).traced)
    for T in (1, 5):
        attempt(f"layers, {T}", layers, version, T)
    attempt("model, a token", model_inside, version, False, T=1, scan_layers=True)
    for scan in (False, True, "unroll"):
        attempt(f"model, {scan}", model_inside, version, scan is True, scan_layers=scan)
    options = dict(scan_layers=True, remat="dense", state=True, lengths=True)
    attempt("model, remat, a state and lengths", model_inside, version, False, **options)
    if version == 6:  # each operation of an eager one is compiled: seconds
        return found
    run, arrays = model(version, num_layers=1, T=1)
    eager = jax.shard_map(run, mesh=MESH, in_specs=(P(), BATCH), out_specs=BATCH)
    attempt(
        "model, eager", lambda: small.largest_error(eager(*arrays.values()), jax.jit(run)(*arrays.values()))
    )
    return found
