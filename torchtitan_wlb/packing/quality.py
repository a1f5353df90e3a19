"""Plan many steps on lengths alone and say how good they are: for the simulator, for tuning, for benchmarks."""

from dataclasses import asdict, dataclass, replace

import numpy as np

from torchtitan_wlb.cost.step_time import StepModel
from torchtitan_wlb.packing.planner import StepPlan, StepPlanner
from torchtitan_wlb.packing.settings import PackingSettings


@dataclass(frozen=True)
class Quality:
    """Statistics of planned steps; one row of scripts/simulate_packing.py.

    Attributes:
        imbalance_mean, imbalance_p99: of max / mean of the predicted work of a step's micro-batches.
        time_vs_ideal: seconds of the steps by the settings' objective over those of equal micro-batches; 1.0 is
            perfect.
        delay_mean_steps, delay_max_steps: token-weighted mean and maximum of step trained - step arrived.
        plan_ms_mean, plan_ms_p99: time to plan a step, drawing of ids and lengths included.
        pad_fraction: padding / padded tokens. tokens_per_step: without padding. tokens_sd: standard deviation of a
            step's tokens over their mean.
        speed: tokens a second by the settings' objective; compares settings for one layout.
        docs_left: documents waiting after the last step. queue_age_max_steps: longest wait of a waiting document.
        step_time_s: mean predicted step of the slowest data-parallel rank, in the layout's pipeline; context-parallel
            ranks count as balanced.
    """

    imbalance_mean: float
    imbalance_p99: float
    time_vs_ideal: float
    delay_mean_steps: float
    delay_max_steps: int
    plan_ms_mean: float
    plan_ms_p99: float
    pad_fraction: float
    tokens_per_step: float
    tokens_sd: float
    speed: float
    docs_left: int
    queue_age_max_steps: int
    step_time_s: float

    def row(self) -> dict[str, float]:
        return asdict(self)


def predict_step(plan: StepPlan, settings: PackingSettings, model: StepModel, dp: int) -> float:
    """Predicted seconds of a planned step: the slowest of dp pipelines, each with N / dp micro-batches."""
    return slowest_pipeline(plan, *plan.costs, settings, model, dp)


def slowest_pipeline(
    plan: StepPlan,
    attention: np.ndarray,
    linear: np.ndarray,
    tokens: np.ndarray,
    settings: PackingSettings,
    model: StepModel,
    dp: int,
) -> float:
    """Predicted seconds of a planned step with other costs than the plan's, which still decides who trains what.

    Args:
        attention, linear, tokens: [N] seconds and padded length of every micro-batch.
        settings, model, dp: see predict_step.
    """
    slowest = 0.0
    for hand in settings.deal(plan.work, plan.step, dp):
        if settings.balances:
            order = model.choose_order(attention[hand], linear[hand], tokens[hand])
            hand = [hand[i] for i in order]
        slowest = max(slowest, model.predict(attention[hand], linear[hand], tokens[hand]).seconds)
    return slowest


def measure(
    planner: StepPlanner, steps: int, warmup: int, each=None, model: StepModel | None = None, ranks: int = 0
) -> Quality:
    """Plan warmup + steps steps and judge the last `steps` of them (fewer where finite data ends).

    Args:
        each: called with every judged plan.
        model: time model of the layout, for step_time_s (0 without).
        ranks: data-parallel ranks; 0: as many as the settings' objective has.
    """
    imbalances, slowest, mean, delays, oldest, seconds, tokens, padded = [], [], [], [], [], [], [], []
    step_times = []
    left = (0, 0, 0)
    settings, objective = planner.settings, planner.settings.objective
    if ranks:
        objective = replace(objective, dp=ranks)
    for plan in planner:
        left = plan.waiting
        if plan.step > warmup:
            imbalances.append(plan.imbalance)
            work = plan.work[np.concatenate(settings.deal(plan.work, plan.step, objective.dp))]
            slowest.append(objective.seconds(work))
            mean.append(objective.perfect(work))
            delays.append(plan.delay)
            oldest.append(plan.waiting[2])
            seconds.append(plan.seconds)
            tokens.append(plan.tokens)
            padded.append(plan.padded.sum())
            if model:
                step_times.append(predict_step(plan, settings, model, objective.dp))
            if each:
                each(plan)
        if plan.step >= warmup + steps:
            break
    delay_mean, delay_max = np.array(delays).reshape(-1, 2).T
    return Quality(
        imbalance_mean=float(np.mean(imbalances)),
        imbalance_p99=float(np.percentile(imbalances, 99)),
        time_vs_ideal=float(np.sum(slowest) / np.sum(mean)),
        delay_mean_steps=float(np.average(delay_mean, weights=tokens)),
        delay_max_steps=int(delay_max.max()),
        plan_ms_mean=float(np.mean(seconds) * 1e3),
        plan_ms_p99=float(np.percentile(seconds, 99) * 1e3),
        pad_fraction=float(1 - np.sum(tokens) / np.sum(padded)),
        tokens_per_step=float(np.mean(tokens)),
        tokens_sd=float(np.std(tokens) / np.mean(tokens)),
        speed=float(np.sum(tokens) / np.sum(slowest)),
        docs_left=left[0],
        queue_age_max_steps=int(max(oldest)),
        step_time_s=float(np.mean(step_times)) if step_times else 0.0,
    )
