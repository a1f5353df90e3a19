"""From files to micro-batches: policies and counts, labels, masks, order, tokenizers."""

import json

import numpy as np
import pytest

from torchtitan_wlb.config import Packing, Training
from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.step_time import without_pipelining
from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.data.prepare import apply_length_policy
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.sources import read_functions
from torchtitan_wlb.data.step_builder import Layout, StepBuilder
from torchtitan_wlb.data.synthetic import synthetic_lengths
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.loss import IGNORE_INDEX
from torchtitan_wlb.packing.document_order import DocumentOrder, permute
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.settings import resolve_settings
from torchtitan_wlb.packing.spans import as_spans

COST = CostModel(pair_flops=0.05, token_cost=1.0, knots=(1,), rates=(1.0,))
BYTES = Tokenizer("bytes", add_bos=True, add_eos=True)


def spec(name, path, seq_len=16, policy="split", column="text", mask=""):
    return SourceSpec(name, str(path), column, mask, seq_len, policy)


@pytest.fixture
def folder(tmp_path):
    for name, text in (("a.txt", "hello"), ("b.txt", ""), ("c.txt", "x" * 30), ("d/e.txt", "ünï")):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "texts"


@pytest.mark.parametrize("policy, lengths", [("split", [7, 16, 16, 7]), ("truncate", [7, 16, 7]), ("drop", [7, 7])])
def test_long_documents_and_empty_ones(folder, tmp_path, policy, lengths):
    d = Documents([spec("text", folder, policy=policy)], [1.0], BYTES, str(tmp_path / "cache"))
    assert d.lengths(np.arange(len(d))).tolist() == lengths
    (counts,) = d.counts()
    assert {k: counts[k] for k in ("rows", "empty", "long", "documents")} == {
        "rows": 4,
        "empty": 1,
        "long": 1,
        "documents": len(lengths),
    }
    assert BYTES.decode(d.tokens(len(d) - 1, 0, 7).tolist()) == "ünï"
    if policy == "split":
        # Pieces are documents: 256 x*30 257 is cut into 16 + 16.
        assert d.tokens(1, 0, 16).tolist() == [256] + [120] * 15
        assert d.tokens(2, 0, 16).tolist() == [120] * 15 + [257]


def test_labels_are_shifted_inside_the_document(folder, tmp_path):
    d = Documents([spec("text", folder)], [1.0], BYTES, str(tmp_path / "cache"))
    assert d.labels(0, 0, 7, -1).tolist() == [*b"hello", 257, -1]
    assert d.labels(0, 2, 5, -1).tolist() == [*b"llo"]  # a cut span still has a target for its last token
    assert [d.count_targets(as_spans([(0, *cut, 1)])) for cut in ((0, 7), (2, 5), (5, 7))] == [6, 3, 1]
    assert d.count_targets(as_spans([(0, 0, 7, 1), (2, 3, 16, 1), (3, 0, 7, 1)])) == 6 + 12 + 6


def test_the_cache_is_reused_and_depends_on_the_files(folder, tmp_path):
    cache = tmp_path / "cache"
    first = Documents([spec("text", folder)], [1.0], BYTES, str(cache)).content
    assert Documents([spec("text", folder)], [1.0], BYTES, str(cache)).content == first
    assert len(list(cache.iterdir())) == 1
    (folder / "a.txt").write_text("hello, more")
    assert Documents([spec("text", folder)], [1.0], BYTES, str(cache)).content != first
    assert len(list(cache.iterdir())) == 2


def test_json_parquet_tokens_flat_and_synthetic_sources(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [[1, 2, 3, 4], [], [5], [6, 7, 8]]
    masks = [[1, 1, 0, 1], [], [1], [1, 0, 0]]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"body": t}) for t in ("ab", "c")))
    pq.write_table(pa.table({"body": ["ab", "c"]}), tmp_path / "t.parquet")
    pq.write_table(pa.table({"ids": rows, "mask": masks}), tmp_path / "ids.parquet")
    np.array([1, 2, 3, 4, 5, 6], dtype=np.uint16).tofile(tmp_path / "flat.bin")
    (tmp_path / "flat.json").write_text(json.dumps({"dtype": "uint16", "lengths": [4, 2]}))
    (tmp_path / "lengths.json").write_text("[3, 40, 7]")

    def load(*specs):
        return Documents(list(specs), [1.0] * len(specs), BYTES, str(tmp_path / "cache"))

    for source, file in (("json", "t.jsonl"), ("parquet", "t.parquet")):
        d = load(spec(source, tmp_path / file, column="body"))
        assert [d.tokens(i, 0, n).tolist() for i, n in ((0, 4), (1, 3))] == [[256, 97, 98, 257], [256, 99, 257]]

    # Document [5] has one token; [6, 7, 8] has targets 7 and 8, both masked: neither has a target.
    d = load(spec("tokens", tmp_path / "ids.parquet", column="ids", mask="mask"))
    assert len(d) == 1 and d.counts()[0]["no_target"] == 2 and d.counts()[0]["empty"] == 1
    assert d.labels(0, 0, 4, -1).tolist() == [2, -1, 4, -1]
    assert [d.count_targets(as_spans([(0, 0, stop, 1)])) for stop in (4, 2)] == [2, 1]

    both = load(spec("tokens", tmp_path / "flat.bin"), spec("synthetic", tmp_path / "lengths.json", seq_len=16))
    assert both.sizes == [2, 5] and both.lengths(np.arange(7)).tolist() == [4, 2, 3, 16, 16, 8, 7]
    assert both.tokens(1, 0, 2).tolist() == [5, 6]
    assert np.array_equal(both.tokens(4, 2, 9), both.tokens(4, 0, 16)[2:9])
    with pytest.raises(ConfigError, match="dataset_column"):
        load(spec("json", tmp_path / "t.jsonl", column="text"))
    with pytest.raises(ConfigError, match="no file found"):
        load(spec("text", tmp_path / "nothing"))


