"""How well the closed form by which wlb packs a pipeline (packing/objective.py) predicts the time model, and what the
order of unequal micro-batches is worth.

    python scripts/studies/study_objective.py --lengths L.json --out assets/results/objective.json

For every schedule, PP = 4, one data-parallel rank, M = PP, 2 PP and 4 PP micro-batches of 512K tokens together: at some
steps of the 7B recipe every run of long documents that may leave (24 of them) is packed to the end. Each gets a score
by the closed form and one by the time model with the best order found: seconds over those of equal micro-batches.

rank_correlation: Spearman's, mean over steps. loss: time, over the best candidate's, of the one that the closed form
chooses. order_*: time over the best order's of the order in which micro-batches are packed, of the longest in the
middle, and of the longest first.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

from scripts.origin import write_results
from scripts.recipe import Lengths, Recipe, resolve_recipe
from scripts.simulate_packing import WARMUP
from scripts.studies.study_steps import RECIPE
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.step_time import StepModel
from torchtitan_wlb.packing.planner import StepPlan
from torchtitan_wlb.packing.wlb import WLB, _runs

SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
PP, CANDIDATES = 4, 24


class OneRun(WLB):
    """Lets one run of documents leave: `share` of the way through the candidates."""

    share = 0.0

    def _release(self, pool, short, arrivals, due):
        runs = _runs(len(pool), self.n) if len(pool) else np.zeros((1, 0), dtype=bool)
        return runs[int(self.share * (len(runs) - 1))] | (pool[:, 3] <= due)


def seconds(model: StepModel, plan: StepPlan, order: list[int]) -> float:
    return model.predict(*(x[order] for x in plan.costs)).seconds


def equal(model: StepModel, plan: StepPlan) -> float:
    """Seconds of a step with the same work in equal micro-batches."""
    parts = [np.full(len(plan.work), x.mean()) for x in plan.costs]
    return model.predict(*parts).seconds


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks, ties averaged."""
    return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2


def judge(recipe: Recipe, documents: Lengths, steps: int) -> dict:
    """A row of one schedule and number of micro-batches."""
    settings = replace(recipe.settings, strategy="wlb", delay_price=0.15)
    model, objective = recipe.step_model(), settings.objective
    planner = documents.planner(settings)
    correlation, loss, orders = [], [], []
    for _ in range(WARMUP):
        before = next(planner).state
    for _ in range(steps):
        plan = next(planner)
        by_form, by_model = [], []
        for share in np.linspace(0, 1, CANDIDATES):
            candidate = documents.planner(settings)
            candidate.packer.__class__ = OneRun
            candidate.packer.share = share  # type: ignore[attr-defined]
            candidate.restore(before)
            c = next(candidate)
            by_form.append(objective.seconds(c.work) / objective.perfect(c.work))
            best = model.choose_order(*c.costs)
            by_model.append(seconds(model, c, best) / equal(model, c))
        form, truth = np.array(by_form), np.array(by_model)
        if np.ptp(form) and np.ptp(truth):
            correlation.append(np.corrcoef(ranks(form), ranks(truth))[0, 1])
        loss.append(truth[form.argmin()] / truth.min() - 1)
        by_work = np.argsort(-plan.work, kind="stable")
        middle = np.concatenate([by_work[1::2][::-1], by_work[::2]])  # rising, then falling
        best = model.choose_order(*plan.costs)
        shortest = seconds(model, plan, best)
        orders.append([seconds(model, plan, list(o)) / shortest for o in (range(len(middle)), middle, by_work)])
        before = plan.state
    as_packed, in_the_middle, first = np.mean(orders, axis=0).tolist()
    return {
        "bubble": objective.bubble,
        "rank_correlation": float(np.mean(correlation)),
        "loss_mean": float(np.mean(loss)),
        "loss_p90": float(np.percentile(loss, 90)),
        "order_as_packed": as_packed,
        "order_longest_in_the_middle": in_the_middle,
        "order_longest_first": first,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args(argv)
    rows = []
    for schedule in SCHEDULES:
        for split in (1, 2, 4):
            m = split * PP
            if schedule == "DualPipeV" and m < 2 * PP:
                continue
            words = [
                "--parallelism.pipeline_parallel_schedule", schedule, "--training.global_batch_size", str(m),
                "--training.micro_batch_tokens", str(131072 // split),
            ]  # fmt: skip
            recipe = resolve_recipe(load_config([*RECIPE, *words]), seed=0)
            documents = Lengths(arguments.lengths, recipe.config)
            rows.append({"schedule": schedule, "m": m} | judge(recipe, documents, arguments.steps))
            print(rows[-1], flush=True)
    write_results(arguments.out, rows, "cpu")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
