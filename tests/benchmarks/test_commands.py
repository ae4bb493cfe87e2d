"""Every benchmark with tiny sizes on a CPU: complete, right records, and those of other benchmarks stay."""

import json
import re

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

OTHER = {"op": "another benchmark", "ms": 1.0}
COMMON = "op implementation ms versions commit device run "
OPS = "form library shape dtype pass decay roofline_ms peak_gb errors peer peer_ms ratio first_call_s note"
LAYERS = "form library shape dtype pass gbs of_copy copy_gbs copy ratio"
DECODE = "library version model batch ms_per_token tokens_per_s floor_ms kernels copies first_token_s vocab"


@pytest.fixture
def measured(command, tmp_path):
    """The new records of a command, and what it printed."""

    def run(*arguments, before=(OTHER,)):
        path = tmp_path / "cpu.json"
        path.write_text(json.dumps(before))
        text = command(*arguments, "--out", path)
        first, *found = json.loads(path.read_text())
        assert first == OTHER and str(path) in text
        return found, text

    return run


def is_complete(record, names):
    return record.keys() >= set((COMMON + names).split()) and record["ms"] > 0


def test_ops(measured):
    old = {"op": "chunk_rwkv7", "implementation": "xla", "commit": "another", "ms": 1.0}
    wanted = "rwkv7 chunk .* bounded (float32 )?ours|rwkv6 decode .*(reference|copy)"
    found, text = measured("ops.py", "--quick", "--no-peers", "--only", wanted, before=(OTHER, old))
    assert old not in found and all(is_complete(r, OPS) for r in found), text
    chunked = {(r["pass"], r["dtype"]) for r in found if r["op"] == "chunk_rwkv7"}
    assert chunked == {(p, dtype) for p in ("fwd", "fwd+bwd") for dtype in ("bfloat16", "float32")}
    tasks = {(r["op"], r["form"]) for r in found}
    assert tasks == {("chunk_rwkv7", "chunk"), ("fused_recurrent_rwkv6", "decode")}
    for r in (r for r in found if r["library"] == "fla_jax"):
        error, gradient = (1e-6, 1e-5) if r["dtype"] == "float32" else (4e-3, 1e-2)
        assert 0 < r["errors"]["o"] < error, r
        assert 0 < r["errors"]["worst_gradient"] < gradient and r["errors"]["dw"] < gradient, r
        assert r["shape"][3:] == [64, 64] and (r["form"] != "decode" or r["ratio_to_copy"] > 0)


def test_missing_peers_are_printed(command, module, tmp_path):
    (tmp_path / "cpu.json").write_text("[]")
    names = ("fla", "wind_rwkv", "jla", "rwkv_ops")
    missing = [name for name in names if not module("runner").is_importable(name)]
    text = command("ops.py", "--quick", "--out", tmp_path / "cpu.json", "--only", "(wind|FLA|jla|rwkv-ops)")
    assert all(f"package {name} is not installed" in text for name in missing)


def test_layers(measured, module):
    found, text = measured("layers.py", "--quick", "--only", "rwkv7 feed|scanned|rwkv6_readout|head")
    forms = ("rwkv7 feed-forward", "rwkv7 attention, layers scanned", "rwkv6 attention")
    passes = {(form, p) for form in forms for p in ("fwd", "bwd")}
    passes |= {("head and loss, 32000 tokens", p) for p in ("fwd", "fwd+bwd")}
    assert {(r["form"], r["pass"]) for r in found} == passes
    assert all(is_complete(r, LAYERS) and r["of_copy"] > 0 for r in found)
    assert all(("tflops" in r) == r["form"].startswith("head") for r in found)
    installed = module("runner").is_importable("fla")
    reason = "RuntimeError: torch sees no CUDA device" if installed else "package fla is not installed"
    assert re.search(f"skipped: norm_shift_mix rwkv7 feed-forward.* FLA: {reason}", text), text


def test_train_step(measured, module, tmp_path):
    """Failures are recorded too, such as an interpreter that does not exist."""
    old = {"op": "train_step", "implementation": "fla", "shape": {}, "ms": 2.0}
    arguments = ("--quick", "--implementation", "reference", "--sides", "fla_jax")
    found, _ = measured("train_step.py", *arguments, before=(OTHER, old))
    path = str(tmp_path / "cpu.json")
    module("train_step").main(["--quick", "--sides", "fla", "--fla-python", "no/python", "--out", path])
    fla = json.loads((tmp_path / "cpu.json").read_text())[-1]
    assert fla["implementation"] == "fla" and "FileNotFoundError" in fla["error"]
    smaller, ours, dense = found
    assert smaller == old and (ours["remat"], dense["remat"]) == ("none", "dense")
    assert is_complete(ours, "scan tokens_per_s") and is_complete(dense, "scan tokens_per_s")
    assert ours["implementation"] == "fla_jax" and ours["shape"]["vocab"] == 300 and ours["scan"] is False
    assert ours["tokens_per_s"] == pytest.approx(16 / ours["ms"] * 1e3)
    assert ours["first_step_s"] > ours["compile_s"] > 0 and ours["peak_gb"] > 0
    assert ours["loss_last"] < ours["loss_first"] and abs(ours["loss_first"] - np.log(300)) < 1
    rate = 6 * (ours["parameters"] - 300 * 64) * ours["tokens_per_s"]
    assert ours["share_6n"] == pytest.approx(rate / 989e12)


