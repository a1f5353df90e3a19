"""torchrun train.py, as users run it: it learns, resumes exactly, says what is wrong, and feeds the loggers."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).parents[2]
KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "skipped_steps",
    "tokens",
    "docs",
    "attended_pairs",
    "pad_fraction",
    "tps",
    "mfu",
    "step_time_s",
    "imbalance_micro_batch",
    "imbalance_cp",
    "imbalance_dp",
    "predicted_step_time_s",
    "bubble",
    "data_time_s",
    "delay_mean_steps",
    "delay_max_steps",
    "queue_docs",
    "queue_tokens",
    "queue_age_max_steps",
    "plan_ms",
    "cp_sharding",
    "data_hash",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of long-tailed text files and the flags of a small, quick job on it."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i, length in enumerate(np.minimum(rng.lognormal(4.3, 1.1, 400), 600).astype(int) + 1):
        (folder / f"{i:03}.txt").write_bytes(
            rng.choice(list(b"abcdefgh \n"), length, p=[0.3, *[0.7 / 9] * 9]).tobytes()[::8]
        )
    cache = tmp_path_factory.mktemp("cache")
    return [
        *("--job.config_file", "train_configs/debug_cpu.toml", "--training.dataset", "text", "--training.dataset_path", str(folder)),
        *("--training.dataset_cache", str(cache), "--training.seq_len", "512", "--training.steps", "10", "--metrics.enable_color=false"),
        *("--training.num_workers", "0", "--optimizer.lr", "1e-3", "--lr_scheduler.warmup_steps", "5", "--lr_scheduler.steps", "10", "--checkpoint.enable", "--checkpoint.interval", "5"),
    ]  # fmt: skip


def layout(dp=1, cp=1, pp=1, tp=1):
    degrees = {"data_parallel_shard": dp, "context_parallel": cp, "pipeline_parallel": pp, "tensor_parallel": tp}
    return [x for name, d in degrees.items() for x in (f"--parallelism.{name}_degree", str(d))]


def train(flags, processes=2, expect=0, timeout=240, script="train.py", **env):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        script,
        *flags,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
    assert (done.returncode == 0) == (expect == 0), done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def series(folder: Path, key: str) -> list:
    return [r[key] for r in lines(folder)]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Ten steps with DP=2, a checkpoint after five."""
    folder = tmp_path_factory.mktemp("straight")
    train([*corpus, *layout(dp=2), "--job.dump_folder", str(folder)])
    return folder


def test_records(straight):
    records = lines(straight)
    assert [r["step"] for r in records] == list(range(1, 11))
    for r in records:
        assert set(r) == set(KEYS)
        assert (
            r["mfu"] is None
            and r["imbalance_dp"] >= 1
            and r["imbalance_micro_batch"] >= 1
            and 0 <= r["pad_fraction"] < 0.3
        )
        assert r["cp_sharding"] == {"whole": 4} and r["imbalance_cp"] == 1.0
        assert r["tps"] == pytest.approx(r["tokens"] / r["step_time_s"] / 2, rel=1e-6)
        assert r["tokens"] > 512 and r["docs"] > 4
    # With random weights every byte is about as likely as any other: the loss is the log of the number of ids.
    assert records[0]["loss"] == pytest.approx(math.log(258), rel=0.02)
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert [r["lr"] for r in records[:5]] == pytest.approx([1e-3 * s / 5 for s in range(1, 6)])
    assert len(set(series(straight, "data_hash"))) == 10


def forked(straight: Path, folder: Path, keep: int = 5) -> Path:
    """A run folder that looks as if training had stopped after the checkpoint of step 5."""
    shutil.copytree(straight, folder)
    for path in (folder / "checkpoint").glob("step-*"):
        if int(path.name[5:]) > keep:
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_resume_is_exact_for_any_number_of_threads(corpus, straight, tmp_path, workers):
    folder = forked(straight, tmp_path / "run")
    flags = [*corpus, *layout(dp=2), "--job.dump_folder", str(folder), "--training.num_workers", str(workers)]
    if workers == 1:  # twice: stop at 7 in between
        train([*flags, "--checkpoint.interval", "7"])
        assert series(folder, "step") == list(range(1, 11))
        forked(folder, tmp_path / "again", keep=7)
        folder = tmp_path / "again"
        flags += ["--job.dump_folder", str(folder)]
    train(flags)
    for key in ("step", "data_hash", "loss", "grad_norm"):
        assert series(folder, key) == series(straight, key), key


