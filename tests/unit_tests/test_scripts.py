"""Tools that decide or sum up something: trace table, benchmark rows, CPU groups."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import benchmark_step
import cpu_cluster
from summarise_trace import category, summarise


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
