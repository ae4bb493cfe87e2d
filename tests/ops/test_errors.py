"""What the ops refuse, and that the message names the argument, what came and what was wanted."""

import itertools
import re
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import INPUTS, OPS, TOKENS, Case

each_op = pytest.mark.parametrize("op", OPS)
FORMS = ("chunk", "fused_recurrent")
SHAPE = dict(B=2, T=6, H=3, K=4, V=5)


def refused(error, match, op, changes=None, form="chunk", case=None, **options):
    """Calls with some arrays or options replaced, under eval_shape too: all checks on shapes and dtypes are
    made when tracing.
    """
    arrays = {**cases.build(case or Case(op, **SHAPE)).arrays, **(changes or {})}
    with pytest.raises(error, match=match):
        cases.call(op, arrays, form, **options)


@each_op
def test_shapes_of_token_arrays(op):
    x = cases.build(Case(op, **SHAPE)).arrays
    for name in TOKENS[op]:
        if name in "rv":
            refused(
                ValueError,
                rf"^{name} must have shape \[B, T, H, {'K' if name == 'r' else 'V'}\].* got \[2, 6, 3\]",
                op,
                {name: x[name][..., 0]},
            )
        else:
            refused(
                ValueError,
                rf"^{name} must have shape \[B, T, H, K\] = \[2, 6, 3, 4\], got \[2, 6, 3\]",
                op,
                {name: x[name][..., 0]},
            )
            refused(
                ValueError, rf"^{name} must have shape .* got \[2, 6, 3, 3\]", op, {name: x[name][..., :3]}
            )
            refused(ValueError, rf"^{name} must have shape .* got \[1, 6, 3, 4\]", op, {name: x[name][:1]})
    refused(
        ValueError,
        r"^v must have shape \[B, T, H, V\] = \[2, 6, 3, 5\], got \[2, 5, 3, 5\]",
        op,
        {"v": x["v"][:, :5]},
    )


@each_op
def test_head_sizes_out_of_range(op):
    for K, V, message in (
        (257, 4, "^r has K = 257"),
        (4, 257, "^v has V = 257"),
        (0, 4, "^r has K = 0"),
        (4, 0, "^v has V = 0"),
    ):
        refused(
            ValueError,
            message + "; head sizes from 1 to 256",
            op,
            case=Case(op, **{**SHAPE, "K": max(K, 1), "V": max(V, 1)}),
            changes=_resized(op, K, V),
        )


def _resized(op, K, V):
    x = cases.build(Case(op, **{**SHAPE, "K": max(K, 1), "V": max(V, 1)})).arrays
    return {n: a if n == "initial_state" else a[..., :V] if n == "v" else a[..., :K] for n, a in x.items()}


@each_op
def test_initial_state_and_bonus_shapes(op):
    state = np.zeros((2, 3, 4, 5), np.float32)
    refused(
        ValueError,
        r"^initial_state must have shape \[B, H, K, V\] = \[2, 3, 4, 5\], got \[3, 4, 5\]$",
        op,
        {"initial_state": state[0]},
    )
    refused(
        ValueError,
        r"^initial_state must .* got \[2, 3, 5, 4\]; it seems to be \[B, H, V, K\]",
        op,
        {"initial_state": np.swapaxes(state, 2, 3)},
    )
    if op == "rwkv6":
        refused(
            ValueError,
            r"^u must have shape \[H, K\] = \[3, 4\], got \[4\]$",
            op,
            {"u": np.ones(4, np.float32)},
        )
        refused(
            ValueError,
            r"^u must have shape \[H, K\] = \[3, 4\], got \[1, 4\]$",
            op,
            {"u": np.ones((1, 4), np.float32)},
        )


