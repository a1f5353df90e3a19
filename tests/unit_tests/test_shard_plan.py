"""Shard plans: one owner for every token, equal tokens, and balance that is counted, not assumed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_wlb.context_parallel.selection import attention_cost, choose_plan
from torchtitan_wlb.context_parallel.shard_plan import BUILDERS, per_document, per_sequence, whole
from torchtitan_wlb.data.micro_batch import padded_length

lengths_and_cp = st.tuples(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=0, max_size=40), st.sampled_from([2, 4, 8])
)


def test_hand_drawn_plans():
    plan = per_document([4, 12], 16, 2)
    assert [c.tolist() for c in plan.chunks] == [
        [[0, 0, 1], [0, 3, 4], [1, 0, 3], [1, 9, 12]],
        [[0, 1, 3], [1, 3, 9]],
    ]
    assert plan.attended_pairs().tolist() == [44, 44]
    assert plan.segments(1).tolist() == [[0, 2, 0, 3], [2, 8, 4, 13]]
    assert plan.token_index(0).tolist() == [0, 3, 4, 5, 6, 13, 14, 15]

    plan = per_sequence([4, 12], 16, 2)
    assert [c.tolist() for c in plan.chunks] == [[[0, 0, 4], [1, 8, 12]], [[1, 0, 8]]]
    assert plan.attended_pairs().tolist() == [10 + 42, 36]


def test_left_over_tokens_make_longer_chunks_not_single_tokens():
    # 6 = 4 x 1 + 2: the early chunks get one token more (2, 2, 1, 1), the middle two join on one rank, padding is
    # shared.
    plan = per_document([6], 8, 2)
    assert [c.tolist() for c in plan.chunks] == [[[0, 2, 5], [1, 0, 1]], [[0, 0, 2], [0, 5, 6], [1, 1, 2]]]
    # 5 = 4 x 1 + 1: the latest chunk gets it.
    plan = per_document([5], 8, 2)
    assert [c.tolist() for c in plan.chunks] == [[[0, 0, 1], [0, 3, 5], [1, 0, 1]], [[0, 1, 3], [1, 1, 3]]]


@settings(max_examples=200, deadline=None)
@given(lengths_and_cp, st.sampled_from([1, 16, 64]))
def test_every_token_has_one_owner_and_every_rank_equal_tokens(case, multiple):
    lengths, cp = case
    total = padded_length(sum(lengths), cp, 1, multiple)
    for build in BUILDERS.values():
        plan = build(lengths, total, cp)
        owned = np.concatenate([plan.token_index(r) for r in range(cp)])
        assert sorted(owned.tolist()) == list(range(total))
        assert {len(plan.token_index(r)) for r in range(cp)} == {total // cp}
        assert np.array_equal(owned[plan.gathered_index()], np.arange(total))
        # A brute-force count of what each query sees.
        document = np.repeat(np.arange(len(lengths) + 1), [*lengths, total - sum(lengths)])
        position = np.concatenate([np.arange(d) for d in [*lengths, total - sum(lengths)]])
        for r in range(cp):
            index = plan.token_index(r)
            real = document[index] < len(lengths)
            assert plan.attended_pairs()[r] == (position[index] + 1)[real].sum()
            seen = np.zeros(len(index), dtype=np.int64)
            for q0, q1, k0, k1 in plan.segments(r):
                own = document[index[q0:q1]]
                assert set(own) == set(document[k0:k1]) and len(set(own)) == 1
                assert position[k0] == 0 and np.array_equal(index[q0:q1], np.arange(k1 - (q1 - q0), k1))
                seen[q0:q1] += np.arange(k1 - k0 - (q1 - q0), k1 - k0) + 1
            assert np.array_equal(seen, np.where(real, position[index] + 1, 0))


@settings(max_examples=400, deadline=None)
@given(lengths_and_cp)
def test_per_document_is_balanced_to_the_left_over_tokens(case):
    """max - mean of attended pairs stays within two left-over tokens of the longest document, real tokens within
    one."""
    lengths, cp = case
    if not lengths:
        return
    plan = per_document(lengths, padded_length(sum(lengths), cp, 1, 1), cp)
    work = plan.attended_pairs()
    assert work.max() - work.mean() <= 2 * max(lengths)
    real = [int((c[c[:, 0] < len(lengths), 2] - c[c[:, 0] < len(lengths), 1]).sum()) for c in plan.chunks]
    assert max(real) - min(real) <= 1
    if all(d % (2 * cp) == 0 for d in lengths):
        assert len(set(work.tolist())) == 1


def test_per_document_on_long_tailed_lengths():
    rng = np.random.default_rng(0)
    worst = {2: 1.0, 4: 1.0, 8: 1.0}
    for _ in range(50):
        lengths = np.minimum(rng.lognormal(8, 1.2, 30), 100_000).astype(int).tolist()
        for cp in worst:
            work = per_document(lengths, padded_length(sum(lengths), cp, 1, 64), cp).attended_pairs()
            worst[cp] = max(worst[cp], work.max() / work.mean())
    assert max(worst.values()) < 1.001, worst


def test_adaptive_takes_the_smaller_predicted_maximum():
    for lengths in ([16384], [100] * 160, [8192, *[64] * 128]):
        total = padded_length(sum(lengths), 4, 1, 64)
        costs = {name: attention_cost(build(lengths, total, 4), 128).max() for name, build in BUILDERS.items()}
        chosen = choose_plan(lengths, total, 4, "adaptive", 128)
        assert costs[chosen.kind] == min(costs.values())
    # Many short documents: whole tiles make per-document cutting expensive; one document: both are balanced.
    assert choose_plan([100] * 160, 16000, 4, "adaptive", 128).kind == "per_sequence"


def test_one_rank_keeps_everything_in_order():
    plan = choose_plan([3, 5], 16, 1, "adaptive", 1)
    assert plan.kind == "whole" and plan.token_index(0).tolist() == list(range(16))
    assert plan.segments(0).tolist() == [[0, 3, 0, 3], [3, 8, 3, 8]]
    assert whole([], 16).segments(0).tolist() == []


@pytest.mark.parametrize(
    "tokens, cp, tp, multiple, expected",
    [(0, 1, 1, 1, 2), (5, 2, 1, 1, 8), (5, 2, 4, 1, 8), (100, 3, 2, 16, 144), (64, 2, 1, 64, 64)],
)
def test_padded_length(tokens, cp, tp, multiple, expected):
    assert padded_length(tokens, cp, tp, multiple) == expected
