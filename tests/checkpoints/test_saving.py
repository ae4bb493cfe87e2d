"""Files that are written: whole or not at all, by any number of savers, with the permissions of the umask."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.checkpoints import load_checkpoint, read_pth, save_checkpoint, write_pth

HF_FILES = ["config.json", "generation_config.json", "model.safetensors"]
TARGETS = {"model.pth": "model.pth", "model": "model/model.safetensors"}  # what is asked for, what appears


def write(path, *args, **options):
    save_checkpoint(path, *args, format=None if path.suffix else "huggingface", **options)


@pytest.fixture(scope="module")
def model():
    return small.model(7, num_layers=1)


@pytest.fixture(scope="module")
def params(model):
    return small.params(model)


@pytest.mark.parametrize("target", TARGETS)
def test_full_disk(model, params, tmp_path, target):
    """An OSError that names the file; the old file stays."""
    path = tmp_path / target
    write(path, model, params)
    before = (tmp_path / TARGETS[target]).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # more fails as on a full disk
    try:
        with pytest.raises(OSError, match=TARGETS[target]) as error:
            write(path, model, params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG and error.value.filename == str(tmp_path / TARGETS[target])
    assert (tmp_path / TARGETS[target]).read_bytes() == before
    assert sorted(os.listdir(path if path.is_dir() else tmp_path)) in (
        ["model.pth"],
        HF_FILES,
    )


def test_errors_of_the_file_system_name_the_file(model, params, tmp_path):
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "file").write_text("")
    for path, error, name in (
        ("missing/x.pth", FileNotFoundError, "missing/x.pth"),
        ("folder.pth", IsADirectoryError, "folder.pth"),
        ("file", FileExistsError, "file"),
        ("file/x.pth", NotADirectoryError, "file/x.pth"),
    ):
        with pytest.raises(error) as raised:
            write(tmp_path / path, model, params)
        assert raised.value.filename in (str(tmp_path / name), tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.pth"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions(model, params, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        for target in TARGETS:
            write(tmp_path / target, model, params)
    finally:
        os.umask(before)
    for name in (*TARGETS.values(), "model/config.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode, name


def test_links_are_replaced(tmp_path):
    """Caches of downloads are links to files that others read too."""
    write_pth(tmp_path / "blob", {"x": np.zeros(1, np.float32)})
    (tmp_path / "a.pth").symlink_to(tmp_path / "blob")
    assert read_pth(tmp_path / "a.pth")["x"] == 0
    write_pth(tmp_path / "a.pth", {"x": np.ones(1, np.float32)})
    assert read_pth(tmp_path / "a.pth")["x"] == 1 and read_pth(tmp_path / "blob")["x"] == 0


def test_leftovers(model, params, tmp_path):
    """What dead saves to this path have left goes, and nothing else."""
    (tmp_path / "model").mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    files = (*TARGETS.values(), "model/config.json")
    left = [f"{name}.{dead.pid}{n}.tmp" for name in files for n in ("", "-0", "-12")]
    kept = [
        "model.pth.tmp",
        "model.pth.old.tmp",
        "model.pth.7-7",
        f"other.pth.{dead.pid}-0.tmp",
        "xmodel.pth.7-7.tmp",
    ]
    for name in (*left, *kept, "model.pth.8-8.tmp"):
        (tmp_path / name).write_text("half a file")
    (tmp_path / "model.pth.9-9.tmp").mkdir()
    with open(tmp_path / "model.pth.8-8.tmp", "rb") as live:  # as a save that goes on holds it
        fcntl.flock(live, fcntl.LOCK_EX)
        for target in TARGETS:
            write(tmp_path / target, model, params)
        kept += ["model.pth.8-8.tmp", "model.pth.9-9.tmp", "model", "model.pth"]
        assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert sorted(os.listdir(tmp_path / "model")) == HF_FILES


@pytest.mark.parametrize("target", TARGETS)
def test_threads(model, params, tmp_path, target):
    """Many savers of one path: none fails, and whoever reads meanwhile gets the whole of one."""
    path = tmp_path / target
    versions = [jax.tree.map(lambda x, i=i: jnp.full_like(x, i), params) for i in range(4)]
    write(path, model, versions[0])

    def read(_):
        tensors = jax.tree.leaves(load_checkpoint(path)[1])
        return {float(x.ravel()[0]) for x in tensors}

    with ThreadPoolExecutor(8) as pool:
        saves = [pool.submit(write, path, model, versions[i % 4]) for i in range(16)]
        for seen in pool.map(read, range(4)):
            assert len(seen) == 1, "parts of several files"
        for save in saves:
            save.result()
    assert not [name for name in os.listdir(path if path.is_dir() else tmp_path) if name.endswith(".tmp")]


PROCESSES = """
import os, signal, sys
import numpy as np
from fla_jax.checkpoints import write_pth

