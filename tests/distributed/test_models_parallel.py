"""Training steps on eight fake devices: the numbers of one device, and the communication of each mode."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small
from flax.core import FrozenDict
from harness import processes
from jax.sharding import PartitionSpec as P

from fla_jax.models import stack_layers
from fla_jax.parallel import (
    TrainStep,
    axis_rules,
    make_mesh,
    overlap_flags,
    overlap_options,
    parameter_shardings,
)

pytestmark = pytest.mark.slow  # all of a version's from one process
MODES = [
    (version, mode)
    for version, modes in processes.load("distributed/parallel_run.py").MODES.items()
    for mode in modes
]


@functools.cache
def report(version):
    return processes.report("distributed/parallel_run.py", version)


def talk(version, mode, *kinds):
    """(where, shape) of all arrays of these kinds of collectives; all other kinds must be absent."""
    found = report(version)[mode]["collectives"]
    assert {kind for kind, _, _ in found} <= {*kinds}, found
    return lambda kind: [(where, shape) for k, where, shape in found if k == kind]


def numbers(arrays, where):
    return sum(int(np.prod(shape)) for place, shape in arrays if place == where)


@pytest.mark.parametrize("version, mode", MODES)
def test_numbers(version, mode):
    """Loss, gradients and updated parameters are those of one device, and lie where they belong."""
    found = report(version)[mode]
    assert max(found[name] for name in ("loss", "gradients", "parameters")) < 1e-5, found
    assert not found["misplaced"] and found["donated"], found


def test_data_parallel_sums_gradients_and_nothing_else():
    """One sum of each gradient, a layer's in the loop over layers, and of the loss."""
    sizes = report(7)["sizes"]
    arrays = talk(7, "data", "all-reduce")("all-reduce")
    assert numbers(arrays, "loop") == sizes["layer"]
    assert sizes["rest"] <= numbers(arrays, "once") <= sizes["rest"] + 4


@pytest.mark.parametrize(
    "version, mode, times",
    [(7, "fsdp", 2), (6, "fsdp, explicit", 2), (7, "fsdp, kept", 1), (6, "fsdp, explicit, kept", 1)],
)
def test_fsdp_gathers_matrices(version, mode, times):
    """Matrices come twice, or once where they are kept, vectors not at all. A CPU's compiler leaves two steps
    of a reduce-scatter.
    """
    found, sizes = report(version)[mode], report(version)["sizes"]
    arrays = talk(version, mode, "all-gather", "all-reduce")
    matrices = [tuple(shape) for shape in sizes["matrices"] if shape != [2, 16]]  # a bonus [H, N] is a vector
    if version == 7:  # ranks of 4, 5, 6 and 8 are too small for eight devices
        matrices = [shape for shape in matrices if shape[0] >= 32]
    gathered = arrays("all-gather")
    assert sorted(s for where, s in gathered if where == "loop") == sorted(times * matrices)
    assert [s for where, s in gathered if where == "once"] == [(32, 32)] * 2  # embedding, head
    sums = arrays("all-reduce")
    assert numbers(sums, "loop") == sizes["layer"] and numbers(sums, "once") <= sizes["rest"] + 20
    whole = {f"2,{','.join(map(str, shape))}" for shape in matrices if min(shape) >= 32}
    assert bool(whole & {*found["stacked"]}) == (times == 1), found["stacked"]
    assert (
        found["stored"] < (2 * sizes["layer"] + sizes["rest"]) / 8 * 2
    )  # vectors weigh much in so small a model


def test_fsdp_saves_memory():
    """By the compiler's account a fifth is stored (vectors are whole), and no more is needed besides."""
    (stored, beside), (whole, more) = (report(7)[mode]["bytes"] for mode in ("fsdp", "data"))
    assert stored < whole / 4 and beside < more, (stored, whole, beside, more)


def test_tensor_parallel_sums_twice_a_layer():
    """Forward: after output and value projection (and the embedding)."""
    assert report(7)["forward"]["error"] < 1e-5
    forward = talk(7, "forward", "all-reduce")("all-reduce")
    assert sorted(forward) == [("loop", (2, 8, 32))] * 2 + [("once", (2, 8, 32))]
    gathered = [shape for _, shape in talk(7, "tensor", "all-reduce", "all-gather")("all-gather")]
    assert all(shape[-1] == 2 for shape in gathered)  # greatest logits of two parts of the vocabulary


@pytest.mark.parametrize("version, mode, more", [(7, "tensor", []), (6, "all", [(2, 8, 5 * 4)])])
def test_tensor_parallel_sums_gradients_of_layer_inputs(version, mode, more):
    """One array for each layer's input; RWKV-6 also sums the low-rank part of its token shift."""
    arrays = talk(version, mode, "all-reduce", "all-gather")
    activations = [shape for where, shape in arrays("all-reduce") if where == "loop" and shape[:2] == (2, 8)]
    assert sorted(activations) == [*more, *[(2, 8, 32)] * (2 + 2)]


@pytest.mark.parametrize("version, mode, rows", [(7, "sequence", 8), (6, "sequence, explicit", 4)])
def test_sequences_move_states_and_rows(version, mode, rows):
    """(M, N) is gathered both ways in every layer, one token crosses at each token shift."""
    arrays = talk(version, mode, "all-gather", "all-reduce", "collective-permute")
    devices, heads = (4, 1) if version == 7 else (2, 1)
    gathered = [shape for where, shape in arrays("all-gather") if where == "loop" and len(shape) == 5]
    maps = [shape for shape in gathered if shape[-1] == 32]
    assert maps == [(devices, rows, heads, 16, 16 + 16)] * 2
    shifts = [shape for where, shape in arrays("collective-permute") if where == "loop"]
    assert {*shifts} == {(rows, 32)} and len(shifts) <= 9
    assert all(
        len(shape) == 1 or shape[1] < 4 for _, shape in arrays("collective-permute") if shape not in shifts
    )


