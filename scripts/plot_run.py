"""Draw the metrics of a run into one picture, and say what its packing is worth.

    python scripts/plot_run.py [DUMP_FOLDER] [--job.config_file F.toml --section.key value ...] [--ranks N] [--out FILE]

Draws metrics.jsonl over steps into DUMP_FOLDER/run.png: loss, predicted imbalance of micro-batches and of
context-parallel ranks, mean delay. With the run's recipe and flags, its first 300 steps are also planned again, on
lengths alone, as they were packed and with `plain` over the same documents; both mean imbalances are printed, and
plain's is drawn beside. DUMP_FOLDER is job.dump_folder if it is not given.
"""

import argparse
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

from scripts.recipe import resolve_recipe
from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.metrics import read_records

MOST_STEPS = 300  # planned again at most
PANELS = (("loss", "validation_loss"), ("imbalance_micro_batch", "imbalance_cp"), ("delay_mean_steps",))

Line = tuple[list[int], list[float]]  # steps, values


def read_metrics(folder: Path) -> list[dict]:
    """The records of a run, one a logged step.

    Raises:
        ConfigError: there are none.
    """
    path = folder / "metrics.jsonl"
    records = read_records(path)
    if not records:
        raise ConfigError(f"{path}: no step has been logged there")
    return records


def line_of(records: list[dict], key: str) -> Line:
    """The values of a key where it is logged."""
    found = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return [step for step, _ in found], [value for _, value in found]


def plan_again(config: JobConfig, ranks: int, records: list[dict]) -> tuple[str, Line | None]:
    """(one line that compares imbalances, imbalance of the run's steps with `plain`, None where the recipe does not
    plan the steps that were trained)."""
    recipe = resolve_recipe(config, ranks=ranks)
    make_planner = recipe.own_planner()
    settings, n = recipe.tuned(make_planner), min(MOST_STEPS, max(r["step"] for r in records))
    ours = list(islice(make_planner(settings), n))
    trained = {r["step"]: r["data_hash"] for r in records if "data_hash" in r}
    if different := [p.step for p in ours if trained.get(p.step, p.hash()) != p.hash()]:
        return f"This recipe does not plan step {different[0]} of the run: no comparison with plain", None
    plain = list(islice(make_planner(replace(settings, strategy="plain")), n))
    a, b = (sum(p.imbalance for p in plans) / len(plans) for plans in (ours, plain))
    said = f"{settings.strategy} {a:.3f}, plain on the same documents {b:.3f}"
    said = f"Predicted imbalance of micro-batches over {len(ours)} steps: {said}"
    return said, ([p.step for p in plain], [p.imbalance for p in plain])


def draw(records: list[dict], plain: Line | None, path: Path) -> None:
    """One panel below the other, steps in common; plain: imbalance to draw beside the run's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(PANELS), 1, figsize=(8, 8), sharex=True)
    for axis, keys in zip(axes, PANELS):
        if plain and "imbalance_micro_batch" in keys:
            axis.plot(*plain, color="0.7", label="imbalance_micro_batch of plain")
        for steps, values, key in ((*line_of(records, key), key) for key in keys):
            if steps:
                axis.plot(steps, values, label=key, marker="." if len(steps) < 100 else "")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    folder, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=0, help="of the run; 0: as many as the recipe's degrees need")
    parser.add_argument("--out", default="", help="default: run.png in the folder")
    arguments, rest = parser.parse_known_args(flags)
    if not folder and not rest:
        parser.error("give the folder of a run, or its recipe")
    config = load_config(rest)
    path = Path(folder or config.job.dump_folder)
    records = read_metrics(path)
    plain = None
    if rest:
        said, plain = plan_again(config, arguments.ranks, records)
        print(said)
    out = Path(arguments.out or path / "run.png")
    draw(records, plain, out)
    print(f"Drawn: {out}")


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
