"""Sets, buckets and what is written of them; the sums themselves are compared in distributed_tests/test_one_truth.py."""

import torch

from torchtitan_wlb.config import Validation
from torchtitan_wlb.evaluation import EDGES, as_scalars, bucket_name, in_words, over_all, read_table, sets_of


def test_sets_are_sources_of_one_name():
    v = Validation(
        dataset=("json", "text", "json"), dataset_path=("a", "b", "c"), dataset_name=("web", "code", "web"), steps=3
    )
    found = sets_of(v)
    assert list(found) == ["web", "code"] and all(x.steps == 3 for x in found.values())
    assert found["web"].dataset == ("json", "json") and found["web"].dataset_path == ("a", "c")
    assert found["code"].dataset == ("text",) and found["code"].dataset_path == ("b",)
    (alone,) = sets_of(Validation(dataset=("stdlib", "text"), dataset_path=("", "b"))).items()
    assert alone[0] == "validation" and alone[1].dataset == ("stdlib", "text")


def test_buckets_are_read_with_their_targets():
    assert [bucket_name(i) for i in (0, 1, 2, 6, 7, len(EDGES))] == [
        *("0-256", "256-1K", "1K-4K", "256K-1M", "1M-4M", "64M-")
    ]
    n = len(EDGES) + 1
    table = torch.zeros(2, n, n, dtype=torch.float64)
    table[:, 1, 0] = torch.tensor([6.0, 3.0])
    table[:, 1, 1] = torch.tensor([1.0, 1.0])
    table[:, 0, 0] = torch.tensor([5.0, 1.0])
    result = read_table(table)
    assert (result["loss"], result["targets"]) == (12 / 5, 5)
    assert result["by_length"] == {"0-256": {"loss": 5.0, "targets": 1}, "256-1K": {"loss": 7 / 4, "targets": 4}}
    assert result["by_position"] == {"0-256": {"loss": 11 / 4, "targets": 4}, "256-1K": {"loss": 1.0, "targets": 1}}
    empty = read_table(torch.zeros(2, n, n, dtype=torch.float64))
    assert empty == {"loss": None, "targets": 0, "by_length": {}, "by_position": {}}
    sets = {"web": result, "none": empty}
    assert over_all(sets) == (12 / 5, 5) and over_all({"none": empty}) == (None, 0)
    assert in_words(empty) == "no loss over 0 targets"
    assert in_words(result) == "loss 2.4000 over 5 targets; perplexity by position: 0-256 15.6, 256-1K 2.72"
    assert as_scalars(sets) == {
        "validation/web/loss": 12 / 5,
        "validation/web/length/0-256": 5.0,
        "validation/web/length/256-1K": 7 / 4,
        "validation/web/position/0-256": 11 / 4,
        "validation/web/position/256-1K": 1.0,
    }
