"""pretrain.py with a tiny model: killed, resumed, stopped, in two processes, with NaN; its refusals."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import jax
import numpy as np
import pretrain
import pretraining
import pytest
from _pretrain import setup
from _pretrain.options import Options, completed
from pretraining import (
    STEPS,
    TINY,
    arguments,
    assert_same,
    column,
    documents,
    exact,
    finish,
    metrics,
    refusal,
    saved,
    wait_for,
)

from fla_jax.checkpoints import load_checkpoint
from fla_jax.data import BinIdxWriter, open_binidx
from fla_jax.parallel import TrainStep
from fla_jax.training import count_parameters

pytestmark = pytest.mark.one_python


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return documents(tmp_path_factory.mktemp("data"))


def start(devices, *more):
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    return pretraining.start(more, {"XLA_FLAGS": flags})


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    process = start(4, *arguments(data, out, "--mesh-fsdp", 2))
    output = finish(process)
    assert process.returncode == 0, output
    return out


@pytest.mark.slow
def test_killed_and_resumed_equals_straight(data, straight, tmp_path):
    """Killed while a checkpoint is written; resumed on the same mesh, and on two devices; stopped there."""
    out, other = tmp_path / "run", tmp_path / "other"
    more = arguments(data, out, "--mesh-fsdp", 2)
    process = start(4, *more)
    wait_for(process, lambda: any(path.name.startswith("20.") for path in out.glob("checkpoints/*tmp*")))
    process.kill()
    output = finish(process)
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == -signal.SIGKILL, output
    shutil.copytree(out, other)
    process = start(4, *more, "--resume")
    output = finish(process)
    assert process.returncode == 0 and "resuming at step" in output, output
    assert_same(out, straight)
    # on two devices, which share no parameters: other orders of sums, and nothing else
    process = start(2, *arguments(data, other), "--resume")
    wait_for(process, (other / "checkpoints" / "30").exists)
    process.terminate()
    output = finish(process)
    at = len(metrics(other))
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(column(other, name), column(straight, name)[:at], rtol=2e-4)
    assert saved(other, at)[1] == {"next_index": at}
    if at < STEPS:
        assert process.returncode == 128 + signal.SIGTERM, output
        assert f"stopped at step {at} of {STEPS}, checkpoint saved. Resume with: python " in output


@pytest.mark.slow
def test_carried_states(data, tmp_path):
    """Killed between checkpoints and resumed, to the last bit; held-out documents are read whole."""
    out, other = tmp_path / "straight", tmp_path / "killed"
    more = ("--carry-state", "--eval-rows", 400)
    pretrain.main(arguments(data, out, *more))
    process = start(1, *arguments(data, other, *more))
    wait_for(process, (other / "checkpoints" / "20").exists)
    process.kill()
    finish(process)
    if not (other / "checkpoints" / str(STEPS)).exists():
        pretrain.main(arguments(data, other, *more, "--resume"))
    assert_same(out, other)
    state, place = saved(out)
    assert len(place["document"]) == 8 and any(place["offset"])
    found = [document.tolist() for document in open_binidx(data)]
    chosen = [found[block * 50 + i] for block in range(8) for i in range(45, 50)]  # a tenth of each eighth
    wanted = mean_loss(data, state["params"], [[0, *document] for document in chosen])
    assert column(out, "evaluation_loss")[-1] == pytest.approx(wanted, rel=1e-5)
    assert "--carry-state was True" in refusal(
        pretrain.main, *arguments(data, out, "--resume", steps=STEPS + 1)
    )


@pytest.mark.slow
def test_two_processes(data, straight, tmp_path):
    """A mesh over two processes, two devices each, gives what one process with four gives."""
    out = tmp_path / "run"
    processes = start_two(*arguments(data, out, "--mesh-fsdp", 2))
    wait_for(processes[0], (out / "checkpoints" / "10").exists)
    processes[1].terminate()  # it alone is told to stop
    outputs = [finish(process) for process in processes]
    assert (out / "metrics.csv").exists(), outputs
    at = len(metrics(out))
    np.testing.assert_allclose(column(out, "loss"), column(straight, "loss")[:at], rtol=2e-4)
    assert saved(out, at)[1] == {"next_index": at}
    if at < STEPS:
        assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, outputs
        assert f"stopped at step {at} " in outputs[0] and "stopped" not in outputs[1]


def start_two(*more):
    """Two processes of one run, two devices each."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    more = *more, "--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"
    return [start(2, *more, str(i)) for i in range(2)]