@each_op
@pytest.mark.parametrize("form", FORMS)
def test_heads_before_tokens(op, form):
    """[B, H, T, D] by mistake: an error where u or the state tells, a warning where only T < H hints at
    it.
    """
    x = cases.build(Case(op, B=2, T=6, H=3, K=4, V=5)).arrays
    swapped = {n: np.swapaxes(a, 1, 2) if n in TOKENS[op] else a for n, a in x.items()}
    refused(ValueError, r"swap their axes 1 and 2", op, swapped, form)
    alone = {n: a for n, a in swapped.items() if n != "initial_state"}
    with (
        pytest.raises(ValueError, match=r"^u must have shape .*swap their axes 1 and 2")
        if op == "rwkv6"
        else warnings.catch_warnings()
    ):
        if op == "rwkv6":
            cases.call(op, alone, form)
        elif form == "chunk":
            with pytest.warns(UserWarning, match=r"r has T = 3 < H = 6.*swap axes 1 and 2"):
                cases.call(op, alone, form, implementation="reference")
        else:  # a few tokens at a time are what the recurrent form is for
            warnings.simplefilter("error")
            cases.call(op, alone, form, implementation="reference")
    refused(ValueError, r"^k must .*is it \[B, H, T, D\]\? Swap axes 1 and 2", op, {"k": swapped["k"]}, form)


def test_no_warning_without_doubt():
    for changes in (dict(T=1), dict(T=3, H=3), dict(T=6, H=3)):
        x = cases.build(Case("rwkv7", **{**SHAPE, **changes})).arrays
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(
                lambda a: cases.call("rwkv7", a), {n: a for n, a in x.items() if n != "initial_state"}
            )


def test_the_warning_points_at_the_caller():
    x = cases.build(Case("rwkv7", **{**SHAPE, "T": 2})).arrays
    with pytest.warns(UserWarning) as caught:
        jax.eval_shape(lambda a: cases.call("rwkv7", a), {n: a for n, a in x.items() if n != "initial_state"})
    assert caught[0].filename == cases.__file__


@each_op
@pytest.mark.parametrize("form", FORMS)
def test_dtypes(op, form):
    x = cases.build(Case(op, **SHAPE)).arrays
    for name in INPUTS[op]:
        refused(
            TypeError,
            rf"^{name} must have a floating-point dtype, got int32",
            op,
            {name: x[name].astype(np.int32)},
            form,
        )
        refused(
            TypeError,
            rf"^{name} must have a floating-point dtype, got complex64",
            op,
            {name: x[name].astype(np.complex64)},
            form,
        )
        refused(
            TypeError,
            rf"^{name} must be float16, bfloat16, float32 or float64, got float8_e4m3fn",
            op,
            {name: jnp.asarray(x[name], jnp.float8_e4m3fn)},
            form,
        )
        if name != "initial_state":
            refused(
                TypeError,
                rf"^{name} must be a floating-point array, got list",
                op,
                {name: x[name].tolist()},
                form,
            )
            refused(
                TypeError, rf"^{name} must be a floating-point array, got NoneType", op, {name: None}, form
            )


