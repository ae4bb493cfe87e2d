"""A training step of a model on a (data, model) mesh of eight fake devices, and on one. For
test_sharded.py.
"""

import flax.linen as nn
import jax
import small_models as small
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.training import cross_entropy, rwkv_optimizer

SPLIT = (("batch", "data"), ("heads", "model"), ("vocab", "model"), ("mlp", "model"))
RULES = (*SPLIT, *((name, None) for name in ("embed", "length", "kv", "rank", "layers")))


def step(state, tokens):
    def loss(params):
        return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1])[0], tokens[:, 1:])

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def report(version):
    """Losses on eight devices and on one, and where a kernel and its moment lie."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    options = dict(scan_layers=True, implementation="reference")
    model = small.model(version, remat=True, logical_axes=True, **options)
    tokens, tx = small.tokens(8, 9), rwkv_optimizer(1e-2)

    def create(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens[:, :1])["params"], tx=tx)

    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        specs = nn.get_partition_spec(jax.eval_shape(create, jax.random.key(0)))
        shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
        kernel = state.params["blocks"]["att"]["key"]["kernel"]
        moment = state.opt_state[1].mu["blocks"]["ffn"]["value"]["kernel"]
        where = {
            "names": kernel.names,
            "kernel": kernel.value.sharding.spec,
            "moment": moment.value.sharding.spec,
        }
        plain = jax.device_get(nn.meta.unbox(state.params))
        batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        losses = steps(jax.jit(step, out_shardings=(shardings, None), donate_argnums=0), state, batch)

    one = small.model(version, **options)
    state = TrainState.create(apply_fn=one.apply, params=plain, tx=tx)
    return where | {"losses": losses, "on one": steps(jax.jit(step), state, tokens)}


def steps(run, state, batch):
    losses = []
    for _ in range(4):
        state, value = run(state, batch)
        losses.append(float(value))
    return losses
