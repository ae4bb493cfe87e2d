"""Throughput, metric files, and estimates of memory."""

import dataclasses
import errno
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from jax.sharding import AbstractMesh

from fla_jax.models import RWKV7Config
from fla_jax.parallel import make_mesh
from fla_jax.training import (
    MetricWriter,
    StepMetrics,
    Throughput,
    choose_remat,
    count_parameters,
    estimate_memory,
    peak_memory,
)


def test_throughput(monkeypatch):
    now = iter([0.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    throughput = Throughput(num_params=100, peak_tflops=1e-9)
    assert throughput.rate != throughput.rate
    throughput.restart()
    row = throughput.measure(50)
    assert row["tokens_per_second"] == 25 and row["memory_gb"] > 0
    assert row["share_of_6n"] == pytest.approx(6 * 100 * 25 / (1e3 * jax.device_count()))
    throughput.restart()
    throughput.measure(50)
    assert throughput.rate == 100 / 5
    assert 1e6 < peak_memory() < 1e12


@pytest.mark.parametrize(
    "name, tflops",
    {
        "NVIDIA H200": 989,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA RTX A4000": None,
        "cpu": None,
    }.items(),
)
def test_peaks_by_name(monkeypatch, name, tflops):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=name)])
    peak = Throughput(1).peak_flops
    assert peak == (None if tflops is None else tflops * 1e12 * jax.device_count())


def test_rows_after_a_kill(tmp_path):
    """A resumed run appends behind its step; later rows, and a part of one, are dropped."""
    with MetricWriter(tmp_path, ("step", "loss", "norm")) as writer:
        writer.write([{"step": 1, "loss": 0.5, "norm": 2.0}, {"step": 2, "loss": 0.25}])
        writer.write([{"step": 3, "loss": 0.125}])
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes() + b"4,0.")
    with MetricWriter(tmp_path, ("step", "loss", "norm"), last_step=2) as writer:
        writer.write([{"step": 3, "loss": 1.0}])
    assert path.read_text().split() == ["step,loss,norm", "1,0.5,2.0", "2,0.25,", "3,1.0,"]
    assert list((tmp_path / "tensorboard").glob("events*"))
    path.write_text("step,loss,norm\nx,1,1\n")
    with pytest.raises(ValueError, match=r"metrics\.csv cannot be read: "):
        MetricWriter(tmp_path, ("step", "loss", "norm"), last_step=2)
    MetricWriter(tmp_path, ("step", "loss", "norm")).close()
    assert path.read_text().split() == ["step,loss,norm"]


def test_other_columns_on_resumption(tmp_path):
    """Numbers stay under their names: new columns are empty in earlier rows, old ones in later rows."""
    path = tmp_path / "metrics.csv"
    with MetricWriter(tmp_path, ("step", "loss", "norm")) as writer:
        writer.write([{"step": 1, "loss": 0.5, "norm": 2.0}, {"step": 2, "loss": 0.25, "norm": 1.0}])
    part = b"2,0.125,1."  # of a row, with as many numbers as a whole one
    path.write_bytes(path.read_bytes() + part)
    with MetricWriter(tmp_path, ("step", "rate", "loss"), last_step=2) as writer:
        writer.write([{"step": 3, "rate": 8.0, "loss": 0.125}])
    want = ["step,rate,loss,norm", "1,,0.5,2.0", "2,,0.25,1.0", "3,8.0,0.125,"]
    assert path.read_text().split() == want
    MetricWriter(tmp_path, ("step", "norm", "loss", "rate"), last_step=2).close()
    assert path.read_text().split() == ["step,norm,loss,rate", "1,2.0,0.5,", "2,1.0,0.25,"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("step,loss\n1,1,1\n2,1\n", "line 2 must have a value for each column"),
        ("step,loss\n1\n2,1\n", "line 2 must have a value for each column"),
        ("loss,norm\n1,1\n", r"its columns must include step, got \['loss', 'norm'\]"),
    ],
)
def test_broken_metrics(tmp_path, text, message):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"metrics\.csv cannot be read: {message}"):
        MetricWriter(tmp_path, ("step", "loss"), last_step=2)
    assert (tmp_path / "metrics.csv").read_text() == text


