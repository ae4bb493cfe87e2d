"""The examples, with tiny sizes: they run, resume exactly, survive interruption, and refuse wrong options by
name.
"""

import contextlib
import csv
import errno
import importlib.util
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import _run
import _text
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "--hidden-size",
    "16",
    "--head-dim",
    "8",
    "--num-layers",
    "1",
    "--sequence",
    "16",
    "--batch",
    "2",
    "--steps",
    "60",
    "--checkpoint-every",
    "15",
]
TINY += ["--sample-bytes", "0"]


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_lm():
    return load("train_lm")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}, and its double is {2 * i}.\n" for i in range(600)))
    return path


def run(train_lm, *arguments):
    train_lm.main([str(argument) for argument in arguments])


def saved(out, step=60):
    with ocp.CheckpointManager((out / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == step
        return manager.restore(step, args=ocp.args.StandardRestore())


@pytest.fixture(scope="module")
def straight(train_lm, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    run(train_lm, "--data", text, "--out", out, *TINY, "--sample-bytes", "20")
    return out


def losses(out):
    with open(out / "log.csv", newline="") as file:
        return list(csv.reader(file))


def stop_and_resume(train_lm, text, out, signal_number):
    """Starts a run, sends the signal in its second interval, resumes; returns the exit status and the step it
    was resumed from.
    """
    arguments = [str(a) for a in ("--data", text, "--out", out, *TINY)]
    program = subprocess.Popen(
        [sys.executable, EXAMPLES / "train_lm.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.time() + 120
        while not (out / "checkpoints" / "15").exists() and program.poll() is None and time.time() < deadline:
            time.sleep(0.002)
        program.send_signal(signal_number)
        output, _ = program.communicate(timeout=120)
    finally:
        program.kill()
    with ocp.CheckpointManager((out / "checkpoints").absolute()) as manager:
        at = manager.latest_step()
    run(train_lm, *arguments, "--resume")
    return program.returncode, at, output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_and_resumed_equals_straight(train_lm, straight, text, tmp_path, number):
    out = tmp_path / "run"
    code, at, output = stop_and_resume(train_lm, text, out, number)
    if at == 60:
        pytest.skip("the run was over before the signal came")
    assert at >= 15, output
    if number == signal.SIGINT:
        assert code == 128 + signal.SIGINT and "--resume" in output, output
    else:
        assert code == -signal.SIGKILL
    jax.tree.map(np.testing.assert_array_equal, saved(out), saved(straight))
    if at % 10 == 0 or at % 15 == 0:  # otherwise the log's rows fall on other steps
        assert losses(out) == losses(straight)


@contextlib.contextmanager
def no_file_above(size):
    """Writing more than ``size`` bytes to a file fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def loud():
    """After a failed write the program is silent, as it is at its end; other modules, moments later, are
    not.
    """
    hook, levels = sys.unraisablehook, {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    yield
    sys.unraisablehook = hook
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def refusal(main, *arguments):
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(error.value)
    return str(error.value)


# Writes that are still under way when the program ends go on in a process that lives, and would meet the next
# run there
NO_DISK = """
import resource, sys
import _run, train_lm

def no_disk(*args, save=_run.save):
    if args[2][-1][0] == 45:  # writing more to a file fails, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    save(*args)

_run.save = no_disk
train_lm.main(sys.argv[1:])
"""


def test_without_memory_and_disk(train_lm, straight, text, tmp_path, monkeypatch):
    """One line each, no tracebacks of Orbax; the last good checkpoint is kept and leads to the same end."""
    out = tmp_path / "run"
    arguments = [str(a) for a in ("--data", text, "--out", out, *TINY)]
    batch_at = train_lm.batch_at

    def no_memory(text, step, options):
        return np.empty(2**50, np.uint8) if step == 20 else batch_at(text, step, options)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, "batch_at", no_memory)
        line = refusal(train_lm.main, *arguments)
    assert line.startswith("train_lm.py: out of memory (Unable to allocate 1.00 PiB")
    assert line.endswith("lower --batch, --sequence, --hidden-size or --num-layers")
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", NO_DISK, *arguments, "--resume"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    full = os.strerror(errno.EFBIG)
    kept = "that of step 30 is kept, and --resume goes on from there"
    assert done.stderr == f"train_lm.py: {out}/checkpoints/45 cannot be written: {full}; {kept}\n"
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no lock is left
    run(train_lm, *arguments, "--resume")
    jax.tree.map(np.testing.assert_array_equal, saved(out), saved(straight))
    curve = (out / "loss.png").read_bytes()
    with no_file_above(2000), pytest.raises(ValueError, match=f"loss.png cannot be written: {full}$"):
        _run.plot_log(out, _run.read_log(out, 60), 10, "title")
    assert (out / "loss.png").read_bytes() == curve and not list(out.glob("*.new*"))


def test_broken_files_are_named(straight, tmp_path, monkeypatch, loud, capfd):
    monkeypatch.chdir(tmp_path)
    out, generate = shutil.copytree(straight, "run"), load("generate")
    # saved on one device, read on another: not broken
    sharding = Path(out, "checkpoints/60/default/_sharding")
    assert "cpu:0" in sharding.read_text()
    sharding.write_text(sharding.read_text().replace("cpu:0", "cuda:0"))
    params = generate.load_model(Path(out))[1]
    jax.tree.map(np.testing.assert_array_equal, params, saved(straight)["params"])
    Path(out, "checkpoints/60/default/manifest.ocdbt").write_text("broken")
    line = refusal(generate.main, "--checkpoint", out, "--prompt", "a")
    assert line.startswith("generate.py: run/checkpoints/60 cannot be read: ")
    assert line.endswith("; delete it to use the one before, if there is one")
    with pytest.raises(ValueError, match=r"run/log\.csv has no row for step 70"):
        _run.read_log(Path(out), 70)
    Path(out, "log.csv").write_text("step\n20\n")
    with pytest.raises(ValueError, match=r"run/log\.csv cannot be read: "):
        _run.read_log(Path(out), 20)
    assert "Traceback" not in capfd.readouterr().err


def test_results(straight):
    header, *rows = losses(straight)
    assert header == ["step", "train_loss", "validation_loss"]
    assert [int(float(row[0])) for row in rows] == [10, 15, 20, 30, 40, 45, 50, 60]
    held_out = [float(row[2]) for row in rows if row[2] != "nan"]
    assert len(held_out) == 4 and held_out[-1] < held_out[0] < 5.6
    assert (straight / "loss.png").stat().st_size > 10_000


def test_another_seed_is_another_run_and_the_first_one_is_kept(train_lm, straight, text, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "run")
    run(
        train_lm,
        "--data",
        text,
        "--out",
        tmp_path / "run",
        *TINY,
        "--seed",
        "1",
        "--steps",
        "20",
        "--sample-bytes",
        "5",
        "--prompt",
        "[b]12",
    )
    assert (tmp_path / "run-1" / "checkpoints" / "60").exists()
    assert losses(tmp_path / "run")[1] != losses(straight)[1]
    printed = capsys.readouterr().out
    for what in (
        "moved the earlier run",
        "parameters",
        "held out",
        "sample",
        "[b]12",
        "validation loss",
        "tokens/s",
        "loss.png",
        "checkpoints/20",
    ):
        assert what in printed


def test_rwkv6_on_a_directory_in_bf16(train_lm, text, tmp_path, capsys):
    texts = tmp_path / "texts"
    (texts / "deeper").mkdir(parents=True)
    (texts / "a.txt").write_bytes(text.read_bytes())
    (texts / "deeper" / "b.md").write_bytes(text.read_bytes()[:5000])
    (texts / "binary").write_bytes(bytes(100))
    (texts / ".hidden").write_bytes(b"hidden")
    assert train_lm.read_text(texts) == text.read_bytes() + b"\n\n" + text.read_bytes()[:5000]
    run(
        train_lm,
        "--model",
        "rwkv6",
        "--data",
        texts,
        "--out",
        tmp_path / "run",
        "--precision",
        "bf16",
        *TINY,
        "--steps",
        "20",
    )
    assert "rwkv6" in capsys.readouterr().out


def test_split_and_batches(train_lm):
    text = bytes(np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8))
    options = train_lm.Options()
    train, held = train_lm.split(text, options)
    assert train.size + held.size == len(text) and held.shape == (8, 250)
    for block in held:
        assert block.tobytes() in text and block.tobytes()[:32] not in train.tobytes()
    batch = train_lm.batch_at(train, 3, options)
    assert batch.shape == (8, 129) and all(row.tobytes() in train.tobytes() for row in batch)
    np.testing.assert_array_equal(batch, train_lm.batch_at(train, 3, options))
    assert (batch != train_lm.batch_at(train, 4, options)).any()


def test_default_text_holds_no_paragraph_twice():
    text = _text.python_reference().decode()
    assert len(text) > 300_000
    paragraphs = [p for p in text.split("\n\n") if len(p) > 80]
    assert len(set(paragraphs)) > 0.99 * len(paragraphs)


def test_validation_carries_the_state(train_lm, straight):
    """Windows of any length give the loss of the whole."""
    model = train_lm.RWKV7ForCausalLM(train_lm.RWKV7Config(256, 16, 1, 8))
    blocks = np.random.default_rng(0).integers(32, 127, (2, 70)).astype(np.uint8)
    params = saved(straight)["params"]
    whole = train_lm.validate(model, params, blocks, 69)
    assert train_lm.validate(model, params, blocks, 16) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "nowhere"], "--data: there is no nowhere"),
        (["--data", "empty"], "--data: empty holds no text"),
        (["--data", "short"], "--data: 100 bytes are too few"),
        (["--resume", "--data", "text", "--out", "new"], "--resume: there is no run in new"),
        (["--resume", "--data", "text", "--out", "started"], "--resume: there is no checkpoint in started"),
        (["--resume", "--data", "text", "--hidden-size", "32"], "--resume: --hidden-size was 16"),
        (["--resume", "--data", "other"], "--resume: the text (--data)"),
        (["--resume", "--data", "text", "--model", "rwkv6"], "--resume: --model was rwkv7"),
        (["--data", "text", "--head-dim", "7"], "head_dim"),
        (["--data", "text", "--batch", "0"], "--batch must be at least 1"),
        (["--data", "text", "--learning-rate", "-1"], "--learning-rate must be"),
        (["--data", "text", "--validation-share", "1"], "--validation-share between 0 and 1"),
    ],
)
def test_errors_name_the_option(train_lm, straight, text, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "text": text.read_bytes(),
        "other": text.read_bytes()[1:],
        "short": b"x" * 100,
    }.items():
        Path(name).write_bytes(content)
    Path("empty").mkdir()
    Path("started").mkdir()
    os.symlink(straight, "run")
    Path("started/options.json").write_bytes((straight / "options.json").read_bytes())
    out = [] if "--out" in arguments else ["--out", "run"]
    with pytest.raises(SystemExit) as error:
        train_lm.main([*TINY, *out, *arguments])
    assert message in str(error.value)
    assert os.path.islink("run")  # a refused run moves nothing aside


def test_state_tracking(tmp_path, capsys):
    module = load("state_tracking")
    arguments = [
        "--steps",
        "50",
        "--length",
        "8",
        "--batch",
        "4",
        "--rate-scales",
        "2.0",
        "--out",
        str(tmp_path),
    ]
    module.main(arguments)
    assert "rate scale 2" in capsys.readouterr().out and (tmp_path / "parity.png").stat().st_size > 10_000
    for wrong, message in {
        "--steps=0": "--steps",
        "--rate-scales=3": "rate_scale",
        "--batch=0": "--batch",
        "--head-dim=5": "head_dim",
    }.items():
        with pytest.raises(SystemExit, match=message):
            module.main([*arguments, wrong])