def test_sources_that_cannot_be_trained_on(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    def load(name, path, **kw):
        return Documents([spec(name, path, **kw)], [1.0], BYTES, str(tmp_path / "cache"))

    pq.write_table(pa.table({"ids": [[1, 2, 400]]}), tmp_path / "ids.parquet")
    with pytest.raises(ConfigError, match=r"has ids 1 to 400, --model.tokenizer has 0 to 257"):
        load("tokens", tmp_path / "ids.parquet", column="ids")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(
        ConfigError, match=r"dataset json: .*broken.jsonl, line 2: Expecting value.*--training.bad_rows skip"
    ):
        load("json", tmp_path / "broken.jsonl")
    np.array([1, 2], dtype=np.uint16).tofile(tmp_path / "flat.bin")
    with pytest.raises(ConfigError, match=r"flat.json is missing"):
        load("tokens", tmp_path / "flat.bin")
    (tmp_path / "flat.json").write_text(json.dumps({"dtype": "uint16", "lengths": [3]}))
    with pytest.raises(ConfigError, match=r"2 ids, but the lengths in .* add up to 3"):
        load("tokens", tmp_path / "flat.bin")
    (tmp_path / "flat.json").write_text(json.dumps({"dtype": "uint16", "lengths": [2]}))
    assert len(load("tokens", tmp_path / "flat.bin")) == 1


def test_loss_masks_are_0_or_not(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"ids": [[1, 2, 3, 4]], "mask": [[1, 2, 2, 0]]}), tmp_path / "ids.parquet")
    d = Documents(
        [spec("tokens", tmp_path / "ids.parquet", column="ids", mask="mask")], [1.0], BYTES, str(tmp_path / "c")
    )
    assert d.labels(0, 0, 4, -1).tolist() == [2, 3, -1, -1] and d.count_targets(as_spans([(0, 0, 4, 1)])) == 2


def test_synthetic_distribution_is_long_tailed():
    lengths = synthetic_lengths("wlb_128k:50000")
    assert 3_000 < lengths.mean() < 5_000 and 2_900 < np.median(lengths) < 3_600
    assert lengths[lengths >= 32_768].sum() / lengths.sum() > 0.1
    assert synthetic_lengths("wlb_128k:1000:0.5").max() <= 62_500