def test_metrics_of_steps(tmp_path, monkeypatch):
    """The speed leaves out the first step, which compiles, and the time between `read` and `write_rows`."""
    now = iter([0.0, 2.0, 5.0, 6.0, 8.0, 9.0, 11.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    columns = ("step", "loss", "tokens_per_second", "evaluation_loss")
    with StepMetrics(tmp_path, columns, num_params=1) as metrics:
        with pytest.raises(ValueError, match="no step to read: call add before read"):
            metrics.read(tokens=10)
        metrics.add(1, loss=jnp.float32(4))
        assert metrics.read(tokens=10) == {"step": 1, "loss": 4.0}
        metrics.write_rows()  # at 2 s
        metrics.add(2, loss=jnp.float32(2))
        metrics.add(3, loss=0.5)
        row = metrics.read(tokens=30)  # at 5 s
        assert row["step"] == 3 and row["tokens_per_second"] == 60 / 3 == metrics.throughput.rate
        row["evaluation_loss"] = 0.25
        metrics.write_rows()
        metrics.add(4, loss=jnp.float32(1), norm=jnp.float32(np.inf))
        metrics.add(5, loss=jnp.float32(np.nan), norm=1.0)
        with pytest.raises(FloatingPointError, match="the norm is inf at step 4"):
            metrics.read(tokens=30)
        metrics.write_rows()  # the error's rows are written already; at 9 s
        for step in (5, 6):  # a second reading counts the steps behind the first
            metrics.add(step, loss=1.0)
            row = metrics.read(tokens=40)  # at 11 and 12 s
        assert row["tokens_per_second"] == 40 and metrics.throughput.rate == (60 + 60 + 40 + 40) / 8
    text = (tmp_path / "metrics.csv").read_text().split()
    assert text == [",".join(columns), "1,4.0,,", "2,2.0,,", "3,0.5,20.0,0.25", "4,1.0,,"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_counted_parameters(is_tied):
    """An embedding that is the head multiplies every token."""
    model = small.model(7, num_layers=1, tie_embeddings=is_tied)
    total, multiplied = count_parameters(small.params(model))
    assert total == sum(np.size(x) for x in jax.tree.leaves(small.params(model)))
    assert total - multiplied == (0 if is_tied else 24 * 32)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fail(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricWriter(tmp_path, ("step", "loss")) as writer, monkeypatch.context() as patch:
        patch.setattr(writer, "_csv", types.SimpleNamespace(write=fail))
        with pytest.raises(OSError, match=r"No space left on device: .*metrics\.csv"):
            writer.write([{"step": 1, "loss": 1.0}])


def test_tensorboard_needs_no_torch(tmp_path):
    """tensorboardX would import it, for seconds."""
    code = "import sys; from fla_jax.training import MetricWriter; "
    code += f"MetricWriter({str(tmp_path)!r}, ('step',)).close(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=True)


@pytest.mark.parametrize(
    "layers, width, batch, measured_gb", [(24, 1024, 8, 61.1), (24, 2048, 4, 74.9), (12, 768, 16, 42.9)]
)
def test_memory(layers, width, batch, measured_gb):
    """The estimate is above what training steps of RWKV-7 took on an H200, by a third at most."""
    mesh = make_mesh(devices=jax.devices()[:1])
    config, narrow = (RWKV7Config(32000, width, layers, dtype=dtype) for dtype in ("float32", "bfloat16"))
    sizes = dict(batch=batch, sequence=4096)
    needed = estimate_memory(narrow, mesh, **sizes)
    assert measured_gb < needed / 1e9 < 4 / 3 * measured_gb
    assert choose_remat(narrow, mesh, **sizes, memory=1.01 * needed) is False
    assert choose_remat(narrow, mesh, **sizes, memory=0.99 * needed) == "dense"
    assert choose_remat(narrow, mesh, **sizes, memory=0.99 * needed, accumulate=2) is False
    assert choose_remat(config, mesh, **sizes, memory=1.01 * needed) == "dense"
    kept = dataclasses.replace(narrow, reshard_after_forward=False)
    assert estimate_memory(kept, mesh, **sizes) == needed
    shards = AbstractMesh((1, 4, 1, 1), ("data", "fsdp", "sequence", "tensor"))
    more = estimate_memory(kept, shards, **sizes) - estimate_memory(narrow, shards, **sizes)
    assert more == 2 * 14 * layers * width**2