class Deadly:
    dtype, shape, ndim, size = np.dtype(np.float32), (3,), 1, 3

    def __array__(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

def work(i):
    for _ in range(20):
        write_pth(sys.argv[1], {"x": np.full(10000, i, np.float32), "y": np.full(10000, i, np.float32)})
    if i == 0:
        write_pth(sys.argv[1], {"x": np.ones(10000, np.float32), "y": Deadly()})

children = []
for i in range(4):
    children.append(os.fork())
    if not children[-1]:
        try:
            work(i)
            os._exit(0)
        finally:
            os._exit(1)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_processes(tmp_path):
    """The same between processes; one is killed in the middle, and the next save clears up after it."""
    path = tmp_path / "x.pth"
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL), "0", "0", "0"], done.stderr
    x, y = read_pth(path).values()
    assert x[0] in range(4) and (x == x[0]).all() and (y == x[0]).all()
    write_pth(path, {"x": x})
    assert os.listdir(tmp_path) == ["x.pth"]


@pytest.mark.parametrize("target, head", [("model.pth", "head.weight"), ("model", "lm_head.weight")])
def test_mixed_dtypes_are_named(model, params, tmp_path, target, head):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    count = len(jax.tree.leaves(params))
    message = f"1 of {count} tensors have another dtype than most, bfloat16: {head} float32; cast them"
    with pytest.warns(UserWarning, match=re.escape(message)) as found:
        write(tmp_path / target, model, {**half, "head": params["head"]})
    assert found[0].filename == __file__
    embedding, layers = half["emb"], {"blocks_0": half["blocks_0"] | {"att": params["blocks_0"]["att"]}}
    with pytest.warns(UserWarning, match=r"float32: (\S+ bfloat16, ){7}\S+ bfloat16 and 2 more; cast"):
        write(tmp_path / target, model, {**params, **layers, "emb": embedding, "ln0": half["ln0"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(tmp_path / target, model, half)
        extras = {"blocks.0.att.time_state": np.zeros((2, 16, 16), np.float32)}
        write(tmp_path / "tuned.pth", model, half, extras=extras)


def test_wrong_arguments(model, params, tmp_path):
    path = tmp_path / "a.pth"
    with_leaf = lambda leaf: {**params, "head": {"kernel": leaf}}
    shape = params["head"]["kernel"].shape
    for args, error, message in (
        ((None, model, params), TypeError, "path must be a str or an os.PathLike of str, got NoneType"),
        ((b"a.pth", model, params), TypeError, "path must be a str or an os.PathLike of str, got bytes"),
        ((path, None, params), TypeError, "model must be an .* or RWKV7ForCausalLM, got NoneType"),
        ((path, nn.Dense(3), params), TypeError, "model must be an .*, got Dense"),
        ((path, params, model), TypeError, "model must be an .*, got dict"),
        ((path, model, None), TypeError, "params must be a dict of the model's parameters, got NoneType"),
        ((path, model, [params]), TypeError, "params must be a dict of the model's parameters, got list"),
        ((path, model, {**params, 1: {2: 3}}), ValueError, "params hold 1/2, which the model has not"),
        ((path, model, with_leaf("x")), TypeError, "params: head/kernel must be an array, got str"),
        ((path, model, with_leaf(None)), TypeError, "params: head/kernel must be an array, got NoneType"),
        ((path, model, with_leaf(np.full(shape, None))), TypeError, "must be an array of .*, got object"),
        ((path, model, small.shapes(model, jnp.zeros((1, 1), jnp.int32))), TypeError, "got ShapeDtypeStruct"),
    ):
        for target in (args[0], tmp_path / "b" if args[0] == path else args[0]):
            with pytest.raises(error, match=message):
                save_checkpoint(target, *args[1:])
    for extras, error, message in (
        ([1], TypeError, "extras must be a dict of arrays or None, got list"),
        ({1: 2}, ValueError, "extras: '1' is no tensor"),
        ({"blocks.0.att.v0": "x"}, TypeError, "extras: blocks.0.att.v0 must be an array, got str"),
        ({"blocks.0.att.v0": np.arange(3)}, TypeError, "blocks.0.att.v0 must be an array of .*, got int64"),
    ):
        with pytest.raises(error, match=message):
            write(path, model, params, extras=extras)
    with pytest.raises(TypeError, match="tensors must be a dict of arrays, got list"):
        write_pth(path, [np.ones(3)])
    with pytest.raises(ValueError, match=r"tensors must have names of Unicode characters, got '\\ud800'"):
        write_pth(path, {"\ud800": np.ones(3, np.float32)})
    for load in (load_checkpoint, read_pth):
        with pytest.raises(TypeError, match=r"path must be a str or an os\.PathLike of str, got int"):
            load(3)
    assert not os.listdir(tmp_path)