def test_functions_are_documents(tmp_path):
    (tmp_path / "m.py").write_text(
        "import os\ndef f(x):\n    def g(): pass\n    return x\nclass C:\n    async def h(self):\n        return 1\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert list(read_functions(str(tmp_path / "broken.py"))) == []
    assert list(read_functions(str(tmp_path / "m.py"))) == [
        "def f(x):\n    def g(): pass\n    return x\n",
        "async def h(self):\n    return 1\n",
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000, 4097])
def test_every_epoch_is_a_permutation(n):
    orders = [permute(np.arange(n), n, (seed, 0, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(permute(np.arange(n)[n // 2 :], n, (0, 0, 0)), orders[0][n // 2 :])
    if n > 3:
        assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], orders[2])
        displaced = np.abs(orders[0] - np.arange(n)).mean() / n
        assert 0.2 < displaced < 0.46 or n < 100  # a random permutation moves by n / 3 on average


def draw(order: DocumentOrder, tokens: int) -> list[tuple[int, int]]:
    ids, lengths = order.peek(tokens)
    order.advance(ids)
    return list(zip(ids.tolist(), lengths.tolist()))


def test_sources_are_mixed_by_tokens():
    lengths = np.array([10] * 50 + [100] * 50)

    def new():
        return DocumentOrder([50, 50], [3.0, 1.0], lambda ids: lengths[ids], seed=0)

    drawn = draw(new(), 40_000)
    tokens = [sum(d for id, d in drawn if (id < 50) == first) for first in (True, False)]
    assert tokens[0] / tokens[1] == pytest.approx(3.0, rel=0.02)
    # Always the source that is furthest behind its share.
    total = [0, 0]
    for id, d in drawn:
        assert total[0] / 3.0 <= total[1] / 1.0 if id < 50 else total[1] / 1.0 <= total[0] / 3.0
        total[int(id >= 50)] += d
    # However it is drawn, and after any state, the order is the same.
    steps, order = [], new()
    for tokens in (1, 10, 7777, 0, 500):
        steps += draw(order, tokens)
    other = new()
    other.restore(json.loads(json.dumps(order.state())))
    assert steps + draw(other, 5000) == drawn[: len(steps) + len(draw(order, 5000))]


def test_finite_epochs_end():
    order = DocumentOrder([3], [1.0], lambda ids: np.ones(len(ids), int), seed=0, epochs=2)
    drawn = [id for id, _ in draw(order, 2) + draw(order, 100)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [0, 1, 2] and order.exhausted and draw(order, 5) == []


def builder(documents: Documents) -> StepBuilder:
    """For one rank, lengths in multiples of 4."""
    unused = analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0)
    layout = Layout(1, 0, 1, 0, 1, 0, "adaptive", unused, without_pipelining(1))
    training = Training(seq_len=16, seq_len_multiple=4)
    settings = resolve_settings(training, Packing(), n=1, objective=StepObjective(1, 0.0), seed=0, cost=COST)
    return StepBuilder(documents, settings, layout)


def test_micro_batch_of_hand_written_documents(folder, tmp_path):
    d = Documents([spec("text", folder)], [1.0], BYTES, str(tmp_path / "cache"))
    mb, _ = builder(d).micro_batch(as_spans([(0, 0, 7, 1), (3, 0, 3, 1)]))
    assert mb.tokens.tolist() == [[256, *b"hello", 257, 256, *"ü".encode(), 0, 0]]
    i = IGNORE_INDEX
    assert mb.labels.tolist() == [[*b"hello", 257, i, *"ün".encode()[:3], i, i]]
    assert mb.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 0]]
    assert mb.attention.index[:3].tolist() == [0, 7, 10] and mb.attention.sizes[:3].tolist() == [2, 10, 7]
    assert mb.lengths == [7, 3] and mb.n_tokens == 12
    empty, _ = builder(d).micro_batch(as_spans([]))
    assert empty.n_tokens == 4 and (empty.labels == i).all() and empty.attention.sizes[:3].tolist() == [0, 0, 0]


def test_policy_counts():
    rows, counts = apply_length_policy(np.array([0, 5, 25]), 10, "split")
    assert rows.tolist() == [[1, 0, 5], [2, 0, 10], [2, 10, 20], [2, 20, 25]]
    assert counts == {"rows": 3, "tokens_read": 30, "empty": 1, "long": 1, "dropped_tokens": 0}
    assert apply_length_policy(np.array([0, 5, 25]), 10, "truncate")[1]["dropped_tokens"] == 15
    assert apply_length_policy(np.array([0, 5, 25]), 10, "drop")[1]["dropped_tokens"] == 25


@pytest.mark.parametrize("policy, targets", [("split", 4 + 1 + 2), ("truncate", 3 + 1 + 2), ("drop", 1 + 2)])
def test_no_token_and_no_target_vanishes_uncounted(tmp_path, policy, targets):
    """Rows of 5, 2, 3 and 1 tokens at a window of 4: the inner cut of a split row keeps its target."""
    np.arange(1, 12, dtype=np.uint16).tofile(tmp_path / "flat.bin")
    (tmp_path / "flat.json").write_text(json.dumps({"dtype": "uint16", "lengths": [5, 2, 3, 1]}))
    source = spec("tokens", tmp_path / "flat.bin", seq_len=4, policy=policy)
    d = Documents([source], [1.0], BYTES, str(tmp_path / "cache"))
    (counts,) = d.counts()
    assert counts["tokens_read"] == 11 == counts["tokens"] + counts["dropped_tokens"] + counts["no_target_tokens"]
    lengths = d.lengths(np.arange(len(d)))
    assert d.count_targets(as_spans([(i, 0, n, 1) for i, n in enumerate(lengths)])) == targets
    labels = [d.labels(i, 0, int(n), -1).tolist() for i, n in enumerate(lengths)]
    assert sum(y != -1 for each in labels for y in each) == targets
    if policy == "split":
        assert labels == [[2, 3, 4, 5], [7, -1], [9, 10, -1]]
        assert d.labels(0, 2, 4, -1).tolist() == [4, 5] and d.count_targets(as_spans([(0, 2, 4, 1)])) == 2


def test_the_content_of_sources_is_known(tmp_path):
    def content(text: str) -> str:
        folder = tmp_path / text
        folder.mkdir()
        (folder / "a.txt").write_text(text)
        return Documents([spec("text", folder)], [1.0], BYTES, str(tmp_path / "cache")).content

    assert content("hello") != content("hallo")
    (tmp_path / "again").mkdir()
    (tmp_path / "again/b.txt").write_text("hello")
    again = Documents([spec("text", tmp_path / "again")], [1.0], BYTES, str(tmp_path / "cache2"))
    first = Documents([spec("text", tmp_path / "hello")], [1.0], BYTES, str(tmp_path / "cache2"))
    assert again.content == first.content