@each_op
@pytest.mark.parametrize("form", FORMS)
def test_layout_arguments(op, form):
    ids, cu = np.zeros((2, 6), np.int32), np.array([0, 2, 6])
    refused(
        ValueError, "^segment_ids and cu_seqlens .* got both", op, form=form, segment_ids=ids, cu_seqlens=cu
    )
    refused(
        ValueError,
        r"^segment_ids must have shape \[B, T\] = \[2, 6\], got \[6\]",
        op,
        form=form,
        segment_ids=ids[0],
    )
    refused(
        TypeError,
        r"^segment_ids must be an integer array .* got float32",
        op,
        form=form,
        segment_ids=ids.astype(np.float32),
    )
    # as int32 these would be one document
    far = np.array([[7] * 3 + [7 + 2**32] * 3] * 2)
    refused(ValueError, r"^segment_ids must be from .* got 7 to 4294967303", op, form=form, segment_ids=far)
    refused(ValueError, r"^segment_ids must be from", op, form=form, segment_ids=far.tolist())
    refused(ValueError, "^cu_seqlens .* must have B = 1, got B = 2", op, form=form, cu_seqlens=cu)
    packed = Case(op, **{**SHAPE, "B": 1, "layout": "packed", "lengths": (2, 4)})
    on_packed = lambda error, match, **options: refused(error, match, op, form=form, case=packed, **options)
    on_packed(TypeError, r"^cu_seqlens must be an integer array .* got float64", cu_seqlens=cu.astype(float))
    on_packed(TypeError, "^cu_seqlens must be an integer array", cu_seqlens=[[0, 2], [6]])
    on_packed(ValueError, r"^cu_seqlens must have shape \[N \+ 1\] .* got \[1\]", cu_seqlens=[0])
    on_packed(ValueError, r"^cu_seqlens must have shape \[N \+ 1\] .* got \[1, 3\]", cu_seqlens=cu[None])
    for bad in ([0, 3, 5], [1, 3, 6], [0, 7, 6], [0, 3, 7], [0, -1, 6]):
        on_packed(
            ValueError,
            rf"^cu_seqlens must rise from 0 to T = 6 without falling, got {re.escape(str(bad))}",
            cu_seqlens=bad,
        )
    on_packed(
        ValueError,
        "^cu_seqlens must rise from 0 to T = 6 without falling",
        cu_seqlens=np.array([0, 7, 6], np.uint8),
    )
    on_packed(
        ValueError,
        r"^initial_state must have shape \[N, H, K, V\] = \[3, 3, 4, 5\], got \[2, 3, 4, 5\]",
        cu_seqlens=[0, 2, 2, 6],
    )


@each_op
def test_static_arguments(op):
    empty = Case(op, **{**SHAPE, "T": 0})  # where nothing runs
    for bad in (0, 3, 512, -4, 16.0, "16"):
        refused(
            ValueError,
            rf"^chunk_size must be a power of two from 1 to 256 or None, got {re.escape(repr(bad))}",
            op,
            chunk_size=bad,
        )
    for bad in (0.1, -np.inf, np.nan):
        refused(ValueError, r"^lower_bound must be a finite number <= 0", op, lower_bound=bad)
    refused(TypeError, "^lower_bound must be a Python number, got str", op, lower_bound="low")
    for form in FORMS:
        refused(TypeError, "^scale must be a Python number, got NoneType", op, form=form, scale=None)
        refused(ValueError, "^scale must be a finite number, got nan", op, form=form, scale=np.nan)
        for bad, case in itertools.product(("fast", "", 3, ["xla"]), (None, empty)):
            refused(
                ValueError,
                rf"{form}_{op}: implementation must be one of .* got {re.escape(repr(bad))}",
                op,
                form=form,
                case=case,
                implementation=bad,
            )
    x = cases.build(Case(op, **SHAPE)).arrays
    with pytest.raises(
        TypeError,
        match=r"^scale must be a Python number, known when the function is traced.*multiply o by it instead",
    ):
        jax.jit(lambda s: cases.call(op, x, scale=s))(2.0)


@each_op
def test_scale_may_be_any_real_number(op):
    x = cases.build(Case(op, **SHAPE)).arrays
    for scale in (2, np.float32(2), np.float64(2), np.array(2), jnp.float32(2)):
        o, _ = jax.jit(lambda a, scale=scale: cases.call(op, a, scale=scale, implementation="reference"))(x)
        (want, _), _ = cases.ask_oracle(op, cases.build(Case(op, **SHAPE)), 2.0)
        cases.assert_close("o", o, want, 3e-6)


@each_op
def test_everything_is_keyword_only_after_the_arrays(op):
    x = cases.build(Case(op, **SHAPE)).arrays
    for form in FORMS:
        with pytest.raises(TypeError, match="positional"):
            getattr(cases.ops, f"{form}_{op}")(*(x[n] for n in INPUTS[op][:-1]), 1.0)