@pytest.mark.slow
def test_train_step_in_fp8(measured):
    arguments = ("--quick", "--implementation", "xla", "--sides", "fla_jax", "--fp8", "--remat", "none")
    found, _ = measured("train_step.py", *arguments)
    assert [r["precision"] for r in found] == ["fp8"] and found[0]["loss_last"] < found[0]["loss_first"]


def test_decode(measured):
    arguments = ("--versions", 7, "--engine", "--peers", "fla", "--batches", 1, 5)
    found, text = measured("decode.py", "--quick", *arguments)
    decode = [r for r in found if r["op"] == "decode"]
    names = {(r["implementation"], r["batch"]) for r in decode}
    assert names == {(name, batch) for name in ("plain", "model") for batch in (1, 5)}
    assert all(is_complete(r, DECODE + " weights state") and r["kernels"] > 10 for r in decode)
    assert {r["implementation"] for r in found if r["op"] == "prefill"} == {"generate", "apply"}
    assert [r["batch"] for r in found if r["op"] == "engine"] == [1, 5]
    skipped = [line for line in text.splitlines() if line.startswith("skipped")]
    reasons = ("torch sees no CUDA device", "ModuleNotFoundError")
    assert len(skipped) == 2 and all(any(reason in line for reason in reasons) for line in skipped), skipped


def test_serve(measured, module):
    """Every request is answered, with all of its tokens."""
    found, text = measured("serve.py", "--quick", "--features")
    each = {r["op"]: r for r in found}
    assert each.keys() == {"generator", "update_params", "features", "serve"}, text
    assert all(is_complete(r, "library version model batch vocab what weights state") for r in found)
    serve = module("serve")
    options = serve.parse(["--quick"])
    wanted = sum(new for _, new in serve.load_of(options).requests())
    for name in ("generator", "serve"):
        r = each[name]
        assert r["requests"] == 12 and r["tokens_per_s"] * r["took_s"] == pytest.approx(wanted)
        assert 0 < r["first_token_s"] <= r["first_token_95_s"] < r["took_s"]
    assert each["serve"]["failed"] == each["update_params"]["compiled"] == 0
    assert each["serve"]["cpu_us_per_token"] > 0 and each["features"]["ms_default"] > 0
    assert "skipped" not in text


def test_a_part_that_fails_is_printed(command, tmp_path):
    """With its reason; the others run."""
    arguments = ("--quick", "--tokenizer", "no such file", "--out", tmp_path / "cpu.json")
    text = command("serve.py", *arguments)
    reasons = [f"skipped: {part}: FileNotFoundError: name must be" for part in ("generator", "update_params")]
    assert all(
        reason in text for reason in [*reasons, "skipped: serve: RuntimeError: the server did not start"]
    )
    assert "cpu: saved in" in text and "nothing was measured" in text


def test_decode_precision(command):
    sizes = ("--layers", 1, "--width", 64, "--steps", 2, "--tokens", 32)
    lines = command("decode_precision.py", *sizes).splitlines()
    measured = [line for line in lines if " error " in line]
    assert len(lines) == 7 and len(measured) == 6 and "error 0.00e+00" in lines[0]
    assert "must be a power of two" in lines[3]  # groups of 128 in 64 channels


def test_scaling_on_fake_devices(command, tmp_path):
    path = tmp_path / "cpu.json"
    text = command("scaling.py", "--fake", 4, "--steps", 1, "--modes", "fsdp", "sequence, op", "--out", path)
    found = json.loads(path.read_text())
    each = [(mode, devices) for mode in ("fsdp", "sequence, op") for devices in (1, 4)]
    assert [(r["mode"], r["devices"]) for r in found] == each
    fields = {"op", "ms", "peak_gb", "collectives", "shape", "commit", "device", "run"}
    assert all(r.keys() >= fields and r["ms"] > 0 for r in found), found
    assert found[3]["collectives"]["all-gather"] == 2  # (M, N), forward and backward
    assert all(r["difference"] < 1e-5 for r in found if r["devices"] == 4) and text.count("off by") == 2


def test_cpu(command, module, monkeypatch, tmp_path):
    path = tmp_path / "cpu.json"
    assert "compiles in" in command("cpu.py", "--quick", "--out", path)
    found = json.loads(path.read_text())
    assert len(found) == 5 and all(is_complete(r, "form shape") for r in found)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which it sets
    cpu = module("cpu")
    for exceeded, status in ((["too slow"], 1), ([], 0)):
        monkeypatch.setattr(cpu, "measure", lambda size, exceeded=exceeded: ([], exceeded))
        assert cpu.main(["--check"]) == status and cpu.main([]) == 0
