"""Find the free parameter of a packer on a sample of the documents: the best balance within a mean delay.

Balance does not depend much on the number of data-parallel ranks, so few are planned; a few hundred steps take seconds.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from torchtitan_wlb.logger import logger
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.quality import Quality, measure
from torchtitan_wlb.packing.settings import PackingSettings

_STEPS, _WARMUP, _MICRO_BATCHES = 200, 40, 16
_SILENCE = 2.0  # seconds after which every try is logged
_DOCUMENTS = 400_000  # planned for one value at most, however short they are
_HIGHEST, _LOWEST, _FACTOR = 3.0, 0.01, 1.6  # delay prices tried

MakePlanner = Callable[[PackingSettings], StepPlanner]


def tune(candidates: list[PackingSettings], target_delay: float, make_planner: MakePlanner) -> PackingSettings:
    """Settings with what "auto" left open filled in: delay_price 0 of wlb, thresholds () of wlb_paper; and of several,
    which differ in the number of micro-batches for the same tokens, those that are predicted to train fastest.

    Args:
        target_delay: mean delay in steps that should not be exceeded.
        make_planner: planner on the documents for given settings.
    """
    if len(candidates) > 1:
        resolved = [tune([s], target_delay, make_planner) for s in candidates]
        speeds = [sample(s, make_planner).speed for s in resolved]
        for s, speed in zip(resolved, speeds):
            logger.info(f"{s.n} micro-batches of {s.micro_batch_tokens} tokens: predicted {speed / speeds[0]:.3f}x")
        return resolved[speeds.index(max(speeds))]
    settings = candidates[0]
    if settings.strategy == "wlb" and not settings.delay_price:
        return replace(settings, delay_price=find_delay_price(settings, target_delay, make_planner))
    if settings.strategy == "wlb_paper" and not settings.thresholds:
        return replace(settings, thresholds=find_thresholds(settings, target_delay, make_planner))
    return settings


def sample(settings: PackingSettings, make_planner: MakePlanner, steps: int = _STEPS) -> Quality:
    """Quality of some settings on an endless stream of the documents, with few micro-batches and another order than
    training's."""
    objective, m = settings.objective, settings.n // settings.objective.dp
    windows = max(1, m * settings.micro_batch_tokens // settings.seq_len)
    dp = min(objective.dp, max(2, _MICRO_BATCHES // windows))
    small = replace(
        settings,
        n=dp * m,
        objective=replace(objective, dp=dp),
        epochs=0,
        seed=settings.seed + 1,
    )
    planner = make_planner(small)
    documents = len(planner.order.peek(small.n * small.micro_batch_tokens)[0])
    steps = max(10, min(steps, _DOCUMENTS // documents))
    return measure(planner, steps, min(_WARMUP, steps))


def find_delay_price(settings: PackingSettings, target_delay: float, make_planner: MakePlanner) -> float:
    """The delay_price (to 6%) that trains fastest among those whose mean delay is within target_delay."""
    began = time.perf_counter()

    def judge(price: float) -> tuple[float, float]:
        quality = sample(replace(settings, delay_price=price), make_planner)
        if time.perf_counter() > began + _SILENCE:
            waited = quality.delay_mean_steps
            logger.info(f"Looking for packing.delay_price: {price:.3g} lets tokens wait {waited:.2f} steps")
        return quality.delay_mean_steps, quality.speed

    return search_price(judge, target_delay)


def search_price(judge: Callable[[float], tuple[float, float]], target_delay: float, precision: float = 1.05) -> float:
    """The fastest price within a delay.

    From high prices, with which nobody waits, down to the first one that lets documents wait too long. Far below that
    they all wait for the age limit, and delay is no measure any more.

    Args:
        judge: price -> (mean delay in steps, speed).
        precision: ratio of neighbouring prices below which none is tried between them.
    """
    within: dict[float, float] = {}  # price: speed

    def is_within(price: float) -> bool:
        delay, speed = judge(price)
        if delay <= target_delay:
            within[price] = speed
        return price in within

    price = _HIGHEST
    while is_within(price) and price > _LOWEST:
        price /= _FACTOR
    if price not in within:
        lowest, factor = price * _FACTOR, _FACTOR**0.5
        while factor > precision and within:
            if is_within(lowest / factor):
                lowest /= factor
            factor **= 0.5
    return max(within, key=lambda p: within[p], default=_HIGHEST)


def find_thresholds(settings: PackingSettings, target_delay: float, make_planner: MakePlanner) -> tuple[int, ...]:
    """The thresholds with the least time over ideal among those within target_delay (the shortest delay, if none
    is)."""
    found, began = {}, time.perf_counter()
    for t in candidate_thresholds(settings.seq_len):
        found[t] = sample(replace(settings, thresholds=t), make_planner)
        if time.perf_counter() > began + _SILENCE:
            logger.info(f"Looking for packing.outlier_thresholds: {t} wait {found[t].delay_mean_steps:.2f} steps")
    within = [t for t, q in found.items() if q.delay_mean_steps <= target_delay]
    if not within:
        return min(found, key=lambda t: found[t].delay_mean_steps)
    return min(within, key=lambda t: found[t].time_vs_ideal)


def candidate_thresholds(seq_len: int) -> Iterator[tuple[int, ...]]:
    """One, two or three thresholds, in sixteenths of the context window."""
    sixteenths: list[tuple[int, ...]] = [(a,) for a in range(2, 13, 2)]
    sixteenths += [(a, b) for a, b in product(range(2, 9), range(6, 14, 2)) if a + 2 <= b]
    sixteenths += [(a, a + step, a + 2 * step) for a, step in product((2, 3, 4, 5, 6), (2, 3, 4))]
    for t in sixteenths:
        yield tuple(seq_len * x // 16 for x in t)
