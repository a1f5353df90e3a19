"""Compare all packing strategies on one stream of document lengths: no tensors, no process group.

    python scripts/simulate_packing.py --job.config_file F.toml --lengths L.json --steps 500 --seed 0 --json OUT [--plot
    P.png]

L.json is a list of lengths; longer ones follow training.long_documents. Statistics (packing/quality.py says what they
mean) are over --steps steps after 50 of warm-up. step_time_s is the predicted step of the recipe's layout and
schedule, over_plain what follows from it in tokens/s. The last row is the strategy wlb with the recipe's setting.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from scripts.origin import write_results
from scripts.recipe import Lengths, Recipe, resolve_recipe
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.step_time import StepModel
from torchtitan_wlb.packing.planner import StepPlan, StepPlanner
from torchtitan_wlb.packing.quality import Quality, measure
from torchtitan_wlb.packing.settings import PackingSettings

WARMUP = 50
COLUMNS = (
    "imbalance_mean",
    "imbalance_p99",
    "time_vs_ideal",
    "delay_mean_steps",
    "delay_max_steps",
    "plan_ms_mean",
    "pad_fraction",
    "step_time_s",
    "over_plain",
)


def settings_to_compare(recipe: Recipe, documents: Lengths) -> Iterator[tuple[str, PackingSettings]]:
    """(setting, settings) of every row."""
    base = recipe.settings.split(1)
    yield "-", replace(base, strategy="plain")
    yield "-", replace(base, strategy="plain_whole")
    for window in (1, 2, 4, 8):
        yield f"window {window}", replace(base, strategy="fixed", window=window)
    yield f"window 1, {base.solver_nodes} nodes", replace(base, strategy="fixed_solver", window=1)
    s = base.seq_len
    # 40K and 80K at a window of 128K, and the same shares of other windows.
    for share in ((10,), (10, 20), (8, 14, 22)):
        thresholds = tuple(s * x // 32 for x in share)
        yield f"queues {' '.join(map(str, thresholds))}", replace(base, strategy="wlb_paper", thresholds=thresholds)
    for price in (0.05, 0.1, 0.2, 0.4):
        yield f"delay_price {price}", replace(base, strategy="wlb", delay_price=price)
    tuned = recipe.tuned(documents.planner, "wlb")
    yield f"delay_price {tuned.delay_price:.3g}, N {tuned.n} (recipe)", tuned


def simulate(
    planner: StepPlanner, steps: int, name: str, model: StepModel | None = None
) -> tuple[Quality, dict[str, list]]:
    """Quality of a planner and its trace: imbalance of every step, (delay, tokens) of every span; with a progress bar
    on a terminal.

    Args:
        name: shown beside the bar.
        model: time model of a pipeline, see quality.measure.
    """
    trace: dict[str, list] = {"imbalance": [], "delay": [], "tokens": []}
    with tqdm(total=steps, desc=name, unit="step", leave=False, disable=None) as bar:

        def each(plan: StepPlan) -> None:
            trace["imbalance"].append(plan.imbalance)
            trace["delay"] += (plan.step - plan.spans[:, 3]).tolist()
            trace["tokens"] += (plan.spans[:, 2] - plan.spans[:, 1]).tolist()
            bar.update()

        return measure(planner, steps, WARMUP, each, model), trace


def plot(traces: dict[str, dict[str, list]], path: str) -> None:
    """Imbalance over steps, and the share of tokens by delay, one line a strategy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wanted = [n for n in traces if n.startswith(("plain -", "fixed window 4", "wlb_paper")) or "(recipe)" in n]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    for name in wanted:
        trace = traces[name]
        left.plot(np.sort(trace["imbalance"])[::-1], label=name)
        tokens = np.bincount(trace["delay"], trace["tokens"])
        right.plot(1 - np.cumsum(tokens) / tokens.sum(), marker=".", label=name)
    left.set(xlabel="steps, most imbalanced first", ylabel="max / mean predicted work", title="imbalance of the steps")
    right.set(xlabel="steps", ylabel="share of tokens", title="tokens that wait longer", yscale="log", ylim=(1e-5, 1))
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True)
    parser.add_argument("--plot", default="")
    arguments, rest = parser.parse_known_args(argv)
    recipe = resolve_recipe(load_config(rest), seed=arguments.seed)
    documents = Lengths(arguments.lengths, recipe.config)
    mean = documents.lengths.mean()
    print(f"{len(documents.lengths):,} documents, mean {mean:,.0f} tokens; {recipe.settings.describe()}")
    print(
        f"{'strategy':13} {'setting':32} "
        + " ".join(f"{c.replace('_steps', '').replace('imbalance', 'imb'):>13}" for c in COLUMNS)
    )
    rows: list[dict] = []
    traces = {}
    for setting, settings in settings_to_compare(recipe, documents):
        name = f"{settings.strategy} {setting}"
        model = recipe.step_model(settings.n)
        quality, traces[name] = simulate(documents.planner(settings), arguments.steps, name, model)
        rows.append({"strategy": settings.strategy, "setting": setting} | quality.row())
        speed, of_plain = (r["tokens_per_step"] / r["step_time_s"] for r in (rows[-1], rows[0]))
        rows[-1]["over_plain"] = speed / of_plain
        print(f"{settings.strategy:13} {setting:32} " + " ".join(f"{rows[-1][c]:13.4f}" for c in COLUMNS), flush=True)
    write_results(arguments.json, rows, "cpu")
    if arguments.plot:
        plot(traces, arguments.plot)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
