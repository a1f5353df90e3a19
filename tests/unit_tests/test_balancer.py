"""The door for other trainers gives what the planner gives, from an array or a stream, and goes on from any state."""

import itertools
import json

import numpy as np
import pytest

from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.packing import Balancer

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 2000), 1, 1000).astype(int)
COST = CostModel.of_equal_length(300)


def balancer(lengths=LENGTHS, **changes) -> Balancer:
    return Balancer(lengths, **({"micro_batches": 8, "window": 1000, "cost": COST} | changes))


def ids(step) -> list[list[list[int]]]:
    return [[mb.tolist() for mb in rank] for rank in step.ranks]


@pytest.mark.parametrize("changes", [{}, {"data_parallel": 4}, {"data_parallel": 2, "bubble": 1.5, "tokens": 500}])
@pytest.mark.parametrize("stream", [False, True])
def test_every_document_is_trained_once_within_the_limits(changes, stream):
    steps = list(balancer(iter(LENGTHS.tolist()) if stream else LENGTHS, **changes))
    dp = changes.get("data_parallel", 1)
    trained = []
    for step in steps:
        assert len(step.ranks) == dp and {len(rank) for rank in step.ranks} == {8 // dp}
        for rank, work in zip(step.ranks, step.work):
            for documents, seconds in zip(rank, work):
                assert LENGTHS[documents].sum() <= 1500
                assert seconds == pytest.approx(COST.documents(LENGTHS[documents]).sum())
                trained += documents.tolist()
    assert sorted(trained) == list(range(2000)) and steps[-1].waiting == 0
    tokens = [sum(LENGTHS[mb].sum() for rank in step.ranks for mb in rank) for step in steps[:-4]]
    assert np.mean(tokens) == pytest.approx(8 * changes.get("tokens", 1000), rel=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_state_goes_on(stream):
    def start(state=None):
        return balancer(iter(LENGTHS.tolist()) if stream else LENGTHS, data_parallel=2, state=state)

    steps = list(itertools.islice(start(), 12))
    for k in (0, 5):
        again = start(json.loads(json.dumps(steps[k].state)))
        assert [ids(s) for s in itertools.islice(again, 11 - k)] == [ids(s) for s in steps[k + 1 :]]


def test_a_cost_function_counts():
    def cost(lengths):
        return lengths.astype(float) ** 2

    for step in itertools.islice(balancer(cost=cost, micro_batches=4, data_parallel=4), 5, 25):
        assert step.work == [[pytest.approx(cost(LENGTHS[mb]).sum()) for mb in rank] for rank in step.ranks]
    equal = [np.max(s.work) / np.mean(s.work) for s in itertools.islice(balancer(cost=cost, data_parallel=8), 5, 40)]
    blind = [np.max(w) / np.mean(w) for w in (
        [cost(LENGTHS[rank[0]]).sum() for rank in s.ranks]
        for s in itertools.islice(balancer(cost=lambda d: d * 1.0, data_parallel=8), 5, 40)
    )]  # fmt: skip
    assert np.mean(equal) - 1 < 0.5 * (np.mean(blind) - 1)


@pytest.mark.parametrize(
    "lengths, changes, message",
    [
        (LENGTHS, {"window": 100}, "lengths must be 1 to 100"),
        ([], {}, "lengths must be 1 to 1000"),
        ([3, 0], {}, "lengths must be 1 to 1000"),
        (iter([3, 2000]), {}, "document 1 has 2000 tokens"),
        (LENGTHS, {"max_tokens": 900}, "a document of 1000 tokens"),
        (LENGTHS, {"max_delay": 1}, "max_delay 1: must be at least"),
        (LENGTHS, {"micro_batches": 6, "data_parallel": 4}, "6 micro-batches on 4 ranks"),
    ],
)
def test_what_cannot_be_is_named(lengths, changes, message):
    with pytest.raises(ValueError, match=message):
        next(balancer(lengths, **changes))


def test_a_state_of_other_documents_is_refused():
    state = list(itertools.islice(balancer(), 5))[-1].state
    with pytest.raises(ValueError, match="does not fit the documents"):
        balancer(LENGTHS[:20], state=state)
    state = list(itertools.islice(balancer(iter(LENGTHS.tolist())), 5))[-1].state
    with pytest.raises(ValueError, match="does not fit the documents"):
        balancer(iter((LENGTHS + 1 - (LENGTHS > 1) * 2).tolist()), state=state)