@pytest.mark.parametrize(
    "name, degrees, processes", [("dp1", {}, 1), ("cp2", {"cp": 2}, 2), ("pp2tp2", {"pp": 2, "tp": 2}, 4)]
)
def test_resume_in_another_layout(corpus, straight, tmp_path, name, degrees, processes):
    folder = forked(straight, tmp_path / "run")
    train([*corpus, *layout(**degrees), "--job.dump_folder", str(folder)], processes)
    assert series(folder, "data_hash") == series(straight, "data_hash")
    assert series(folder, "loss") == pytest.approx(series(straight, "loss"), rel=1e-5)


def test_another_layout_trains_the_same_documents_with_the_settings_of_a_run(corpus, straight, tmp_path):
    short = [*corpus, *layout(pp=2), "--checkpoint.enable=false", "--training.steps", "6"]
    source = straight / "packing_settings.json"
    out = train([*short, "--job.dump_folder", str(tmp_path / "same"), "--packing.settings_from", str(source)])
    assert series(tmp_path / "same", "data_hash") == series(straight, "data_hash")[:6]
    assert series(tmp_path / "same", "loss") == pytest.approx(series(straight, "loss")[:6], rel=1e-5)
    assert out.count("Documents are packed for StepObjective(dp=2, bubble=0.0); this layout is StepObjective(dp=1") == 1
    assert (tmp_path / "same" / "packing_settings.json").read_text() == source.read_text()
    # A fresh one packs for its own layout, and may take more and smaller micro-batches.
    train([*short, "--job.dump_folder", str(tmp_path / "own"), "--training.micro_batch_tokens", "auto"])
    own = json.loads((tmp_path / "own" / "packing_settings.json").read_text())
    assert (
        own["objective"] == {"dp": 1, "bubble": 1.0} and own["n"] > 4 and own["n"] * own["micro_batch_tokens"] <= 2048
    )
    assert np.mean(series(tmp_path / "own", "tokens")) == pytest.approx(2048, rel=0.3)
    assert series(tmp_path / "own", "data_hash") != series(straight, "data_hash")[:6]


def test_mistakes_on_resume_and_at_start_are_named_once(corpus, straight, tmp_path):
    folder = forked(straight, tmp_path / "run")
    flags = [*corpus, *layout(dp=2), "--job.dump_folder", str(folder)]
    out = train([*flags, "--training.global_batch_size", "6", "--debug.seed", "1"], expect=1)
    assert out.count("--training.global_batch_size: the checkpoint was made with 4, configured is 6") == 1
    assert out.count("--debug.seed: the checkpoint was made with 0, configured is 1") == 1
    out = train([*flags, "--checkpoint.load_step", "8"], expect=1)
    assert out.count("--checkpoint.load_step 8: complete checkpoints in") == 1
    out = train([*corpus, "--parallelism.tensor_parallel_degree", "3"], processes=4, expect=1)
    assert out.count("The configuration cannot run:") == 1 and "allow 1, 2, 4" in out


def test_an_older_checkpoint_can_be_resumed_and_wins(corpus, straight, tmp_path):
    folder = forked(straight, tmp_path / "run", keep=10)
    flags = [*corpus, *layout(dp=2), "--job.dump_folder", str(folder), "--checkpoint.keep_latest_k", "1"]
    out = train([*flags, "--checkpoint.load_step", "5", "--training.steps", "7", "--lr_scheduler.min_lr_factor", "1"])
    assert "step-10 comes after the resumed step 5: renamed to set-aside-step-10" in out
    assert [p.name for p in (folder / "checkpoint").glob("step-*")] == ["step-7"]
    assert series(folder, "step") == list(range(1, 8))
    out = train([*flags, "--model.flavor", "debugmodel_deep"], expect=1)
    assert out.count("--model.flavor: the checkpoint was made with debugmodel, configured is debugmodel_deep") == 1