@pytest.mark.parametrize("version, mode", [(7, "all, explicit"), (6, "all")])
def test_all_axes_at_once(version, mode):
    """No activation is gathered and none changes its axes."""
    arrays = talk(version, mode, "all-gather", "all-reduce")
    assert all(shape[-1] == 2 or shape[:2] != (2, 8) for _, shape in arrays("all-gather"))


def test_meshes_by_sizes():
    assert report(6)["meshes"] == [[8, 1, 1, 1], [1, 8, 1, 1], [4, 1, 1, 2], [2, 2, 1, 2]]


def test_what_a_mesh_must_divide():
    """Errors come before anything compiles, with the sizes and the axis by name."""
    hidden, heads, middle, batch, length, explicit, axes = report(6)["errors"]
    assert hidden == "hidden_size must be a multiple of mesh axis fsdp = 8, got 36"
    assert (
        heads
        == "hidden_size / head_dim = 32 / 16, the heads, must be a multiple of mesh axis tensor = 4, got 2"
    )
    assert middle == "intermediate_size must be a multiple of mesh axis tensor = 2, got 33"
    assert batch == "batch must have a size B that is a multiple of mesh axes data * fsdp = 2 * 4 = 8, got 6"
    for message in (length, explicit):
        assert message.startswith(
            "tokens must have a number of tokens T that is a multiple of mesh axis 'sequence' = 8, got T = 12"
        )
    assert axes.startswith("mesh must have the axes data, fsdp, sequence, tensor (see make_mesh), got ('x',)")


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(data=-1, fsdp=-1), "only one size may be -1, got data and fsdp"),
        (dict(fsdp=-1, tensor=3), "data * sequence * tensor = 1 * 1 * 3 = 3 must divide the number"),
        (dict(data=3), "= 3 * 1 * 1 * 1 = 3 must be the number of devices, got 8 devices; one size"),
        (dict(fsdp=0), "fsdp must be a positive integer, or -1 for all remaining devices, got 0"),
        (dict(tensor=2.0), "tensor must be a positive integer"),
    ],
)
def test_sizes_that_make_no_mesh(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_mesh(**sizes, devices=jax.devices() * 8)


def test_names_of_parameter_axes():
    model, mesh = small.model(6, scan_layers=True), make_mesh()
    specs = jax.tree.map(lambda sharding: sharding.spec, parameter_shardings(model, mesh))
    block = specs["blocks"]
    assert specs["emb"]["embedding"] == P("tensor", "fsdp") and specs["head"]["kernel"] == P("fsdp", "tensor")
    assert block["att"]["key"]["kernel"] == P(None, "fsdp", "tensor")
    assert block["ffn"]["value"]["kernel"] == P(None, "tensor", "fsdp")
    for vector in (block["ln1"]["scale"], block["att"]["time_maa_x"], specs["ln_out"]["bias"]):
        assert not any(vector)  # whole everywhere
    rules = dict(axis_rules(model, mesh))
    assert (
        rules["embed"] == "fsdp"
        and rules["activation_embed"] is None
        and rules["activation_batch"] == ("data", "fsdp")
    )


def test_parameters_of_another_model_are_refused():
    model = small.model(7)
    step, params = TrainStep(model, optax.sgd(1.0), make_mesh()), small.params(model)
    wide = {**params, "head": {"kernel": jnp.zeros((32, 25))}}
    for wrong, message in (
        (wide, "params: head/kernel must have shape [32, 24], got [32, 25]"),
        ({name: x for name, x in params.items() if name != "head"}, "params must contain head/kernel"),
        ({**params, "tail": params["head"]}, "params contain tail/kernel, which the model does not have"),
        (stack_layers(params), "params has stacked layers, but the model's scan_layers=False needs them"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            step.start(wrong)
    for right in (params, FrozenDict(params), jax.tree.map(np.asarray, params)):
        jax.tree.map(np.testing.assert_array_equal, step.start(right).params, params)


@pytest.mark.parametrize("in_flight", [1, 16])
def test_flags(in_flight):
    program = "import jax; jax.devices()"  # an unknown flag would end the process
    env = {**os.environ, "XLA_FLAGS": overlap_flags(in_flight), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_collectives_in_flight():
    """More than XLA's default of one adds the option, and nothing else."""
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    assert overlap_options(16) == overlap_options() | {limit: 16} and limit not in overlap_options()
    for wrong in (0, 1.5, None):
        with pytest.raises(ValueError, match="collectives_in_flight must be an integer >= 1"):
            overlap_options(wrong)


def test_sums_of_activations_are_not_copied_together():
    """XLA copies what it sums together into one array and out again, so large sums must stay apart."""
    assert not [name for name in overlap_options() if "all_reduce_combine" in name]


@pytest.mark.slow
@pytest.mark.parametrize("version", small.VERSIONS)
def test_ops_that_are_opaque(version):
    """Gradients of the TP region are summed over devices where kernels run, too."""
    assert processes.report("distributed/opaque_run.py", version) < 1e-5
