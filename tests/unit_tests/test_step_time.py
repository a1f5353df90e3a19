"""The time model of a step: against the textbook, against a plain fixpoint of its rules, and the order it chooses."""

import itertools

import numpy as np
import pytest

from torchtitan_wlb.cost.step_time import KINDS, StageCosts, StepModel, without_pipelining
from torchtitan_wlb.parallelisms.schedules import bubble, count_stages, schedule_actions, schedule_problem

SCHEDULES = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("LoopedBFS", 2),
    ("InterleavedZeroBubble", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


def model_of(schedule, pp, m, per_rank=2, transfer=(0.0, 0.0), recomputed=0.0):
    n = count_stages(schedule, pp, per_rank)
    even = (1 / n,) * n
    return StepModel(schedule_actions(schedule, pp, m, per_rank), StageCosts(even, even, recomputed, transfer))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 5), (4, 4), (4, 8), (8, 12)])
def test_equal_micro_batches_have_the_textbook_bubble(schedule, pp, m):
    step = model_of(schedule, pp, m).predict(np.zeros(m), np.ones(m))
    assert step.bubble == pytest.approx((pp - 1) / (m + pp - 1))
    assert step.seconds == pytest.approx((m + pp - 1) / pp)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 4), (4, 8)])
def test_schedules_compute_everything_once_and_finish_when_the_rules_say(schedule, per_rank, pp, m):
    if schedule_problem(schedule, pp, m):
        pytest.skip("not legal")
    actions = schedule_actions(schedule, pp, m, per_rank)
    n = count_stages(schedule, pp, per_rank)
    done = sorted(a for each in actions for a in each)
    for s, i in itertools.product(range(n), range(m)):
        assert ("F", s, i) in done
        assert (("B", s, i) in done) != (("I", s, i) in done and ("W", s, i) in done)
    assert len(done) == len(set(done))
    whole = schedule_actions(schedule, pp, m, per_rank, split=False)
    assert sorted(a for each in whole for a in each) == sorted(itertools.product("BF", range(n), range(m)))
    StepModel(whole, StageCosts((1 / n,) * n, (1 / n,) * n))  # no circle

    rng = np.random.default_rng(1)
    attention, linear, tokens = rng.pareto(1.5, m), rng.random(m) + 0.5, rng.integers(1, 100, m)
    model = model_of(schedule, pp, m, per_rank, transfer=(0.01, 0.001), recomputed=0.5)
    seconds = model.costs.seconds(attention, linear)
    rank_of = {a: r for r, each in enumerate(actions) for a in each}
    end = dict.fromkeys(rank_of, 0.0)
    for _ in range(len(end) + 1):  # longest paths, until nothing changes
        for each in actions:
            free = 0.0
            for kind, s, i in each:
                inputs = [("F", s - 1, i)] if kind == "F" else [(k, s + 1, i) for k in "BI"] if kind in "BI" else []
                ready = [
                    end[x] + (0.01 + 0.001 * tokens[i] if rank_of[x] != rank_of[kind, s, i] else 0.0)
                    for x in inputs
                    if x in end
                ]
                free = max([free, *ready]) + seconds[KINDS.index(kind), s, i]
                end[kind, s, i] = free
    step = model.predict(attention, linear, tokens)
    assert step.seconds == pytest.approx(max(end.values()))
    # All work is done once, forwards of half the blocks twice, without their attention.
    assert step.busy.sum() == pytest.approx((attention + linear).sum() + 0.5 * linear.sum() / 3)
    # The critical path has no gap: its actions and transfers add up to the step.
    path = 0.0
    for (r0, a0), (r1, _) in itertools.pairwise([*step.critical_path, (step.critical_path[-1])]):
        path += seconds[KINDS.index(a0[0]), a0[1], a0[2]] + (0.01 + 0.001 * tokens[a0[2]] if r0 != r1 else 0.0)
    assert path == pytest.approx(step.seconds)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8)])
def test_the_chosen_order_is_the_best_of_few_and_never_worse_than_given(schedule, per_rank, pp, m):
    if schedule_problem(schedule, pp, m):
        pytest.skip("not legal")
    rng = np.random.default_rng(2)
    model = model_of(schedule, pp, m, per_rank)
    for _ in range(5):
        attention, linear = rng.pareto(1.5, m), np.ones(m)

        def seconds(order, attention=attention, linear=linear):
            return model.predict(attention[list(order)], linear[list(order)]).seconds

        order = model.choose_order(attention, linear)
        assert sorted(order) == list(range(m))
        others = itertools.permutations(range(m)) if m <= 4 else [rng.permutation(m) for _ in range(100)]
        best = min(seconds(o) for o in others)
        assert seconds(order) <= best * (1 + 1e-5 if m <= 4 else 1.05)
        assert seconds(order) <= seconds(range(m)) * (1 + 1e-5)


def test_one_rank_and_a_circle():
    step = without_pipelining(3, recomputed=1.0).predict(np.array([3.5, 0, 0]), np.ones(3))
    assert step.seconds == pytest.approx(3.5 + 3 + 1) and step.bubble == pytest.approx(0)
    assert without_pipelining(3).choose_order(np.arange(3.0), np.ones(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="wait for each other"):
        StepModel([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], StageCosts((0.5, 0.5), (0.5, 0.5)))


@pytest.mark.parametrize("pp, m", [(2, 4), (4, 4), (4, 16)])
def test_the_bubble_is_that_of_the_textbook(pp, m):
    for schedule, v in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)):
        assert bubble(schedule, pp, m) == pytest.approx((pp - 1) / v)
    assert bubble("Interleaved1F1B", pp, m, 4) == pytest.approx((pp - 1) / 4)
    assert 0 < bubble("InterleavedZeroBubble", pp, m) < (pp - 1) / 2
    assert bubble("1F1B", 1, m) == 0.0
