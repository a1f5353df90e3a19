"""Damaged and hostile files: each is refused by name, in a few lines, or does no harm."""

import base64
import json
import os
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from torchtitan_wlb.checkpoint import CheckpointManager, check_metadata
from torchtitan_wlb.config import Training, Validation
from torchtitan_wlb.data.documents import Documents, load_documents
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.metrics import read_records

BYTES = Tokenizer("bytes")


def load(name, path, cache, column="text", mask="") -> Documents:
    return Documents([SourceSpec(name, str(path), column, mask, 8, "split")], [1.0], BYTES, str(cache))


def refused(message: str):
    return pytest.raises(ConfigError, match=message)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


HEADER = {"dtype": "uint16", "lengths": [4, 2]}
CORPORA = {
    "a number in a text column": ("parquet", {"a.parquet": {"text": [1, 2]}}, r"a.parquet, row 0: text holds int there, not text"),
    "a number among texts": ("json", {"a.jsonl": '{"text": "a"}\n{"text": 5}\n'}, r"a.jsonl, line 2: text holds int there, not text"),
    "a line cut short": ("json", {"a.jsonl": '{"text": "a"}\n', "b.jsonl": '{"text": "a"}\n{"te'}, r"b.jsonl, line 2: "),
    "a line that is a list": ("json", {"a.jsonl": '{"text": "a"}\n[1]\n'}, r"a.jsonl, line 2: not an object"),
    "a parquet file cut short": ("parquet", {"a.parquet": b"PAR1abc"}, r"a.parquet: .*"),
    "gzip that is none": ("json", {"a.jsonl.gz": b"nothing"}, r"a.jsonl.gz: Not a gzipped file"),
    "zstandard that is none": ("json", {"a.jsonl.zst": b"nothing"}, r"a.jsonl.zst: "),
    "no such column": ("json", {"a.jsonl": '{"body": "a"}\n'}, r"dataset_column text: not in json .*, which has body"),
    "nothing of the kind": ("parquet", {"README.md": "hello"}, "no file found for --training.dataset parquet"),
    "only empty texts": ("json", {"a.jsonl": '{"text": ""}\n'}, "no document with a target is left"),
    "a null id": ("tokens", {"a.parquet": {"text": [[1, None, 3]]}}, "row 0: text has an id that is null"),
    "an id beyond 32 bits": ("tokens", {"a.parquet": {"text": [[1, 2**40]]}}, "row 0: text has an id that is too large"),
    "an id beyond the vocabulary": ("tokens", {"a.parquet": {"text": [[1, 999]]}}, "has ids 1 to 999, --model.tokenizer has 0"),
    "a negative id": ("tokens", {"a.parquet": {"text": [[1, -5]]}}, "has ids -5 to 1"),
    "text for ids": ("tokens", {"a.parquet": {"text": ["x"]}}, r"a.parquet, row 0: text does not hold lists of integers"),
    "floats for ids": ("tokens", {"a.parquet": {"text": [[1.5]]}}, "row 0: text does not hold lists of integers"),
    "objects": ("tokens", {"a.bin": b"12345678" * 8, "a.json": json.dumps(HEADER | {"dtype": "object"})}, "dtype: Input should be"),
    "float ids": ("tokens", {"a.bin": b"12", "a.json": json.dumps(HEADER | {"dtype": "float32"})}, "dtype: Input should be"),
    "negative lengths": ("tokens", {"a.bin": b"12", "a.json": json.dumps(HEADER | {"lengths": [4, -3]})}, "lengths.1: Input"),
    "a length that is no number": ("tokens", {"a.bin": b"12", "a.json": json.dumps(HEADER | {"lengths": ["4"]})}, "lengths.0: "),
    "no header": ("tokens", {"a.bin": b"12", "a.json": "[]"}, r"its .json must be"),
    "half an id": ("tokens", {"a.bin": b"123", "a.json": json.dumps(HEADER)}, r"its .json must be"),
    "an empty flat file": ("tokens", {"a.bin": b"", "a.json": json.dumps(HEADER)}, r"its .json must be"),
    "lengths that do not add up": ("tokens", {"a.bin": b"1234", "a.json": json.dumps(HEADER)}, "add up to 6"),
    "lengths as text": ("synthetic", {"a.json": '["3", 4]'}, "not a JSON list of lengths"),
    "lengths below zero": ("synthetic", {"a.json": "[3, -4]"}, "not a JSON list of lengths"),
    "lengths that are endless": ("synthetic", {"a.json": "[1e400]"}, "not a JSON list of lengths"),
    "lengths that are no list": ("synthetic", {"a.json": "{}"}, "not a JSON list of lengths"),
    "half a JSON": ("synthetic", {"a.json": "[3, 4"}, "not a JSON list of lengths"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CORPORA)
def test_a_broken_corpus_is_named(tmp_path, kind):
    source, files, message = CORPORA[kind]
    for name, content in files.items():
        write(tmp_path / "corpus" / name, content)
    only = [n for n in files if n.endswith(".bin")] or (list(files) if source == "synthetic" else [""])
    with refused(message) as error:
        load(source, tmp_path / "corpus" / only[0] if only[0] else tmp_path / "corpus", tmp_path / "cache")
    text = str(error.value)
    assert len(text) < 900 and "Traceback" not in text and "--" in text


@pytest.mark.parametrize(
    "path", ["wlb_128k:x", "wlb_128k:0", "wlb_128k:-4", "wlb_128k:5:nan", "wlb_128k:5:0", "wlb_128k:1e9", "nothing"]
)
def test_a_length_distribution_that_is_none(tmp_path, path):
    with refused("--training.dataset_path " + path):
        load("synthetic", path, tmp_path / "cache")


def test_what_lies_beside_a_corpus_is_passed_over(tmp_path):
    corpus = tmp_path / "corpus"
    write(corpus / "a.parquet", {"text": ["hello", None]})
    for name in ("README.md", "_SUCCESS", ".a.parquet.crc", "sub/.hidden.parquet", ".git/b.parquet"):
        write(corpus / name, "not a table")
    assert load("parquet", corpus, tmp_path / "cache").counts()[0]["rows"] == 2
    write(tmp_path / "texts/a.txt", "hello")
    write(tmp_path / "texts/.DS_Store", "\0\1")
    assert load("text", tmp_path / "texts", tmp_path / "cache").counts()[0]["rows"] == 1


def test_a_folder_that_cannot_be_read_is_not_half_a_corpus(tmp_path, monkeypatch):
    write(tmp_path / "a/a.txt", "hello")
    write(tmp_path / "b/b.txt", "hello")
    plain = os.scandir

    def scandir(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with refused("/b: Permission denied"):
        load("text", tmp_path, tmp_path / "cache")


def test_validation_has_columns_of_its_own(tmp_path):
    write(tmp_path / "train.parquet", {"ids": [[1, 2, 3, 4]], "mask": [[1, 1, 1, 1]]})
    write(tmp_path / "held.jsonl", '{"body": "hello"}\n')
    training = Training(
        dataset=("tokens",), dataset_path=(str(tmp_path / "train.parquet"),), dataset_column=("ids",), loss_mask_column="mask",
        dataset_cache=str(tmp_path / "cache"), seq_len=8,
    )  # fmt: skip
    held = Validation(
        enable=True, dataset=("json",), dataset_path=(str(tmp_path / "held.jsonl"),), dataset_column=("body",)
    )
    assert load_documents(training, BYTES).counts()[0]["tokens"] == 4
    assert load_documents(training, BYTES, held).counts()[0]["tokens"] == 7
    with refused(r"--validation.dataset_column text: not in json"):
        load_documents(training, BYTES, held.model_copy(update={"dataset_column": ("text",)}))


def damage(path, how):
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "noise": os.urandom(len(content))}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "half", "noise"])
@pytest.mark.parametrize("what", ["documents2-split-8.npy", "documents2-split-8.json", "tokens/*.arrow"])
def test_a_damaged_cache_says_what_to_delete(tmp_path, what, how):
    write(tmp_path / "texts/a.txt", "hello, here is a text of more than one piece")
    before = load("text", tmp_path / "texts", tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (path,) = folder.glob(what)
    damage(path, how)
    if (what, how) == ("documents2-split-8.npy", "gone"):  # made again
        assert load("text", tmp_path / "texts", tmp_path / "cache").content == before.content
        return
    with refused(rf"--training.dataset_cache: {folder} is damaged \(.*\); delete it"):
        load("text", tmp_path / "texts", tmp_path / "cache")
    shutil.rmtree(folder)
    assert load("text", tmp_path / "texts", tmp_path / "cache").content == before.content


@pytest.mark.parametrize(
    "table",
    [np.zeros((4, 5), np.int32), np.zeros((5, 6), np.int64), np.zeros((5, 99), np.int32), np.array([{}], dtype=object)],
)
def test_a_table_of_another_kind(tmp_path, table):
    write(tmp_path / "texts/a.txt", "hello, here is a text of more than one piece")
    load("text", tmp_path / "texts", tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("*.npy")
    np.save(path, table, allow_pickle=True)
    with refused("is damaged"):
        load("text", tmp_path / "texts", tmp_path / "cache")


RANKS = {bytes([i]): i for i in range(256)} | {b"he": 256, b"ll": 257}


def rank_file(path, ranks):
    path.write_text("".join(f"{base64.b64encode(b).decode()} {i}\n" for b, i in ranks.items()))
    return str(path)


def test_rank_files_that_cannot_be_right(tmp_path):
    path = tmp_path / "tokenizer.model"
    with refused("ranks must be 0 to 257, each once"):
        Tokenizer(rank_file(path, RANKS | {b"ll": 300}), pattern=".")
    with refused("ranks must be 0 to 256"):
        Tokenizer(rank_file(path, {k: v for k, v in RANKS.items() if k != b"a"}), pattern=".")
    with refused("has 258 ranks, Llama-3's has 128000: give .* in --model.tokenizer_pattern"):
        Tokenizer(rank_file(path, RANKS))
    with refused(r"--model.tokenizer_pattern \(: "):
        Tokenizer(rank_file(path, RANKS), pattern="(")
    for content in (b"", b"hello", b"a b c\n", os.urandom(500), b"\x00" * 100, b'{"model": {"vocab": {}}}'):
        path.write_bytes(content)
        with refused("--model.tokenizer .*tokenizer.model"):
            Tokenizer(str(path), pattern=".")
    one = Tokenizer(rank_file(path, RANKS), pattern=r"\w+|\W+")
    two = Tokenizer(str(path), pattern=r"\w|\W")
    assert one.encode("hell") == [256, 257] and two.encode("hell") != one.encode("hell")
    assert one.identity != two.identity


def test_an_encoding_without_network_is_one_message(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("Max retries exceeded")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with refused("--model.tokenizer cl100k_base: tiktoken cannot fetch .*TIKTOKEN_CACHE_DIR"):
        Tokenizer("cl100k_base")


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_metadata_of_a_checkpoint_runs_nothing(tmp_path):
    path = tmp_path / ".metadata"
    properties = TensorProperties(dtype=torch.float32, layout=torch.strided, memory_format=torch.contiguous_format)
    good = Metadata({"model.w": TensorStorageMetadata(properties, torch.Size([2]), [])})
    path.write_bytes(pickle.dumps(good))
    check_metadata(tmp_path)
    hostile = Metadata({"model.w": Command(str(tmp_path / "made"))})
    nested = b"cos\nmkdir\n(S'" + str(tmp_path / "made").encode() + b"'\ntR."
    for content in (
        pickle.dumps(hostile), pickle.dumps(Command(str(tmp_path / "made"))), nested, pickle.dumps([]), pickle.dumps(None), b"",
        pickle.dumps(good)[:-20], b"\x80\x04.", b"ctorch\nload\n.", b"cbuiltins\neval\n(S'1'\ntR.", os.urandom(300),
    ):  # fmt: skip
        path.write_bytes(content)
        with refused(r"\.metadata is damaged or not of a checkpoint"):
            check_metadata(tmp_path)
        assert not (tmp_path / "made").exists()
    path.unlink()
    with refused("metadata is damaged"):
        check_metadata(tmp_path)


def test_lines_that_are_no_records_are_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    lines = [
        b'{"step": 1}',
        b"",
        b"null",
        b"[]",
        b'{"step": "2"}',
        b'{"st',
        b"\xff\xfe",
        b'{"step": 3, "loss": NaN}',
        b"[" * 9999,
    ]
    path.write_bytes(b"\n".join(lines))
    assert read_records(path) == [{"step": 1}, {"step": 3, "loss": None}]


@pytest.mark.parametrize("keep, left", [(1, {"step-9", "set-aside-step-7-20"}), (0, None), (5, None)])
def test_leftovers_go_with_the_next_save_and_other_names_stay(tmp_path, monkeypatch, keep, left):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    ours = ["step-2", "step-5", "step-9", "set-aside-step-8-10", "set-aside-step-7-20"]
    theirs = {"set-aside-best", "set-aside-step-old", "step-5-best", "step-old"}
    for name in (*ours, *theirs, "step-3"):
        (tmp_path / name).mkdir()
        for file in (".metadata", "run_state.json"):
            if name != "step-3":  # never completed
                (tmp_path / name / file).touch()
    CheckpointManager(tmp_path, None, keep, False)._saved(tmp_path / "step-9")
    assert {p.name for p in tmp_path.iterdir()} == (left or set(ours)) | theirs