def test_an_incomplete_checkpoint_is_never_loaded(corpus, straight, tmp_path):
    folder = forked(straight, tmp_path / "run")
    shutil.copytree(folder / "checkpoint/step-5", folder / "checkpoint/step-9")
    (folder / "checkpoint/step-9/.metadata").unlink()
    out = train(
        [*corpus, *layout(dp=2), "--job.dump_folder", str(folder), "--checkpoint.async_mode", "async",
         "--activation_checkpoint.mode", "selective"]
    )  # fmt: skip
    assert "step-9 is not a complete checkpoint" in out and "Training starts at step 6" in out
    assert series(folder, "loss") == series(straight, "loss")
    assert (folder / "checkpoint/step-10/.metadata").exists()


def test_loggers_validation_profile_and_end_of_data(corpus, tmp_path):
    flags = [
        *corpus, *layout(pp=2), "--job.dump_folder", str(tmp_path), "--training.epochs", "1", "--training.steps", "100",
        "--metrics.enable_tensorboard", "--metrics.enable_wandb", "--profiling.enable_profiling", "--profiling.profile_freq", "3",
        "--validation.enable", "--validation.dataset", "text", "stdlib", "--validation.dataset_path", corpus[5], "",
        "--validation.dataset_name", "same", "code", "--validation.freq", "2", "--validation.steps", "2",
        "--activation_checkpoint.mode", "none", "--metrics.time_micro_batches",
        "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble",
    ]  # fmt: skip
    out = train(flags, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    records = lines(tmp_path)
    assert "The data has ended" in out and records[-1]["queue_docs"] == 0
    assert sum(r["docs"] for r in records) == int(re.search(r"documents (\d+)", out)[1])
    assert (tmp_path / f"checkpoint/step-{records[-1]['step']}/.metadata").exists()
    assert list(tmp_path.rglob("*.wandb")) and list(tmp_path.rglob("rank1.json"))
    assert all(1 <= r["imbalance_measured"] < 5 for r in records)
    trace = next(tmp_path.rglob("rank1.json"))
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    for part in ("forward", "backward", "backward of the weights"):
        assert any(re.fullmatch(rf"{part} of micro-batch 3, \d+ documents, \d+ tokens", n) for n in names), part
    table = subprocess.run(
        [sys.executable, "scripts/summarise_trace.py", str(tmp_path), "--rank", "1", "--json", str(tmp_path / "table.json")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (summary,) = json.loads((tmp_path / "table.json").read_text())
    shares = summary["share"]
    assert "matrix products" in table and sum(shares.values()) == pytest.approx(1) and shares["attention"] > 0
    assert summary["steps"][0] == 3 and 0 <= summary["data_time_share"] < 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([r["loss"] for r in records], rel=1e-6)
    assert len(events.Scalars("validation_loss")) == records[-1]["step"] // 2
    # The same held-out documents before and after a step of training, so close to the training loss; and equal in another layout.
    validation = [e.value for e in events.Scalars("validation_loss")]
    written = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert written == pytest.approx(validation, rel=1e-6)
    sets = records[1]["validation"]
    assert f"same after step 2: loss {sets['same']['loss']:.4f} over" in out and "code after step 2: loss" in out
    assert sets["same"]["loss"] == pytest.approx(records[2]["loss"], abs=0.5)
    for name in ("same", "code"):
        for buckets in (sets[name]["by_length"], sets[name]["by_position"]):
            assert sum(b["targets"] for b in buckets.values()) == sets[name]["targets"]
        first = next(iter(sets[name]["by_position"]))
        (value, *_) = events.Scalars(f"validation/{name}/position/{first}")
        assert value.value == pytest.approx(sets[name]["by_position"][first]["loss"], rel=1e-6)
    assert sum(s["targets"] for s in sets.values()) == records[1]["validation_targets"]
    one = [x if x != str(tmp_path) else str(tmp_path / "one") for x in flags if "wandb" not in x]
    train([*one, *layout(cp=2), "--training.steps", "2", "--activation_checkpoint.mode", "none"])
    events = EventAccumulator(str(tmp_path / "one/tb"))
    events.Reload()
    assert events.Scalars("validation_loss")[0].value == pytest.approx(validation[0], rel=1e-2)


def test_the_quick_start_learns_smoothly_and_as_one_process_does(tmp_path):
    """The recipe as it is, on its own documents: in its layout, and in one process with the packing of the first run (by itself, where nothing waits, no document would)."""
    recipe = ["--job.config_file", "train_configs/debug_cpu.toml", "--metrics.enable_color=false"]
    train([*recipe, "--job.dump_folder", str(tmp_path / "four")], processes=4)
    same = ["--packing.settings_from", str(tmp_path / "four" / "packing_settings.json")]
    train([*recipe, *layout(), *same, "--job.dump_folder", str(tmp_path / "one")], processes=1)
    four, one = series(tmp_path / "four", "loss"), series(tmp_path / "one", "loss")
    assert len(four) == 30 and [f"{x:.3f}" for x in four] == [f"{x:.3f}" for x in one]
    assert four[-1] < four[0] - 2 and max(b - a for a, b in pairwise(four)) < 0.3


def test_a_state_of_an_optimizer_or_of_the_documents_can_be_left_out(corpus, straight, tmp_path):
    flags = [*corpus, *layout(dp=2), "--training.steps", "6", "--checkpoint.exclude_from_loading"]
    for what in ("optimizer", "dataloader"):
        folder = forked(straight, tmp_path / what)
        train([*flags, what, "--job.dump_folder", str(folder)])
        hashes = series(folder, "data_hash")
        # Without its state, step 6 trains what step 1 did.
        assert hashes[5] == series(straight, "data_hash")[0 if what == "dataloader" else 5]
        assert series(folder, "loss")[:5] == series(straight, "loss")[:5]


def patched(tmp_path: Path, code: str) -> str:
    """A train.py that runs some code first."""
    script = tmp_path / "patched.py"
    script.write_text(f"import runpy, sys\n{code}\nrunpy.run_path('train.py', run_name='__main__')\n")
    return str(script)


def test_a_planner_that_fails_ends_the_run_with_its_cause(corpus, tmp_path):
    code = """
from torchtitan_wlb.packing.wlb import WLB
plain = WLB.pack
def pack(self, arrivals):
    if arrivals.step == 3:
        raise ZeroDivisionError("step three")
    return plain(self, arrivals)
WLB.pack = pack
"""
    flags = [*corpus, *layout(dp=2), "--job.dump_folder", str(tmp_path), "--packing.delay_price", "0.1"]
    out = train([*flags, "--training.num_workers", "2"], expect=1, script=patched(tmp_path, code))
    assert "ZeroDivisionError: step three" in out and [r["step"] for r in lines(tmp_path)] == [1, 2]


def test_a_step_without_targets_changes_nothing(corpus, tmp_path):
    (tmp_path / "lengths.json").write_text(json.dumps([130, 250] * 50))
    flags = [
        *corpus, *layout(dp=2), "--job.dump_folder", str(tmp_path), "--training.dataset", "synthetic",
        "--training.dataset_path", str(tmp_path / "lengths.json"), "--training.seq_len", "256",
        "--packing.strategy", "wlb_paper", "--packing.outlier_thresholds", "100", "200", "--checkpoint.interval", "1",
    ]  # fmt: skip
    out = train(flags)
    records = lines(tmp_path)
    empty = [r for r in records if r["docs"] == 0]
    assert [r["step"] for r in empty] == [6] and records[-1]["skipped_steps"] == 1
    assert all(r["loss"] is None and r["grad_norm"] is None for r in empty)
    assert all(math.isfinite(r["loss"]) for r in records if r["docs"])
    assert "Step 6 changes no weight: it has no target" in out
    weights = []
    for step in (5, 6, 7):
        dcp_to_torch_save(tmp_path / f"checkpoint/step-{step}", tmp_path / "weights.pt")
        weights.append(torch.load(tmp_path / "weights.pt", weights_only=False)["model"])
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not any(torch.equal(weights[1][k], weights[2][k]) for k in weights[0])


def test_gradients_that_are_not_finite_change_nothing_on_any_rank(corpus, straight, tmp_path):
    code = """
import os, torch
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline
plain, calls = Pipeline.forward_backward, []
def forward_backward(self, *args):
    loss = plain(self, *args)
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        next(self.model_parts[0].parameters()).grad.to_local().view(-1)[0] = float("inf")
    return loss
Pipeline.forward_backward = forward_backward
"""
    folder = tmp_path / "once"
    flags = [*corpus, *layout(dp=2), "--training.steps", "5", "--job.dump_folder"]
    out = train([*flags, str(folder)], script=patched(tmp_path, code))
    records = lines(folder)
    assert "Step 3 changes no weight: its gradient has norm inf; documents [" in out
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1] and records[2]["grad_norm"] is None
    assert series(folder, "loss")[:3] == series(straight, "loss")[:3] and records[4]["loss"] < records[0]["loss"]

    folder = tmp_path / "always"
    checkpoints = ["--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
    wild = ["--optimizer.lr", "1e30", "--training.max_skipped_steps", "3", "--lr_scheduler.warmup_steps", "0"]
    out = train([*flags, str(folder), *wild, *checkpoints, "--training.steps", "10"], expect=1)
    assert "3 steps in a row had a gradient that is not finite" in out
    assert 4 <= len(lines(folder)) <= 6 and "NaN" not in (folder / "metrics.jsonl").read_text()

    folder = forked(straight, tmp_path / "weights")
    code = """
from torchtitan_wlb.checkpoint import CheckpointManager
plain = CheckpointManager.load
def load(self, *args):
    plain(self, *args)
    next(self.optimizers.model_parts[0].parameters()).detach().to_local().view(-1)[0] = float("nan")
CheckpointManager.load = load
"""
    flags = [*flags, str(folder), *checkpoints]
    out = train([*flags, "--training.max_skipped_steps", "9", "--training.steps", "7"], script=patched(tmp_path, code))
    assert out.count("Not saved after step 6: a weight is not finite") >= 1
    assert [p.name for p in (folder / "checkpoint").glob("step-*")] == ["step-5"]


def test_configured_hyperparameters_win_on_resume(corpus, straight, tmp_path):
    folder = forked(straight, tmp_path / "run")
    (folder / "checkpoint/step-5-best").mkdir()  # not ours
    flags = ["--optimizer.weight_decay", "0.3", "--optimizer.beta2", "0.9", "--checkpoint.keep_latest_k", "1"]
    out = train([*corpus, *layout(dp=2), "--job.dump_folder", str(folder), *flags])
    assert "From now on --optimizer.weight_decay is 0.3; it was 0.1" in out
    assert "From now on --optimizer.beta2 is 0.9; it was 0.95" in out
    assert series(folder, "loss")[5] == series(straight, "loss")[5] != series(folder, "loss")[6]
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == ["step-10", "step-5-best"]


def test_ranks_end_with_a_launcher_that_is_killed_while_they_import(tmp_path):
    mark = f"launcher-{os.getpid()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    launcher = subprocess.Popen(
        [*command, "--job.dump_folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MARK": mark},
        start_new_session=True,
    )

    def ranks() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_text() and "train.py" in (process / "cmdline").read_text():
                    found.append(process.name)
        return [pid for pid in found if int(pid) != launcher.pid]

    began = time.monotonic()
    while len(ranks()) < 2 and time.monotonic() < began + 60:
        time.sleep(0.05)
    time.sleep(0.5)  # Python has started, torch is not imported yet
    launcher.kill()
    launcher.wait()
    killed = time.monotonic()
    while ranks() and time.monotonic() < killed + 10:
        time.sleep(0.1)
    assert not ranks()
