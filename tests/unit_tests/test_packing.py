"""Packing: nothing is lost, nothing is too long, logs say what a brute-force count says, any state gives the same
future."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_wlb.config import ConfigError, Packing, Training
from torchtitan_wlb.models.llama import llama_configs
from torchtitan_wlb.packing.cost_model import CostModel, analytic_cost_model, imbalance
from torchtitan_wlb.packing.outlier_queue import OutlierQueues, Span
from torchtitan_wlb.packing.packers import Plain, WLBPaper, deal
from torchtitan_wlb.packing.planner import StepPlanner, mean_imbalance, reconcile, resolve_settings

COST = CostModel(pair_cost=0.05, token_cost=1.0)


def make_planner(
    lengths, n=4, seq_len=100, strategy="wlb", thresholds=(40, 70), factor=1.5, epochs=0, seed=0, multiple=1
):
    lengths = np.asarray(lengths)
    s = resolve_settings(
        Training(seq_len=seq_len, global_batch_size=n, epochs=epochs, seq_len_multiple=multiple),
        Packing(strategy=strategy, outlier_thresholds=thresholds, max_len_factor=factor),
        seed=seed, default_n=n, cost=COST, documents="x",
    )  # fmt: skip
    return StepPlanner(s, [len(lengths)], [1.0], lambda ids: lengths[ids])


streams = st.lists(st.one_of(st.integers(2, 30), st.integers(2, 100)), min_size=1, max_size=200)


@settings(max_examples=60, deadline=None)
@given(streams, st.sampled_from([1, 2, 4, 7]), st.sampled_from(["plain", "wlb_paper", "wlb"]), st.sampled_from([1, 10]))
def test_conservation_caps_and_statistics_at_every_step(lengths, n, strategy, multiple):
    planner = make_planner(lengths, n=n, strategy=strategy, multiple=multiple)
    reference = make_planner(lengths, n=n, strategy=strategy).order
    arrived: dict[tuple[int, int], list[int]] = {}  # (id, copy) -> [length, tokens trained, arrival step]
    copies: dict[int, int] = {}
    drawn_tokens = 0
    for _ in range(12):
        plan = next(planner)
        while drawn_tokens < plan.step * n * 100:
            id, length = reference.next()
            copies[id] = copies.get(id, 0) + 1
            arrived[id, copies[id]] = [length, 0, plan.step]
            drawn_tokens += length
        assert len(plan.micro_batches) == n
        delays = []
        for mb in plan.micro_batches:
            tokens = sum(span.length for span in mb)
            assert -(-tokens // multiple) * multiple <= (100 if strategy == "plain" else 150)
            for span in mb:
                # Copies of a document (later epochs) leave in the order in which they came.
                owner = next(
                    r
                    for c in range(1, copies[span.id] + 1)
                    if (r := arrived[span.id, c])[2] == span.arrival and r[1] < r[0]
                )
                assert span.start == (owner[1] if strategy == "plain" else 0)
                owner[1] += span.length
                delays += [plan.step - owner[2]] * span.length
        open_documents = [r for r in arrived.values() if r[1] < r[0]]
        assert plan.waiting[:2] == (len(open_documents), sum(r[0] - r[1] for r in open_documents))
        assert plan.waiting[2] == max((plan.step - r[2] for r in open_documents), default=0)
        assert plan.delay == (pytest.approx(np.mean(delays) if delays else 0.0), max(delays, default=0))
        assert sum(len(v) for v in plan.state["packer"]) == len(open_documents)
        if strategy == "plain":
            assert plan.tokens == n * 100


@settings(max_examples=30, deadline=None)
@given(streams, st.integers(0, 6), st.sampled_from(["plain", "wlb"]))
def test_any_state_gives_the_same_future(lengths, k, strategy):
    planner = make_planner(lengths, strategy=strategy)
    plans = [next(planner) for _ in range(10)]
    again = make_planner(lengths, strategy=strategy)
    if k:
        again.restore(json.loads(json.dumps(plans[k - 1].state)))
    assert [next(again).hash() for _ in range(k, 10)] == [p.hash() for p in plans[k:]]


@pytest.mark.parametrize("strategy", ["plain", "wlb"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_finite_data_is_trained_exactly_once_an_epoch_and_flushed(strategy, epochs):
    lengths = np.random.default_rng(0).integers(2, 100, 157)
    planner = make_planner(lengths, strategy=strategy, epochs=epochs)
    trained: dict[int, int] = {}
    for plan in planner:
        for mb in plan.micro_batches:
            for span in mb:
                trained[span.id] = trained.get(span.id, 0) + span.length
    assert trained == {i: epochs * int(d) for i, d in enumerate(lengths)}
    assert plan.waiting == (0, 0, 0)


def test_plain_cuts_at_the_window():
    packer = Plain(2, 10)
    spans = [Span(0, 0, 7, 1), Span(1, 0, 9, 1), Span(2, 0, 5, 1)]
    assert packer.pack(spans, False) == [
        [Span(0, 0, 7, 1), Span(1, 0, 3, 1)],
        [Span(1, 3, 9, 1), Span(2, 0, 4, 1)],
    ]
    assert list(packer.waiting()) == [Span(2, 4, 5, 1)]


def test_outliers_leave_together():
    queues = OutlierQueues((10, 20), 2)
    assert not queues.put(Span(0, 0, 9, 1))
    assert queues.put(Span(1, 0, 10, 1)) and queues.put(Span(2, 0, 25, 1))
    assert queues.release() == []
    assert queues.put(Span(3, 0, 19, 2))
    assert queues.release() == [Span(1, 0, 10, 1), Span(3, 0, 19, 2)]
    assert queues.release(drain=True) == [Span(2, 0, 25, 1)]


def test_what_does_not_fit_is_kept():
    packer = WLBPaper(2, s_max=10, multiple=1, thresholds=(), cost=COST)
    spans = [Span(i, 0, d, 1) for i, d in enumerate((6, 6, 3, 6))]
    first = packer.pack(spans, False)
    assert sorted(s.length for mb in first for s in mb) == [3, 6, 6]
    assert [s.length for s in packer.waiting()] == [6]
    assert [s.length for mb in packer.pack([], False) for s in mb] == [6]


def test_wlb_balances_where_plain_does_not():
    lengths = np.minimum(np.random.default_rng(1).lognormal(4, 1.3, 5000), 998).astype(int) + 2
    results = {
        s: mean_imbalance(make_planner(lengths, strategy=s, seq_len=1000, thresholds=(300, 600), n=4), 10, 100)
        for s in ("plain", "wlb")
    }
    assert results["plain"] - 1 > 4 * (results["wlb"] - 1), results


def test_deal_is_even_complete_and_rotates():
    work = [9.0, 1.0, 5.0, 5.0, 2.0, 8.0]
    first = deal(work, 3, step=0, sort=True)
    assert sorted(b for hand in first for b in hand) == list(range(6)) and {len(h) for h in first} == {2}
    assert imbalance([sum(work[b] for b in hand) for hand in first]) <= 1.01
    assert deal(work, 3, step=0, sort=False) == [[0, 1], [2, 3], [4, 5]]
    holders = {next(r for r in range(3) if 0 in deal(work, 3, step, sort=True)[r]) for step in range(6)}
    slots = {next(h.index(0) for h in deal(work, 3, step, sort=True) if 0 in h) for step in range(6)}
    assert holders == {0, 1, 2} and slots == {0, 1}


def test_h100_cost_model_is_the_papers():
    args = llama_configs["7B"]
    cost = analytic_cost_model(args.linear_flops_per_token(32000), args.attention_flops_per_pair(), "h100")
    assert 26_000 < 2 * cost.token_cost / cost.pair_cost < 30_000


def test_resume_settings_are_the_stored_ones():
    def resolve(n, thresholds, cost=COST, **kw):
        return resolve_settings(
            Training(seq_len=100, global_batch_size=n, **kw), Packing(outlier_thresholds=thresholds),
            seed=0, default_n=2, cost=cost, documents="x",
        )  # fmt: skip

    from dataclasses import asdict

    stored = json.loads(json.dumps(asdict(resolve(4, (40,)))))
    kept = reconcile(stored, resolve(-1, (), CostModel(7.0, 7.0)), {"n", "thresholds", "pair_cost", "token_cost"})
    assert (kept.n, kept.thresholds, kept.pair_cost) == (4, (40,), COST.pair_cost)
    with pytest.raises(ConfigError, match=r"global_batch_size: the checkpoint was made with 4, configured is 8"):
        reconcile(stored, resolve(8, (40,)), set())
