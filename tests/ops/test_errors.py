"""What the recurrences refuse: the message names the argument, what came and what was wanted."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, recurrences
from harness.cases import INPUTS, TOKENS, Case
from harness.tiers import each_op

from fla_jax import ops
from fla_jax.core.context import Context
from fla_jax.core.gpu import current_gpu
from fla_jax.core.types import RWKV7Inputs
from fla_jax.ops.recurrence_support import recurrent_supports

FORMS = ("chunk", "fused_recurrent")
each_form = pytest.mark.parametrize("form", FORMS)
SHAPE = dict(B=2, T=6, H=3, K=4, V=5)
PACKED = {**SHAPE, "B": 1, "layout": "packed", "lengths": (2, 4)}


def refused(error, match, op, changes=None, form="chunk", case=None, **options):
    arrays = {**cases.build(case or Case(op, **SHAPE)).arrays, **(changes or {})}
    with pytest.raises(error, match=match):
        cases.call(op, arrays, form=form, **options)


@each_op
def test_shapes_of_token_arrays(op):
    x = cases.build(Case(op, **SHAPE)).arrays
    refuse = lambda match, **changes: refused(ValueError, match, op, changes)
    for name in TOKENS[op]:
        like = {"r": r"K\].*", "v": r"V\].*"}.get(name, r"K\] = \[2, 6, 3, 4\],")
        message = rf"^{name} must have shape \[B, T, H, {like} got"
        refuse(rf"{message} \[2, 6, 3\]", **{name: x[name][..., 0]})
        if name not in "rv":
            refuse(rf"{message} \[2, 6, 3, 3\]", **{name: x[name][..., :3]})
            refuse(rf"{message} \[1, 6, 3, 4\]", **{name: x[name][:1]})
    v = r"^v must have shape \[B, T, H, V\] = \[2, 6, 3, 5\], got \[2, 5, 3, 5\]"
    refuse(v, v=x["v"][:, :5])


@each_op
@pytest.mark.parametrize("K, V, name", [(257, 4, "r"), (4, 257, "v"), (0, 4, "r"), (4, 0, "v")])
def test_head_sizes_out_of_range(op, K, V, name):
    x = cases.build(Case(op, **{**SHAPE, "K": max(K, 1), "V": max(V, 1)})).arrays
    cut = {n: a[..., : V if n == "v" else K] for n, a in x.items() if n != "initial_state"}
    said = f"K = {K}" if name == "r" else f"V = {V}"
    refused(ValueError, f"^{name} has {said}; head sizes from 1 to 256", op, x | cut)


@each_op
def test_initial_state_and_bonus_shapes(op):
    state, one = np.zeros((2, 3, 4, 5), np.float32), np.ones((1, 4), np.float32)
    like = r"^initial_state must have shape \[B, H, K, V\] = \[2, 3, 4, 5\], got"
    wrong = [
        ("initial_state", state[0], rf"{like} \[3, 4, 5\]$"),
        ("initial_state", np.swapaxes(state, 2, 3), rf"{like} \[2, 3, 5, 4\]; it seems to be \[B, H, V, K\]"),
    ]
    if op == "rwkv6":
        like = r"^u must have shape \[H, K\] = \[3, 4\], got"
        wrong += [("u", one[0], rf"{like} \[4\]$"), ("u", one, rf"{like} \[1, 4\]$")]
    for name, value, message in wrong:
        refused(ValueError, message, op, {name: value})


@each_op
@each_form
def test_heads_before_tokens(op, form):
    """[B, H, T, D] by mistake: an error where u or the state tells, a warning where T < H hints at it."""
    x = cases.build(Case(op, **SHAPE)).arrays
    swapped = {n: np.swapaxes(a, 1, 2) if n in TOKENS[op] else a for n, a in x.items()}
    refused(ValueError, r"swap their axes 1 and 2", op, swapped, form)
    refused(ValueError, r"^k must .*is it \[B, H, T, D\]\? Swap axes 1 and 2", op, {"k": swapped["k"]}, form)
    bare = {n: a for n, a in swapped.items() if n != "initial_state"}
    call = lambda: cases.call(op, bare, form=form, implementation="reference")
    if op == "rwkv6":
        with pytest.raises(ValueError, match=r"^u must have shape .*swap their axes 1 and 2"):
            call()
    elif form == "chunk":
        with pytest.warns(UserWarning, match=r"r has T = 3 < H = 6.*swap axes 1 and 2"):
            call()
    else:  # a few tokens at a time are what the recurrent form is for
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


def warnings_of(**changes):
    x = cases.build(Case("rwkv7", **{**SHAPE, **changes})).arrays
    bare = {n: a for n, a in x.items() if n != "initial_state"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda a: cases.call("rwkv7", a), bare)
    return caught


def test_the_warning_points_at_the_caller_and_comes_only_where_there_is_doubt():
    for changes in (dict(T=1), dict(T=3, H=3), dict(T=6, H=3)):
        assert not warnings_of(**changes)
    (caught,) = warnings_of(T=2)
    assert caught.category is UserWarning and caught.filename == recurrences.__file__


@each_op
@each_form
def test_dtypes(op, form):
    for name, a in cases.build(Case(op, **SHAPE)).arrays.items():
        float8, floats = jnp.asarray(a, jnp.float8_e4m3fn), "float16, bfloat16, float32 or float64"
        wrong = [
            (a.astype(np.int32), "must have a floating-point dtype, got int32"),
            (a.astype(np.complex64), "must have a floating-point dtype, got complex64"),
            (float8, f"must be {floats}, got float8_e4m3fn"),
            (a.astype(">f4"), f"must be {floats}, got >f4"),  # a file's byte order
            (a.tolist(), "must be a floating-point array, got list"),
            (None, "must be a floating-point array, got NoneType"),
        ]
        for value, message in wrong[: 4 if name == "initial_state" else 6]:
            refused(TypeError, f"^{name} {message}", op, {name: value}, form)


IDS, CU = np.zeros((2, 6), np.int32), np.array([0, 2, 6])
FAR = np.array([[7] * 3 + [7 + 2**32] * 3] * 2)  # as int32 these would be one document
LAYOUTS = [
    (dict(segment_ids=IDS, cu_seqlens=CU), ValueError, "^segment_ids and cu_seqlens .* got both"),
    (dict(segment_ids=IDS[0]), ValueError, r"^segment_ids must have shape \[B, T\] = \[2, 6\], got \[6\]"),
    (dict(segment_ids=IDS * 1.0), TypeError, "^segment_ids must be an integer array .* got float64"),
    (dict(segment_ids=FAR), ValueError, "^segment_ids must be from .* got 7 to 4294967303"),
    (dict(segment_ids=FAR.tolist()), ValueError, "^segment_ids must be from"),
    (dict(cu_seqlens=CU), ValueError, "^cu_seqlens .* must have B = 1, got B = 2"),
]
INTEGERS, LENGTH = "^cu_seqlens must be an integer array", r"^cu_seqlens must have shape \[N \+ 1\] .* got"
RISE = "^cu_seqlens must rise from 0 to T = 6 without falling"
CU_SEQLENS = [
    (CU.astype(float), TypeError, f"{INTEGERS} .* got float64"),
    ([[0, 2], [6]], TypeError, INTEGERS),
    ([0], ValueError, rf"{LENGTH} \[1\]"),
    (CU[None], ValueError, rf"{LENGTH} \[1, 3\]"),
    *(
        (bad, ValueError, f"{RISE}, got {re.escape(str(bad))}")
        for bad in ([0, 3, 5], [1, 3, 6], [0, 7, 6], [0, 3, 7], [0, -1, 6])
    ),
    (np.array([0, 7, 6], np.uint8), ValueError, RISE),
    ([0, 2, 2, 6], ValueError, r"^initial_state must .* = \[3, 3, 4, 5\], got \[2, 3, 4, 5\]"),
]


@each_op
@each_form
def test_layout_arguments(op, form):
    for layout, error, message in LAYOUTS:
        refused(error, message, op, form=form, **layout)
    for cu, error, message in CU_SEQLENS:
        refused(error, message, op, form=form, case=Case(op, **PACKED), cu_seqlens=cu)


@each_op
def test_static_arguments(op):
    power = "^chunk_size must be a power of two from 1 to 256 or None, got"
    for bad in (0, 3, 512, -4, 16.0, "16"):
        refused(ValueError, f"{power} {re.escape(repr(bad))}", op, chunk_size=bad)
    for bad in (0.1, -np.inf, np.nan, -(10**400)):
        refused(ValueError, "^lower_bound must be a finite number <= 0", op, lower_bound=bad)
    refused(TypeError, "^lower_bound must be a Python number, got str", op, lower_bound="low")
    for form in FORMS:
        refused(TypeError, "^scale must be a Python number, got NoneType", op, form=form, scale=None)
        refused(ValueError, "^scale must be a finite number, got nan", op, form=form, scale=np.nan)
        refused(ValueError, "^scale must be a finite number, got inf", op, form=form, scale=10**400)
        for bad in ("fast", "", 3, ["xla"]):
            message = rf"{form}_{op}: implementation must be one of .* got {re.escape(repr(bad))}"
            for case in (None, Case(op, **{**SHAPE, "T": 0})):  # where nothing runs, too
                refused(ValueError, message, op, form=form, case=case, implementation=bad)
    x = cases.build(Case(op, **SHAPE)).arrays
    message = "^scale must be a Python number, known when the function is traced.*multiply o by it instead"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda s: cases.call(op, x, scale=s))(2.0)
    message = r"^lower_bound must be a Python number, known .*, got a traced value(?!;)"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda s: cases.call(op, x, lower_bound=s))(-2.0)
    with pytest.raises(ValueError, match=r"^precision must be None or .*, got .*Tracer"):
        jax.jit(lambda s: cases.call(op, x, precision=s))(2)


@each_op
def test_scale_may_be_any_real_number(op):
    case = Case(op, **SHAPE, scale=2.0)
    for scale in (2, np.float32(2), np.float64(2), np.array(2), jnp.float32(2)):
        got = cases.outputs(case, "reference", scale=scale)
        cases.compare(case, cases.Results(got, {}), cases.expected(case))


@each_op
@each_form
def test_everything_is_keyword_only_after_the_arrays(op, form):
    x = cases.build(Case(op, **SHAPE)).arrays
    with pytest.raises(TypeError, match="positional"):
        getattr(ops, f"{form}_{op}")(*(x[n] for n in INPUTS[op][:-1]), 1.0)


@each_op
@pytest.mark.parametrize(
    "form, implementation, B, T, said",
    [
        ("chunk", "triton", 65536, 1, "65536: split the batch"),
        ("fused_recurrent", "triton", 65536, 1, "65536: split the batch"),
        ("fused_recurrent", "pallas", 65536, 1, "65536: split the batch"),
        ("fused_recurrent", "triton", 2, 1 << 19, "B = 2, T = 524288: split the batch"),
        ("fused_recurrent", "pallas", 2, 1 << 19, "B = 2, T = 524288: split the batch"),
    ],
)
def test_more_programs_than_a_grid_of_cuda_has(op, form, implementation, B, T, said, monkeypatch):
    monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")
    token, K = jax.ShapeDtypeStruct((B, T, 1, 16), jnp.float32), jax.ShapeDtypeStruct((1, 16), jnp.float32)
    arrays = {name: token for name in TOKENS[op]} | ({"u": K} if op == "rwkv6" else {})
    call = lambda x: cases.call(op, x, form=form, implementation=implementation)["o"].sum()
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(jax.grad(call), arrays)


def test_gradients_from_chunks_have_no_limit_of_tokens():
    """Those of RWKV-7's recurrent op, whose inputs have 16 bits; interpreters have none."""
    token, state = jax.ShapeDtypeStruct((2, 1 << 19, 1, 16), jnp.bfloat16), jnp.zeros((2, 1, 16, 16))
    x = RWKV7Inputs(token, token, token, token, token, token, state)
    supports = recurrent_supports(lambda ctx: None, "rwkab")
    refused = lambda x, **more: supports(Context("", x, None, "gpu", current_gpu(), **more)) is not None
    float32 = x._replace(w=jax.ShapeDtypeStruct(token.shape, jnp.float32))
    assert refused(float32) and not refused(x) and not refused(float32, save_residuals=False)


@each_op
def test_more_programs_than_a_grid_of_cuda_has_under_vmap(op):
    x = cases.build(Case(op, **SHAPE)).arrays
    call = lambda r: cases.call(op, x | {"r": r}, implementation="triton")["o"]
    with pytest.raises(ValueError, match="65535 heads, and as many sequences"):
        jax.eval_shape(jax.vmap(call), jax.ShapeDtypeStruct((40000, *x["r"].shape), jnp.float32))