@pytest.mark.slow
def test_an_error_of_one_process_ends_both(data, tmp_path, monkeypatch):
    """Python's exit would wait for the other process, for minutes."""
    (tmp_path / "tensorboardX.py").write_text("raise ImportError('broken')")  # the first process imports it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    processes = start_two(*arguments(data, tmp_path / "run"))
    outputs = [finish(process, 100) for process in processes]
    assert "pretrain.py: MetricWriter needs tensorboardX" in outputs[0], outputs
    assert "tensorboardX" not in outputs[1] and all(process.returncode for process in processes), outputs


@pytest.mark.slow
def test_carried_states_in_two_processes(data, tmp_path):
    """Each makes its rows. Killed and resumed to the last bit, by two processes; the losses are those of one,
    which continues from the same place.
    """
    more = ("--carry-state", "--eval-rows", 400)
    outs = one, two, killed, resumed = [tmp_path / name for name in ("one", "two", "killed", "resumed")]
    process = start(4, *arguments(data, one, *more))
    assert "checkpoint " in (output := finish(process)), output
    for out in (two, killed):
        processes = start_two(*arguments(data, out, *more))
        if out == killed:
            wait_for(processes[0], (out / "checkpoints" / "20").exists)
            for process in processes:
                process.kill()
        outputs = [finish(process) for process in processes]
        assert out == killed or "checkpoint " in outputs[0], outputs
    if (killed / "checkpoints" / str(STEPS)).exists():
        pytest.skip("the run was over before the signal came")
    shutil.copytree(killed, resumed)
    outputs = [finish(process) for process in start_two(*arguments(data, killed, *more, "--resume"))]
    assert "resuming at step" in outputs[0], outputs
    assert_same(killed, two)
    process = start(4, *arguments(data, resumed, *more, "--resume"))
    assert "resuming at step" in (output := finish(process)), output
    places = [saved(out)[1] for out in outs]
    assert len(places[0]["document"]) == 8 and any(places[0]["offset"]) and places == [places[0]] * 4
    for out in (two, resumed):
        for name in ("loss", "evaluation_loss"):
            np.testing.assert_allclose(column(out, name), column(one, name), rtol=2e-4)


