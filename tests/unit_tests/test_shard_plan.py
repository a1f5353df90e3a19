"""Shard plans: one owner for every token, equal tokens, and balance that is counted, not assumed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_wlb.context_parallel.exchange import Shard, shard_meta
from torchtitan_wlb.context_parallel.load_balancer import PlanLoadBalancer
from torchtitan_wlb.context_parallel.selection import KINDS, attention_seconds, build_plan, choose_plan, latency
from torchtitan_wlb.context_parallel.shard_plan import per_document, per_sequence, whole
from torchtitan_wlb.context_parallel.traffic import received_tokens
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import KernelCost, analytic_kernel_cost, measured_kernel_cost
from torchtitan_wlb.data.micro_batch import padded_length

FLAT = KernelCost(1.0, 1, (1.0,), (1.0,), ((1.0,),))
H100 = analytic_kernel_cost(DEVICES["h100"], 4 * 128 * 32 * 3.5, 2 * 2 * 4096)
lengths_and_cp = st.tuples(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=0, max_size=40),
    st.sampled_from([2, 4, 8, 16]),
)


def test_hand_drawn_plans():
    plan = per_document([4, 12], 16, 2)
    assert [c.tolist() for c in plan.chunks] == [
        [[0, 0, 1], [1, 0, 3], [0, 3, 4], [1, 9, 12]],
        [[0, 1, 3], [1, 3, 9]],
    ]
    assert plan.attended_pairs().tolist() == [44, 44]
    queries, keys, positions = plan.segments(1)
    assert queries.tolist() == [2, 6] and keys.tolist() == [3, 9]
    assert positions.tolist() == [0, 1, 2, *range(4, 13)]
    assert plan.token_index(0).tolist() == [0, 4, 5, 6, 3, 13, 14, 15]

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
    for kind, kernel in [*((k, FLAT) for k in KINDS), ("hybrid", H100)]:
        plan = build_plan(kind, lengths, total, cp, kernel)
        owned = np.concatenate([plan.token_index(r) for r in range(cp)])
        assert sorted(owned.tolist()) == list(range(total))
        assert {len(plan.token_index(r)) for r in range(cp)} == {total // cp}
        assert sorted(PlanLoadBalancer(plan)._generate_indices(restore=True)[0].tolist()) == list(range(total))
        # A brute-force count of what each query sees.
        document = np.repeat(np.arange(len(lengths) + 1), [*lengths, total - sum(lengths)])
        position = np.concatenate([np.arange(d) for d in [*lengths, total - sum(lengths)]])
        for r in range(cp):
            index = plan.token_index(r)
            real = document[index] < len(lengths)
            assert plan.attended_pairs()[r] == (position[index] + 1)[real].sum()
            seen = np.zeros(len(index), dtype=np.int64)
            queries, keys, positions = plan.segments(r)
            assert all(d >= 0 for d in np.diff(plan.chunks[r][: len(queries), 1] > 0))  # local ones first
            starts = zip(np.cumsum(queries) - queries, np.cumsum(queries), np.cumsum(keys) - keys, keys)
            for q0, q1, first, n in starts:
                k0, k1 = positions[first], positions[first] + n
                assert np.array_equal(positions[first : first + n], np.arange(k0, k1))
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


def test_adaptive_takes_the_smallest_predicted_latency():
    for lengths in ([16384], [100] * 160, [8192, *[64] * 128], [4000, 300, 300, 300]):
        total = padded_length(sum(lengths), 4, 1, 64)
        seconds = {kind: latency(build_plan(kind, lengths, total, 4, H100), H100) for kind in KINDS}
        assert seconds[choose_plan(lengths, total, 4, "adaptive", H100).kind] == min(seconds.values())
    # Many short documents stay whole; one document must be cut by document or by sequence, which is the same.
    plan = choose_plan([100] * 160, 16000, 4, "adaptive", H100)
    assert plan.kind == "hybrid" and not received_tokens(plan).any()
    assert latency(plan, H100) == attention_seconds(plan, H100).max()  # nothing is sent, so nothing starts


def test_hybrid_cuts_only_the_long_documents():
    lengths = [8192, *[512] * 16]
    plan = build_plan("hybrid", lengths, 16384, 4, H100)
    owners = [{r for r, c in enumerate(plan.chunks) if doc in c[:, 0]} for doc in range(len(lengths))]
    assert len(owners[0]) == 4 and all(len(o) == 1 for o in owners[1:])
    work = attention_seconds(plan, H100)
    assert work.max() / work.mean() < 1.05


@settings(max_examples=150, deadline=None)
@given(lengths_and_cp, st.sampled_from(KINDS))
def test_exchange_brings_every_key_that_is_needed_and_no_other(case, kind):
    """All ranks simulated on packed token numbers: what each assembles is what its segments attend to."""
    lengths, cp = case
    total = padded_length(sum(lengths), cp, 1, 16)
    plan = build_plan(kind, lengths, total, cp, H100)
    shards = [plan.token_index(r) for r in range(cp)]
    metas = [shard_meta(plan, r) for r in range(cp)]
    travels = received_tokens(plan).any()
    shares = [Shard.read(m.index, m.sizes) for m in metas]
    for rank, (meta, share) in enumerate(zip(metas, shares)):
        assert share.travels == travels
        chunks = [
            np.split(shards[s][shares[s].send_index.numpy()], np.cumsum(shares[s].send_splits)[:-1])[rank]
            for s in range(cp)
        ]
        assert [len(c) for c in chunks] == share.recv_splits and share.recv_splits[rank] == share.send_splits[rank] == 0
        received = np.concatenate(chunks)
        assert len(meta.room) == max(2, len(received)) and len(set(received.tolist())) == len(received)
        queries, keys, positions = plan.segments(rank)
        n = len(share.local.ranges())
        assert np.diff(share.local.cu_q.numpy()).tolist() == queries[:n].tolist() == keys[:n].tolist()
        assert np.diff(share.later.cu_q.numpy()).tolist() == queries[n:].tolist()
        assert np.diff(share.later.cu_k.numpy()).tolist() == keys[n:].tolist()
        assert share.n_local == queries[:n].sum() and share.n_later == queries[n:].sum()
        longest = [share.local.longest_q, share.later.longest_q, share.later.longest_k]
        assert longest == [max(x, default=0) for x in (queries[:n], queries[n:], keys[n:])]
        # What the local segments attend to is what they are; the later ones find every key, and nothing else came.
        assert shards[rank][: share.n_local].tolist() == positions[: share.n_local].tolist()
        found = np.concatenate([shards[rank], received])[share.key_source.numpy()]
        assert np.array_equal(found, positions[share.n_local :])
        assert set(received.tolist()) == set(positions[share.n_local :].tolist()) - set(shards[rank].tolist())


def test_whole_documents_do_not_travel():
    plan = build_plan("hybrid", [512] * 32, 16384, 4, H100)
    assert not shard_meta(plan, 0).sizes[7]
    plan = build_plan("hybrid", [12000, *[500] * 8], 16384, 4, H100)
    received = np.mean([len(shard_meta(plan, r).room) for r in range(4)])
    assert 0 < received == received_tokens(plan).mean() < 0.75 * 12000


def test_kernel_cost():
    assert FLAT.seconds(np.array([3]), np.array([5])).tolist() == [3 * 4]  # queries see 3, 4 and 5 keys
    one, tile, two = H100.seconds(np.array([1, 128, 129]), np.array([4096, 4096, 4096]))
    assert one == pytest.approx(tile, rel=0.02) and two > 1.9 * tile
    rows = [(q, k, q * k * 1e-6) for q, k in ((64, 64), (64, 256), (256, 256))]
    measured = measured_kernel_cost(rows, 1.0, 0.0, 0.0)
    for q, k, seconds in rows:
        assert measured.seconds(np.array([q]), np.array([k]))[0] == pytest.approx(seconds)
    between = measured.seconds(np.array([128]), np.array([256]))[0]
    assert 64 * 256e-6 < between < 256 * 256e-6


def test_planning_is_fast():
    import time

    rng = np.random.default_rng(0)
    for n, limit in ((64, 0.025), (2000, 0.3)):  # measured 3 and 40 ms; the limits leave room for a busy machine
        lengths = np.minimum(rng.lognormal(7, 1.2, n), 60_000).astype(int).tolist()
        total = padded_length(sum(lengths), 16, 1, 64)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            shard_meta(choose_plan(lengths, total, 16, "adaptive", H100), 3)
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < limit, seconds


def test_one_rank_keeps_everything_in_order():
    plan = choose_plan([3, 5], 16, 1, "adaptive", FLAT)
    assert plan.kind == "whole" and plan.token_index(0).tolist() == list(range(16))
    assert [x.tolist() for x in plan.segments(0)] == [[3, 5], [3, 5], list(range(8))]
    assert [x.tolist() for x in whole([], 16).segments(0)] == [[], [], []]


@pytest.mark.parametrize(
    "tokens, cp, tp, multiple, expected",
    [(0, 1, 1, 1, 2), (5, 2, 1, 1, 8), (5, 2, 4, 1, 8), (100, 3, 2, 16, 144), (64, 2, 1, 64, 64)],
)
def test_padded_length(tokens, cp, tp, multiple, expected):
    assert padded_length(tokens, cp, tp, multiple) == expected
