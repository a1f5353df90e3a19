"""Where the time of training goes: a table for every run of train.py (--profiling.enable_profiling), from its traces
and metrics.

    python scripts/summarise_trace.py outputs/RUN [...] [--rank R] [--from-step S] [--json OUT]

Time of the thread that trains, by operator, without what an operator calls; what is in no operator is the host's own
(Python, FSDP's hooks, waiting for other ranks). The share of waiting for data is of all logged steps from --from-step
on. The JSON names the machine and commit of this summary: make it where and when the traces were made.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from scripts.origin import write_results

# First match wins; names are those of ATen operators, collectives and profiler annotations.
CATEGORIES = {
    "attention": ("flash_attention", "scaled_dot_product"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
    "collectives": ("gloo", "nccl", "c10d", "fsdp::", "record_param_comms", "_c10d_functional"),
    "optimizer": ("adam", "sgd", "foreach", "Optimizer."),
    "norms and softmax": ("norm", "softmax", "logsumexp", "rsqrt"),
    "copies": ("copy_", "cat", "clone", "index", "zero_", "fill_", "select_backward", "slice_backward", "empty"),
    "element-wise": ("aten::", "CompiledFxGraph"),
}


def category(name: str) -> str:
    """The category of an operator, "host" for what is none."""
    return next((c for c, parts in CATEGORIES.items() if any(p in name for p in parts)), "host")


def self_times(events: list[dict]) -> dict[str, float]:
    """Microseconds by operator of one thread's complete events, each without those inside it."""
    total: dict[str, float] = defaultdict(float)
    stack: list[tuple[float, str]] = []  # (end, name)
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1][0] <= e["ts"]:
            stack.pop()
        if stack:
            total[stack[-1][1]] -= e["dur"]
        total[e["name"]] += e["dur"]
        stack.append((e["ts"] + e["dur"], e["name"]))
    return total


def step_of(trace: dict) -> tuple[float, dict[str, float]]:
    """(microseconds of the traced step, those of its operators)."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    step = max((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["dur"])
    inside = [
        e
        for e in events
        if e.get("tid") == step["tid"]
        and e.get("cat") == "cpu_op"
        and step["ts"] <= e["ts"]
        and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
    ]
    return step["dur"], self_times(inside)


def summarise(traces: list[dict]) -> dict:
    """{"steps_ms": of every trace, "share": {category: share of all steps}, "operators": [(name, ms), ...] of the 25
    longest}."""
    steps, by_name = [], defaultdict[str, float](float)
    for trace in traces:
        duration, operators = step_of(trace)
        steps.append(duration)
        for name, us in operators.items():
            by_name[name] += us
    share: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for name, us in by_name.items():
        share[category(name)] = share.get(category(name), 0.0) + us / sum(steps)
    share["host"] = share.get("host", 0.0) + 1 - sum(share.values())
    longest = sorted(by_name.items(), key=lambda x: -x[1])[:25]
    return {
        "steps_ms": [us / 1e3 for us in steps],
        "share": share,
        "operators": [(n, us / 1e3) for n, us in longest],
    }


def of_run(folder: Path, rank: int, from_step: int) -> dict:
    """The table of a run (its job.dump_folder), from the steps that a rank traced."""
    traces = {int(path.parent.name.removeprefix("step-")): path for path in folder.glob(f"*/step-*/rank{rank}.json")}
    steps = sorted(step for step in traces if step >= from_step)
    if not steps:
        raise SystemExit(f"No trace of rank {rank} from step {from_step} on in {folder}; traced: {sorted(traces)}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if r["step"] >= from_step]
    waiting = sum(r["data_time_s"] for r in records) / sum(r["step_time_s"] for r in records)
    summary = summarise([json.loads(traces[step].read_text()) for step in steps])
    return {"run": folder.name, "rank": rank, "steps": steps, "data_time_share": waiting, **summary}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="job.dump_folder of a run")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--from-step", dest="from_step", type=int, default=3, help="earlier steps compile")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args(argv)
    summaries = [of_run(folder, arguments.rank, arguments.from_step) for folder in arguments.runs]
    for s in summaries:
        print(f"{s['run']}: steps {s['steps']}, {sum(s['steps_ms']):.0f} ms, data {s['data_time_share']:.2%}")
        for name, share in sorted(s["share"].items(), key=lambda x: -x[1]):
            print(f"{name:20} {share:6.1%}")
        for name, ms in s["operators"][:15]:
            print(f"    {name:60} {ms:9.1f} ms")
    if arguments.json:
        write_results(arguments.json, summaries)


if __name__ == "__main__":
    main(sys.argv[1:])
