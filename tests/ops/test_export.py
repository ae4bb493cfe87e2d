"""`jax.export`: ops and models with a symbolic batch size, for every platform."""

import chex
import jax
import jax.numpy as jnp
import pytest
from harness import cases
from harness.cases import TOKENS, Case
from harness.tiers import each_op
from jax import export
from small_models import VERSIONS, draw, model, shapes

from fla_jax.core.gpu import lowering_for


def symbolic(op: str, B="b", T=7):
    """Abstract arrays of a call by name, sizes as numbers or as names."""
    names = [name for name in cases.INPUTS[op] if name != "initial_state"]
    tokens = (*export.symbolic_shape(f"{B}, {T}"), 2, 4)
    return {
        name: jax.ShapeDtypeStruct(tokens if name in TOKENS[op] else (2, 4), jnp.float32) for name in names
    }


@each_op
@pytest.mark.parametrize("form, T", [("chunk", 40), ("fused_recurrent", 5), ("fused_recurrent", 1)])
def test_a_symbolic_batch(op, form, T):
    arrays = symbolic(op, T=T)
    run = lambda arrays: cases.call(op, arrays, form=form)
    exported = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(arrays)
    for B in (1, 3):
        x = cases.build(Case(op, B=B, T=T, H=2, K=4, V=4)).arrays
        given = {name: jnp.asarray(x[name]) for name in arrays}
        chex.assert_trees_all_close(exported.call(given), run(given), rtol=2e-6, atol=2e-6)


@each_op
def test_a_symbolic_number_of_sequences_is_refused(op):
    cu = jax.ShapeDtypeStruct(export.symbolic_shape("n"), jnp.int32)
    run = lambda arrays, cu: cases.call(op, arrays, {"cu_seqlens": cu})
    with pytest.raises(ValueError, match=r"^cu_seqlens must have a known shape, got \[n\]"):
        export.export(jax.jit(run))(symbolic(op, B=1), cu)


@each_op
def test_a_symbolic_number_of_tokens_says_why_not(op):
    arrays = symbolic(op, B=2, T="t")
    with pytest.raises(ValueError, match=r"^r has a symbolic T = t: the number of tokens decides"):
        export.export(jax.jit(lambda arrays: cases.call(op, arrays)))(arrays)


@each_op
def test_kernels_say_why_not(op):
    """On a GPU the plain form serves a symbolic batch size, with a warning."""
    arrays = symbolic(op)
    with (
        lowering_for(90),
        pytest.warns(UserWarning, match="much slower: its kernels need a static batch size"),
    ):
        export.export(jax.jit(lambda arrays: cases.call(op, arrays)), platforms=("cuda",))(arrays)


@pytest.mark.parametrize("version", VERSIONS)
def test_models(version):
    module = model(version, scan_layers=True)
    params = draw(shapes(module, jnp.zeros((1, 2), jnp.int32)))
    (batch,) = export.symbolic_shape("b")
    run = jax.jit(lambda params, tokens: module.apply({"params": params}, tokens))
    exported = export.export(run, platforms=("cpu", "cuda"))(
        params, jax.ShapeDtypeStruct((batch, 6), jnp.int32)
    )
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, 24)
    chex.assert_trees_all_close(exported.call(params, tokens), run(params, tokens), rtol=1e-4, atol=1e-5)