def held_out_loss(data, params):
    """Nats per token over the held-out rows, each document read alone after the end token before it."""
    documents = [document.tolist() for document in open_binidx(data)]
    tokens = [token for document in documents for token in document]
    owners = [i for i, document in enumerate(documents) for _ in document]
    rows = (len(tokens) - 1) // 32
    size, held = rows // 8, round(rows * 0.1) // 8  # the last ones of eight blocks
    numbers = [block * size + i for block in range(8) for i in range(size - held, size)]
    numbers = [numbers[i * len(numbers) // 12] for i in range(12)]
    parts = []
    for row in numbers:
        for owner in sorted(set(owners[row * 32 : row * 32 + 33])):
            at = [t for t in range(row * 32, row * 32 + 33) if owners[t] == owner]
            begins = at[0] > row * 32 and tokens[at[0] - 1] == 0
            parts.append([0] * begins + [tokens[t] for t in at])
    return mean_loss(data, params, parts)


def mean_loss(data, params, parts):
    """Nats per token, but for the first of each part."""
    options = completed(Options(data=data, hidden_size=32, num_layers=2, head_dim=16, remat="none"))
    longest = max(map(len, parts))
    padded = np.array([part + [0] * (longest - len(part)) for part in parts])
    model = setup.build_model(options, setup.mesh_of(options))
    logits = np.asarray(model.apply({"params": params}, padded[:, :-1])[0], np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = [-logs[i, t, part[t + 1]] for i, part in enumerate(parts) for t in range(len(part) - 1)]
    return np.mean(losses)


@pytest.mark.slow
def test_microbatches_profile_export_and_tensorboard(data, straight, tmp_path, capsys):
    """Microbatches have the loss and gradient of the whole; the files that a run leaves."""
    out, path = tmp_path / "parts", tmp_path / "model.pth"
    more = ("--accumulate", 4, "--profile", 2, "--export", path, "--peak-tflops", 0.001)
    pretrain.main(arguments(data, out, *more))
    for name in ("loss", "gradient_norm", "evaluation_loss"):
        np.testing.assert_allclose(column(out, name), column(straight, name), rtol=2e-4)
    assert list((out / "trace").rglob("*.xplane.pb"))
    assert (column(out, "share_of_6n") > 0).all() and (column(out, "memory_gb") > 0).all()
    assert not column(straight, "share_of_6n").size
    assert sum(file.stat().st_size for file in (out / "tensorboard").iterdir()) > 40 * STEPS
    state, iterator = saved(out)
    assert iterator == {"next_index": STEPS}
    _, params = load_checkpoint(path)
    np.testing.assert_array_equal(params["head"]["kernel"], state["params"]["head"]["kernel"])
    wanted = held_out_loss(data, state["params"])
    assert column(out, "evaluation_loss")[-1] == pytest.approx(wanted, rel=1e-5)
    printed = capsys.readouterr().out
    for what in ("parameters", "held out", "tokens/s", "epochs", f"checkpoints/{STEPS}", "6N", "model.pth"):
        assert what in printed


@pytest.mark.slow
def test_nan_stops_and_names_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    def poisoned(self, state, batch, call=TrainStep.__call__):
        mask = batch["mask"] * (np.nan if int(state.step) == 23 else 1)
        return call(self, state, batch | {"mask": mask})

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", poisoned)
        line = refusal(pretrain.main, *arguments(data, out))
    assert "the gradient_norm is nan and the loss is nan at step 24; " in line
    assert f"the last good checkpoint is {out}/checkpoints/20, and --resume continues from it" in line
    assert [row["loss"] for row in metrics(out)][-2:] == [metrics(out)[-2]["loss"], "nan"]
    saved(out, 20)


@pytest.mark.slow
def test_another_run(data, straight, tmp_path, capsys):
    """What may change between a run and its resumption, and what may not."""
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    resumed = arguments(data, out, "--resume", steps=STEPS + 10)
    line = refusal(pretrain.main, *resumed, "--batch", 4)
    assert f"--resume: --batch was 8 in {out} and is 4 now" in line
    line = refusal(pretrain.main, *arguments(data, out, "--resume"))
    assert f"the run in {out} is at step {STEPS}, and --steps {STEPS}; with --export its parameters" in line
    path = tmp_path / "model"
    pretrain.main(arguments(data, out, "--resume", "--export", path))
    state, _ = saved(out)
    np.testing.assert_array_equal(
        load_checkpoint(path)[1]["head"]["kernel"], state["params"]["head"]["kernel"]
    )
    pretrain.main([*resumed, "--learning-rate", "1e-3"])
    printed = capsys.readouterr().out
    assert "--learning-rate was 0.003 before and is 0.001 from now on" in printed
    assert f"--steps was {STEPS} before and is {STEPS + 10} from now on" in printed
    assert (
        len(metrics(out)) == STEPS + 10
        and json.loads((out / "options.json").read_text())["steps"] == STEPS + 10
    )


@pytest.mark.slow
def test_on_text(tmp_path, monkeypatch, capsys):
    """Tokens are made once; they do not change when the cache is gone."""
    monkeypatch.chdir(tmp_path)
    Path("texts/more").mkdir(parents=True)
    Path("texts/a.txt").write_text("Every word of it is read.\n" * 200)
    Path("texts/more/b.jsonl").write_text(json.dumps({"text": "And this as well. " * 200}) + "\n")
    Path("texts/binary").write_bytes(bytes(100))
    more = [*arguments("texts", "run"), "--cache", "cache", "--eval-data", "texts/a.txt"]
    pretrain.main(more)
    assert "making tokens" in capsys.readouterr().out
    kept = sorted(path.name for path in Path("cache").glob("*.bin"))
    assert len(kept) == 2
    sizes = sorted(Path("cache", name).stat().st_size for name in kept)
    assert sizes == [2 * (26 * 200 + 1), 2 * (26 * 200 + 1) + 2 * (18 * 200 + 1)]
    pretrain.main(more)
    assert "making tokens" not in capsys.readouterr().out and exact(Path("run")) == exact(Path("run-1"))


@pytest.mark.slow
def test_dry_run(tmp_path, monkeypatch, capsys):
    """The compiler's account of the state: three numbers a parameter, and the batch."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        pretrain.main([*TINY, "--model", "rwkv6", "--dry-run", "--memory-gb", "1"])
    assert error.value.code == 0
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        pretrain.main([*TINY, "--model", "rwkv6", "--dry-run", "--memory-gb", "0.001"])
    assert error.value.code == 1 and "fits              no, of 0.00 GB" in capsys.readouterr().out
    assert "layers            in a loop, as cpu runs them; remat=False" in printed
    assert "fits              yes, of 1.00 GB" in printed and not list(tmp_path.iterdir())
    sizes = dict(hidden_size=32, num_layers=2, head_dim=16)
    options = completed(Options(model="rwkv6", **sizes, remat="none"))
    model = setup.build_model(options, setup.mesh_of(options))
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    total, counted = count_parameters(shapes)
    assert total - counted == 256 * 32 and f"parameters        {total:,}, {counted:,} without" in printed


def test_accounts_of_the_official_sizes():
    """Parameters by the formulas of the official layout."""
    for name, wanted in {
        "0.1B": 0.191e9,
        "0.4B": 0.451e9,
        "1.5B": 1.527e9,
        "2.9B": 2.948e9,
        "7B": 7.2e9,
    }.items():
        options = completed(Options(size=name, remat="dense"))
        model = setup.build_model(options, None)
        shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
        assert count_parameters(shapes)[0] == pytest.approx(wanted, rel=0.01), name


def test_learning_rates_are_the_official_ones():
    """Of RWKV-LM's train.py by layers and width, and no larger ones for larger models."""
    sizes = [completed(Options(size=name)) for name in ("0.1B", "0.4B", "1.5B", "2.9B", "7B")]
    rates = {(x.num_layers, x.hidden_size): x.learning_rate for x in sizes}
    assert [*rates.items()][:3] == [((12, 768), 6e-4), ((24, 1024), 4e-4), ((24, 2048), 3e-4)]
    assert sorted(rates.values(), reverse=True) == [*rates.values()]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--data", "nowhere.bin"], "--data: nowhere.bin: No such file"),
        (["--data", "nowhere"], "--data: there is no nowhere"),
        (["--data", "cut.bin"], "--data: cut.bin ends at offset 100: cut.idx tells of 202 tokens"),
        (["--data", "foreign.idx"], "--data: foreign.idx is no binidx index: it must begin with"),
        (["--data", "empty"], "--data: empty contains no text"),
        (["--data", "wrong.jsonl"], "--data: wrong.jsonl: the line at offset 14 is not JSON"),
        (["--data", "small.bin", "--sequence", "202"], "small.bin has 202 tokens, and --sequence 202"),
        (["--data", "small.bin", "--held-out", "0.99"], "--held-out 0.99 leaves nothing of the 6 rows"),
        (["--data", "small.bin", "--vocab-size", "100"], "small.bin: tokens must be below the vocab"),
        (["--data", "small.bin"], "--data has 5 rows, 0 steps of --batch 8: give --steps, above"),
        (["--data", "small.bin", "--out", "file"], "--out: file is a file"),
        (["--data", "small.bin", "--resume"], "--resume: there is no run in run; begin one first"),
        (["--resume", "--out", "begun"], "--resume: there is no checkpoint in begun yet"),
        (["--batch", "0"], "--batch must be a finite number above 0, got 0"),
        (["--accumulate", "3"], "--accumulate must divide --batch 8, got 3"),
        (["--steps", "10"], "--steps must be above --warmup-steps 10, got 10"),
        (["--seed", str(2**32)], "--seed must be below 2**32"),
        (["--held-out", "1"], "--held-out must be below 1"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number above 0, got nan"),
        (["--head-dim", "7"], "--hidden-size 32, --head-dim 7: "),
        (["--mesh-fsdp", "3"], "--mesh-...: "),
        (["--coordinator", "localhost:1"], "--coordinator, --num-processes and --process-id must be given"),
        (["--export", "x.safetensors"], "--export must name a folder or a .pth file, got x.safet"),
        (["--export", "nowhere/x.pth"], "--export: there is no folder nowhere"),
        (["--vocab-size", "300"], "--data: name must be given: a vocabulary of 300 tokens"),
    ],
)
def test_refusals(tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    with BinIdxWriter("small") as writer:
        writer.add([*range(1, 202), 0])
    for name in ("cut", "foreign"):
        for ending in (".bin", ".idx"):
            shutil.copy(f"small{ending}", f"{name}{ending}")
    Path("cut.bin").write_bytes(Path("cut.bin").read_bytes()[:100])
    Path("foreign.idx").write_bytes(b"TNTIDX\0\0" + bytes(100))
    Path("wrong.jsonl").write_text('{"text": "a"}\n{\n')
    Path("empty").mkdir()
    Path("file").write_text("")
    Path("begun").mkdir()
    Path("begun/options.json").write_text("{}")
    out = [] if "--out" in more else ["--out", "run"]
    assert message in refusal(pretrain.main, *TINY, "--cache", "cache", *out, *more)
    assert not Path("run").exists() and not Path("begun/checkpoints").exists()
