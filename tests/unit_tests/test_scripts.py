"""Tools that decide or sum up something: where results come from, pictures of runs, trace table, benchmark rows, CPU
groups."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from scripts import benchmark_cp, benchmark_step, cpu_cluster, origin, plot_run, profile_costs
from scripts.benchmark_rank import LAYOUTS
from scripts.recipe import resolve_recipe
from scripts.summarise_trace import category, summarise
from scripts.timing import FreeAttention, block_share, kernel_milliseconds
from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.kernels import Segments
from torchtitan_wlb.models.model_args import llama_configs

REPOSITORY = Path(__file__).parents[2]


# -- origin


def git(folder: Path, *words: str) -> str:
    me = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    return subprocess.run(["git", "-C", str(folder), *me, *words], check=True, capture_output=True, text=True).stdout


def test_origin_names_the_commit_and_whether_code_differs_from_it(tmp_path):
    assert origin.commit(tmp_path) == "unknown"
    git(tmp_path, "init", "--quiet")
    assert origin.commit(tmp_path) == "unknown"  # nothing committed
    (tmp_path / "assets").mkdir()
    for name in ("code.py", "assets/result.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD").strip()
    assert origin.commit(tmp_path) == head
    (tmp_path / "assets/result.json").write_text("2")
    (tmp_path / "new.txt").write_text("not tracked")
    assert origin.commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert origin.commit(tmp_path) == f"{head}-dirty"
    git(tmp_path, "add", ".")
    assert origin.commit(tmp_path) == f"{head}-dirty"


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert origin.commit() == "unknown"


def test_hardware_goes_by_type(monkeypatch):
    monkeypatch.setattr(origin.os, "cpu_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    for machine, name in (("x86_64", "x86"), ("arm64", "ARM"), ("riscv64", "riscv64")):
        monkeypatch.setattr(origin.platform, "machine", lambda m=machine: m)
        assert origin.hardware("cpu") == f"6-core {name} CPU"
    assert origin.hardware() == origin.hardware("cuda") == "NVIDIA X"


def test_results_carry_their_origin(tmp_path, monkeypatch):
    here = {"hardware": "2-core x86 CPU", "torch": "2.13.0", "commit": "abc"}
    monkeypatch.setattr(origin, "origin", lambda device_type: here)
    path = tmp_path / "r.json"
    origin.write_results(str(path), [{"a": 1}, {"a": 2}])
    assert json.loads(path.read_text()) == [{"a": 1} | here, {"a": 2} | here]
    origin.write_results(str(path), {"a": 1})
    assert list(json.loads(path.read_text())) == ["hardware", "torch", "commit", "a"]


def test_committed_results_say_where_they_come_from():
    files = sorted((REPOSITORY / "assets/results").glob("*.json"))
    assert files
    for path in files:
        text = path.read_text()
        results = json.loads(text)
        for row in results if isinstance(results, list) else [results]:
            assert all(row[key] for key in ("hardware", "torch", "commit")), path.name
        assert text.rstrip("\n") == json.dumps(results, indent=1), path.name


# -- plot_run

# What a run of train.py logs, by hand.
RECORDS = [
    {"step": 1, "loss": 5.0, "imbalance_micro_batch": 1.5, "imbalance_cp": 1.1, "delay_mean_steps": 0.0},
    {"step": 2, "validation_loss": 4.5},
    {"step": 3, "loss": 3.0, "imbalance_micro_batch": 1.1, "imbalance_cp": 1.2, "delay_mean_steps": 0.5, "mfu": None},
]
LENGTHS = [128 * x for x in (3, 60, 17, 64, 9, 30, 2, 41, 22, 64, 5, 12)] * 20


@pytest.fixture
def run(tmp_path):
    """(folder with metrics.jsonl, flags of its recipe): packed steps of a list of lengths, without training."""
    (tmp_path / "lengths.json").write_text(json.dumps(LENGTHS))
    recipe = f"""
    [job]
    dump_folder = "{tmp_path}"
    [training]
    dataset = "synthetic"
    dataset_path = "{tmp_path}/lengths.json"
    dataset_cache = "{tmp_path}/cache"
    seq_len = 8192
    [parallelism]
    pipeline_parallel_degree = 2
    """
    (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path, ["--job.config_file", str(tmp_path / "recipe.toml")]


def write_metrics(folder: Path, records: list[dict], cut: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + cut)


def test_metrics_are_read_up_to_a_crash(tmp_path):
    with pytest.raises(ConfigError, match="no step has been logged"):
        plot_run.read_metrics(tmp_path)
    write_metrics(tmp_path, RECORDS, cut='{"step": 4, "lo')
    records = plot_run.read_metrics(tmp_path)
    assert records == RECORDS
    assert plot_run.line_of(records, "loss") == ([1, 3], [5.0, 3.0])
    assert plot_run.line_of(records, "validation_loss") == ([2], [4.5])
    assert plot_run.line_of(records, "mfu") == ([], [])


def planned(flags: list[str], strategy: str, n: int) -> list:
    """The first steps of a recipe, planned here."""
    recipe = resolve_recipe(load_config(flags))
    make_planner = recipe.own_planner()
    return list(islice(make_planner(replace(recipe.tuned(make_planner), strategy=strategy)), n))


def test_a_run_is_drawn_and_compared_with_plain(run, capsys):
    folder, flags = run
    steps = planned(flags, "wlb", 3)
    write_metrics(folder, [RECORDS[0] | {"data_hash": steps[0].hash()}, RECORDS[2] | {"data_hash": steps[2].hash()}])
    plot_run.main(flags)  # the folder is the recipe's
    ours, plain = (sum(p.imbalance for p in plans) / 3 for plans in (steps, planned(flags, "plain", 3)))
    assert ours != plain
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == (
        f"Predicted imbalance of micro-batches over 3 steps: wlb {ours:.3f}, plain on the same documents {plain:.3f}"
    )
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_another_recipe_is_drawn_without_comparison(run, capsys):
    folder, flags = run
    write_metrics(folder, [RECORDS[0] | {"data_hash": "0" * 12}])
    plot_run.main([str(folder), *flags, "--out", str(folder / "other.png")])
    assert "does not plan step 1 of the run" in capsys.readouterr().out
    assert (folder / "other.png").exists() and not (folder / "run.png").exists()


def test_a_folder_alone_is_enough_to_draw(tmp_path, capsys):
    write_metrics(tmp_path, RECORDS)
    plot_run.main([str(tmp_path)])
    assert (tmp_path / "run.png").exists() and "Predicted" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plot_run.main([])


# -- measuring


def test_forward_and_backward_are_timed_apart():
    """A clock that every kernel call advances by a known time."""
    now = [0.0]

    class Kernel:
        def forward(self, *_):
            now[0] += 0.002

        def backward(self, *_):
            now[0] += 0.005

    tensors = [torch.zeros(1, 1, 1)] * 4
    times = kernel_milliseconds(Kernel(), tensors, Segments.of([1]), clock=lambda: now[0])
    assert times == pytest.approx((2.0, 5.0))


def test_gpu_check_needs_torch_and_numpy_only():
    absent = ("pydantic", "datasets", "pyarrow", "torchdata", "tiktoken", "filelock", "tensorboard", "wandb")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import scripts.gpu_check, torchtitan_wlb.parallelisms.parallelize_llama"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_oracle_is_chosen_on_odd_rounds_and_judged_on_even_ones():
    def row(sharding, plan, rounds):
        return {
            "micro_batch": 0, "sharding": sharding, "plan": plan, "measured_ms": 2.0, "predicted_ms": 1.0, "rounds_ms": rounds,
        }  # fmt: skip

    rows = [
        row("per_sequence", "per_sequence", [4.0, 1.0, 4.0]),  # fastest on odd rounds: what the oracle takes
        row("per_document", "per_document", [3.0, 2.0, 3.0]),
        row("hybrid", "hybrid", [5.0, 5.0, 5.0]),
        row("adaptive", "per_document", [3.5, 2.0, 3.5]),
    ]
    summary = benchmark_cp.summarise(rows, 1)
    assert summary["oracle_ms"] == 4.0 and summary["adaptive_over_oracle"] == 3.5 / 4
    assert summary["same_plan_measured_twice"] == 3.5 / 3 and summary["mean_absolute_prediction_error"] == 0.5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_profile_measures_one_tensor_parallel_share_of_every_matrix(tp):
    args = llama_configs["debugmodel"]  # 4 heads, 2 K/V heads
    block = block_share(args, tp, FreeAttention())
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters() if p.ndim == 2}
    kv = max(1, 2 // tp) * 32
    assert shapes == {
        "attention.wq.weight": (128 // tp, 128), "attention.wo.weight": (128, 128 // tp),
        "attention.wk.weight": (kv, 128), "attention.wv.weight": (kv, 128),
        "feed_forward.w1.weight": (384 // tp, 128), "feed_forward.w3.weight": (384 // tp, 128),
        "feed_forward.w2.weight": (128, 384 // tp),
    }  # fmt: skip


def test_profile_rows_are_complete(monkeypatch):
    monkeypatch.setitem(profile_costs.ENOUGH, "least_seconds", 0.0)
    args, cpu = llama_configs["debugmodel_small"], torch.device("cpu")
    rows = profile_costs.measure_attention(args, 2, torch.float32, cpu, 48)
    assert [(r["q"], r["k"]) for r in rows] == [(16, 16), (16, 32), (32, 32), (16, 48), (32, 48), (48, 48)]
    assert all(r["forward_ms"] > 0 and r["backward_ms"] > 0 for r in rows)


# -- trace table


def event(name, ts, dur, cat="cpu_op", tid=1):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def test_trace_table_counts_every_microsecond_once():
    events = [
        event("ProfilerStep#3", 0, 100, cat="user_annotation"),
        event("aten::linear", 10, 30),
        event("aten::mm", 15, 20),
        event("aten::_scaled_dot_product_flash_attention_for_cpu", 50, 25),
        event("aten::copy_", 55, 5),
        event("aten::mul", 80, 5),
        event("aten::mm", 85, 10, tid=2),  # another thread
        event("aten::mm", 200, 10),  # another step
    ]
    summary = summarise([{"traceEvents": events}, {"traceEvents": events}])
    share = {k: v for k, v in summary["share"].items() if v}
    assert share == pytest.approx(
        {"matrix products": 0.30, "attention": 0.20, "copies": 0.05, "element-wise": 0.05, "host": 0.40}
    )
    assert dict(summary["operators"])["aten::linear"] == pytest.approx(0.02) and summary["steps_ms"] == [0.1, 0.1]
    assert category("## Call CompiledFxGraph f4 ##") == "element-wise"


# -- step benchmark


def test_layouts_are_legal():
    for name, layout in LAYOUTS.items():
        args = llama_configs[layout.flavor]
        assert layout.n % layout.dp == 0 and args.n_layers >= layout.pp and args.n_kv_heads % layout.tp == 0, name
    assert LAYOUTS["tp2"].ranks == 2 and LAYOUTS["dp2pp4"].ranks == 8


def test_gains_are_over_plain_of_the_same_schedule():
    def row(strategy, schedule, rounds):
        return {
            "strategy": strategy, "schedule": schedule, "tokens_per_s_rounds": rounds,
            "tokens_per_s": sum(rounds) / 3, "predicted_tokens_per_s": 2 * rounds[0], "tokens_per_s_at_equal_speed": rounds[2],
        }  # fmt: skip

    rows = [row("plain", "a", [1.0, 2, 3]), row("wlb", "a", [2.0, 3, 3]), row("wlb", "b", [9.0, 9, 9])]
    benchmark_step.add_gains(rows)
    assert rows[1]["over_plain"] == pytest.approx(8 / 6)
    assert rows[1]["over_plain_median_of_rounds"] == 1.5 and rows[1]["over_plain_predicted"] == 2
    assert rows[1]["over_plain_at_equal_speed"] == 1
    assert "over_plain" not in rows[2]


def test_benchmark_refuses_what_a_schedule_cannot_run(capsys):
    for flags, message in (
        (["--schedule", "DualPipeV"], "at least 8"),
        (["--steps", "25"], "multiple of --rounds"),
    ):
        with pytest.raises(SystemExit):
            benchmark_step.main(["--layout", "pp4", "--json", "x", *flags])
        assert message in capsys.readouterr().err


def test_without_quotas_the_cluster_refuses_clearly(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_cluster, "_ROOTS", (tmp_path / "none",))
    with (
        pytest.raises(SystemExit, match=r"4 ranks on .* cores need CPU quotas.*run as root"),
        cpu_cluster.cpu_groups(4, 0.45),
    ):
        pass
    with cpu_cluster.cpu_groups(2, None) as groups:
        assert groups == ["", ""]


def test_quotas_are_written_and_removed(monkeypatch, tmp_path):
    (tmp_path / "cgroup.procs").write_text("")
    monkeypatch.setattr(cpu_cluster, "_ROOTS", (tmp_path,))
    written = {}
    monkeypatch.setattr(Path, "write_text", lambda self, text: written.update({self.name: text}))
    with cpu_cluster.cpu_groups(2, 0.25) as groups:
        assert len(groups) == 2 and all(Path(g).is_dir() for g in groups)
        assert written == {"cpu.max": "2250 9000"}
    assert not any(Path(g).exists() for g in groups)
