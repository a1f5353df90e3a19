"""Corpora as they come, good and broken: each has a count or a message; parts, processes and interruptions change
nothing."""

import gzip
import json
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from torchtitan_wlb.config import Training
from torchtitan_wlb.data import parts
from torchtitan_wlb.data.documents import Documents, load_documents
from torchtitan_wlb.data.parts import PART_BYTES, parts_of_tables, rows_of_table
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.sources import looks_held_out
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError

BYTES = Tokenizer("bytes")
A, B = '{"text": "ab"}\n', '{"text": "c"}\n'
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def megatron(lengths, documents, dtype=np.uint16, code=8, magic=b"MMIDIDX\0\0", gap=0) -> dict:
    ids = np.arange(sum(lengths), dtype=dtype) % 250
    starts = np.cumsum([0, *lengths[:-1]]) * ids.itemsize + gap * np.arange(len(lengths))
    head = struct.pack("<9sQBQQ", magic, 1, code, len(lengths), len(documents))
    index = head + b"".join(np.array(x, t).tobytes() for x, t in ((lengths, "i4"), (starts, "i8"), (documents, "i8")))
    return {"a.bin": ids.tobytes(), "a.idx": index}


def arrow(table, kind) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(sink, table.schema) as out:
        out.write_table(table, max_chunksize=1)
    return sink.getvalue().to_pybytes()


def frames(*texts) -> bytes:
    return b"".join(zstandard.compress(text.encode()) for text in texts)


def half_a_frame(text: str) -> bytes:
    """What is written until then of a frame that goes on."""
    out = zstandard.ZstdCompressor().compressobj()
    return out.compress(text.encode()) + out.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


NOT_UTF8 = pa.table(
    {
        "text": pa.Array.from_buffers(
            pa.string(), 3, [None, *(pa.py_buffer(x) for x in (np.array([0, 1, 2, 3], np.int32).tobytes(), b"a\xffb"))]
        )
    }
)
TEXTS = pa.table({"text": ["ab", "c"], "meta": [1, 2]})
# name: (source, files, more of the spec, documents or message)
ZOO = {
    "jsonl": ("json", {"a.jsonl": A + B}, {}, 2),
    "jsonl without a last newline": ("json", {"a.jsonl": A + B.rstrip()}, {}, 2),
    "jsonl with empty lines": ("json", {"a.jsonl": f"\n{A}\n  \n{B}\n"}, {}, 2),
    "jsonl with Windows ends of lines": ("json", {"a.jsonl": (A + B).replace("\n", "\r\n")}, {}, 2),
    "jsonl with a byte order mark": ("json", {"a.jsonl": b"\xef\xbb\xbf" + (A + B).encode()}, {}, 2),
    "jsonl that is called json": ("json", {"a.json": A + B}, {}, 2),
    "a json list": ("json", {"a.json": f" [{A},{B}]"}, {}, 2),
    "gzip": ("json", {"a.jsonl.gz": gzip.compress((A + B).encode())}, {}, 2),
    "gzip of a list": ("json", {"a.json.gz": gzip.compress(f"[{A},{B}]".encode())}, {}, 2),
    "two gzip members": ("json", {"a.jsonl.gz": gzip.compress(A.encode()) + gzip.compress(B.encode())}, {}, 2),
    "zstandard": ("json", {"a.jsonl.zst": zstandard.compress((A + B).encode())}, {}, 2),
    "metadata of changing types": ("json", {"a.jsonl": '{"text": "a", "m": null}\n', "b.jsonl": '{"text": "b", "m": {"x": [1]}}\n', "c.jsonl": '{"text": "c", "m": "s"}\n'}, {}, 3),
    "an empty file among others": ("json", {"a.jsonl": "", "b.jsonl": A}, {}, 1),
    "null texts are empty": ("json", {"a.jsonl": '{"text": null}\n' + A}, {}, 1),
    "surrogates and escapes": ("json", {"a.jsonl": '{"text": "\\ud800 \\ud83d\\ude00 \\u0000"}\n'}, {}, 1),
    "a template": ("json", {"a.jsonl": '{"t": "T", "b": null}\n'}, {"column": "{t}: {b}!"}, 1),
    "sub-folders, in order": ("json", {"b/a.jsonl": A, "a/b.jsonl": B}, {}, 2),
    "markers and hidden files": ("json", {"a.jsonl": A, "_SUCCESS": "", ".b.jsonl": "x", "_x.jsonl": "x", "a.jsonl.crc": "x", "_temporary/b.jsonl": "x", "c.jsonl.tmp": "x"}, {}, 1),
    "held-out files": ("json", {"train-0.jsonl": A, "test-0.jsonl": B, "validation/x.jsonl": B, "contest.jsonl": A, "dev.jsonl": B}, {}, 2),
    "held-out files for evaluation": ("json", {"train-0.jsonl": A, "test-0.jsonl": B}, {"held_out": True}, 2),
    "parquet": ("parquet", {"a.parquet": TEXTS}, {}, 2),
    "parquet with columns of changing types": ("parquet", {"a.parquet": TEXTS, "b.parquet": pa.table({"text": ["x"], "meta": ["y"]})}, {}, 3),
    "parquet of large strings and dictionaries": ("parquet", {"a.parquet": pa.table({"text": pa.array(["ab", "ab"]).dictionary_encode()})}, {}, 2),
    "an arrow stream": ("arrow", {"a.arrow": arrow(TEXTS, "stream")}, {}, 2),
    "an arrow file": ("arrow", {"a.arrow": arrow(TEXTS, "file")}, {}, 2),
    "ids": ("tokens", {"a.jsonl": '{"text": [1, 2, 3]}\n'}, {}, 1),
    "ids with a mask": ("tokens", {"a.parquet": pa.table({"text": [[1, 2, 3]], "m": [[0, 1, 0]]})}, {"loss_mask_column": "m"}, 1),
    "megatron": ("megatron", megatron([5, 3, 4], [0, 1, 3]), {}, 2),
    "megatron with 32-bit ids": ("megatron", megatron([5, 3], [0, 1, 2], np.int32, 4), {}, 2),
    "conversations": ("json", {"a.jsonl": json.dumps({"text": TALK}) + "\n"}, {"format": "messages", "chat_template": "chatml"}, 1),
    "conversations in parquet": ("parquet", {"a.parquet": pa.table({"text": [TALK, TALK]})}, {"format": "messages", "chat_template": "chatml"}, 2),
    "a conversation without an answer": ("json", {"a.jsonl": (json.dumps({"text": TALK[:1]}) + "\n") + json.dumps({"text": TALK})}, {"format": "messages", "chat_template": "chatml"}, 1),
    "text with anything in it": ("text", {"a.txt": b"\xff\xfe ok", "test/b.bin": b"\0\1"}, {}, 2),
    "bad rows that are skipped": ("json", {"a.jsonl": A + "{\n" + '{"body": 1}\n' + "[1]\n" + '{"text": 5}\n' + B}, {"bad_rows": "skip"}, 2),
    "bad bytes that are skipped": ("json", {"a.jsonl": A.encode() + b'{"text": "\xff"}\n'}, {"bad_rows": "skip"}, 1),
    "half a line": ("json", {"a.jsonl": A + '{"text": "b'}, {}, r"a.jsonl, line 2: Unterminated"),
    "invalid UTF-8": ("json", {"a.jsonl": A.encode() + b'{"text": "\xff"}\n'}, {}, r"a.jsonl, line 2: .*can't decode"),
    "no object": ("json", {"a.jsonl": A + "5\n"}, {}, r"a.jsonl, line 2: not an object"),
    "nested too deeply": ("json", {"a.jsonl": A + "[" * 99_999 + "\n"}, {}, r"a.jsonl, line 2: "),
    "a number for a text": ("json", {"a.jsonl": '{"text": 1.5}\n'}, {}, r"line 1: text holds float there, not text"),
    "a list cut short": ("json", {"a.json": f"[{A},"}, {}, r"a.json: "),
    "gzip cut short": ("json", {"a.jsonl.gz": gzip.compress((A * 99).encode())[:-9]}, {}, r"a.jsonl.gz: "),
    "gzip cut short is never skipped": ("json", {"a.jsonl.gz": gzip.compress((A * 99).encode())[:-9]}, {"bad_rows": "skip"}, r"a.jsonl.gz: "),
    "zstandard cut short": ("json", {"a.jsonl.zst": frames(A * 400, A * 600)[:-9]}, {"bad_rows": "skip"}, r"a.jsonl.zst: ends before"),
    "zstandard cut short after a whole line": ("json", {"a.jsonl.zst": half_a_frame(A * 400)}, {"bad_rows": "skip"}, r"a.jsonl.zst: ends before"),
    "zstandard in several frames": ("json", {"a.jsonl.zst": frames(A * 400, B * 3)}, {}, 403),
    "a json list with a byte order mark": ("json", {"a.json": b"\xef\xbb\xbf" + f"[{A},{B}]".encode()}, {}, 2),
    "compressed with a byte order mark": ("json", {"a.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + (A + B).encode())}, {}, 2),
    "invalid UTF-8 in parquet": ("parquet", {"a.parquet": NOT_UTF8}, {}, r"a.parquet, row 1: .*can't decode"),
    "invalid UTF-8 in parquet, skipped": ("parquet", {"a.parquet": NOT_UTF8}, {"bad_rows": "skip"}, 2),
    "ids that are true or false": ("tokens", {"a.jsonl": '{"text": [true, false]}\n'}, {}, r"line 1: text does not hold lists of integers"),
    "a null in a mask": ("tokens", {"a.jsonl": '{"text": [1, 2], "m": [1, null]}\n'}, {"loss_mask_column": "m"}, r"line 1: m has an id that is null"),
    "a template without a name": ("json", {"a.jsonl": A}, {"column": "{}"}, r"dataset_column \{\}: \{\} is no column"),
    "parquet without the column": ("parquet", {"a.parquet": pa.table({"body": ["x"]})}, {}, r"dataset_column text: not in .*a.parquet, which has body"),
    "arrow without the column": ("arrow", {"a.arrow": arrow(pa.table({"body": ["x"]}), "file")}, {}, r"dataset_column text: not in .*a.arrow, which has body"),
    "arrow that is none": ("arrow", {"a.arrow": b"nothing"}, {}, r"a.arrow: "),
    "no column of a template": ("json", {"a.jsonl": A}, {"column": "{title} {text}"}, r"dataset_column title: not in json .*, which has text"),
    "a template that is none": ("json", {"a.jsonl": A}, {"column": "{text"}, r"dataset_column \{text: "),
    "all rows bad": ("json", {"a.jsonl": "x\ny\n"}, {"bad_rows": "skip"}, r"no document with a target is left .*'bad_rows': 2"),
    "conversations that are none": ("json", {"a.jsonl": A}, {"format": "messages", "chat_template": "chatml"}, r"line 1: not a list of messages"),
    "only held-out files": ("json", {"test.jsonl": A}, {}, r"no file found"),
    "megatron without its index": ("megatron", {"a.bin": b"1234"}, {}, r"a.idx is missing"),
    "megatron of another magic": ("megatron", megatron([5], [0, 1], magic=b"MMIDIDY\0\0"), {}, r"its .idx cannot be used"),
    "megatron index cut short": ("megatron", {k: v[:-9] if k == "a.idx" else v for k, v in megatron([5], [0, 1]).items()}, {}, r"its .idx cannot be used"),
    "megatron ids cut short": ("megatron", {k: v[:-4] if k == "a.bin" else v for k, v in megatron([5], [0, 1]).items()}, {}, r"its sequences are not what lies"),
    "megatron sequences that do not follow each other": ("megatron", megatron([5, 3], [0, 1, 2], gap=2), {}, r"its sequences are not what lies"),
    "megatron documents out of order": ("megatron", megatron([5, 3], [0, 2, 1]), {}, r"its documents are not all"),
}  # fmt: skip


def write(folder: Path, files: dict) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def load(source, path, cache, processes=1, **more) -> Documents:
    column = more.pop("column", "text")
    spec = SourceSpec(source, str(path), column, more.pop("loss_mask_column", ""), 4096, "split", **more)
    return Documents([spec], [1.0], BYTES, str(cache), processes)


@pytest.mark.parametrize("kind", ZOO)
def test_the_zoo(tmp_path, kind):
    source, files, more, expected = ZOO[kind]
    path = write(tmp_path / "corpus", files)
    path = path / "a.bin" if source == "megatron" else path
    if isinstance(expected, int):
        d = load(source, path, tmp_path / "cache", **more)
        (counts,) = d.counts()
        assert len(d) == expected
        assert counts["tokens_read"] == counts["tokens"] + counts["dropped_tokens"] + counts["no_target_tokens"]
        if more.get("bad_rows"):
            lines = sum(
                content.num_rows
                if isinstance(content, pa.Table)
                else len(bytes(content, "utf8").splitlines())
                if isinstance(content, str)
                else content.count(b"\n")
                for content in files.values()
            )
            assert counts["rows"] + counts["bad_rows"] == lines and counts["bad_rows"] > 0
        return
    with pytest.raises(ConfigError) as error:
        load(source, path, tmp_path / "cache", **more)
    text = str(error.value)
    assert re.search(expected, text) and len(text) < 900 and "Traceback" not in text, text


def test_what_is_read(tmp_path):
    def first(kind):
        source, files, more, _ = ZOO[kind]
        d = load(source, write(tmp_path / kind, files), tmp_path / "cache", **more)
        return BYTES.decode(d.tokens(0, 0, int(d.lengths(np.array([0]))[0])).tolist())

    assert first("a template") == "T: !" and first("jsonl") == "ab" and first("sub-folders, in order") == "c"
    assert first("surrogates and escapes") == "\ufffd 😀 \0"
    globbed = (
        write(tmp_path / "g", {"a.jsonl": A, "_b.jsonl": "x", "_t/c.jsonl": "x", "s/d.jsonl": B}) / "**" / "*.jsonl"
    )
    assert len(load("json", globbed, tmp_path / "cache")) == 2
    d = load("megatron", write(tmp_path / "m", megatron([5, 3, 4], [0, 1, 3])) / "a.bin", tmp_path / "cache")
    assert d.tokens(0, 0, 5).tolist() == [0, 1, 2, 3, 4] and d.tokens(1, 0, 7).tolist() == [5, 6, 7, 8, 9, 10, 11]


def test_only_what_the_assistant_says_is_a_target(tmp_path):
    path = write(tmp_path, {"a.jsonl": json.dumps({"text": TALK}) + "\n"})
    d = load("json", path, tmp_path / "cache", format="messages", chat_template="chatml")
    labels = d.labels(0, 0, int(d.lengths(np.array([0]))[0]), -1)
    assert BYTES.decode(labels[labels >= 0].tolist()) == "yo<|im_end|>" and d.counts()[0]["no_target"] == 0


@pytest.mark.parametrize(
    "file, path, is_held_out",
    [
        ("/d/test.jsonl", "/d", True),
        ("/d/c4-validation.00001.json.gz", "/d", True),
        ("/d/held_out/a.jsonl", "/d", True),
        ("/d/latest.jsonl", "/d", False),
        ("/d/attestation-1.jsonl", "/d", False),
        ("/d/development/a.jsonl", "/d", False),
        ("/d/test/a.jsonl", "/d/test", False),
        ("/d/test.jsonl", "/d/test.jsonl", False),
        ("/d/x-eval.jsonl", "/d/*-eval.jsonl", False),
        ("/d/x-eval.jsonl", "/d/*.jsonl", True),
    ],
)
def test_what_looks_held_out(file, path, is_held_out, tmp_path):
    root = tmp_path / "d"
    (root / "test").mkdir(parents=True)
    (root / "test.jsonl").write_text("")
    assert looks_held_out(file.replace("/d", str(root), 1), path.replace("/d", str(root), 1)) == is_held_out


def corpus(folder: Path, rows=3000) -> Path:
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": f"{i} " + "x" * int(rng.integers(0, 400)), "m": i % 3 and None}) for i in range(rows)]
    third = rows // 3
    text = ["\n".join(lines[a : a + third]) + "\n" for a in (0, third, 2 * third)]
    return write(folder, {"a.jsonl": text[0], "b.jsonl.gz": gzip.compress(text[1].encode()), "c.jsonl": text[2]})


@pytest.mark.parametrize("size", [1, 100, 1000, 4099, 50_000])
def test_every_line_is_in_one_part(tmp_path, monkeypatch, size):
    path = corpus(tmp_path, 300)
    monkeypatch.setattr(parts, "PART_BYTES", size)
    files = sorted(map(str, path.glob("*.jsonl*")))
    rows = [row["text"] for part in parts_of_tables(files) for _, row in rows_of_table(part, ["text"])]
    assert [int(r.split()[0]) for r in rows] == list(range(300))
    where = [w() for part in parts_of_tables([files[2]]) for w, _ in rows_of_table(part, ["text"])]
    assert where == [f"{files[2]}, line {i}" for i in range(1, 101)]


def test_row_groups_are_parts(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": [str(i) for i in range(1000)]}), tmp_path / "a.parquet", row_group_size=90)
    for size in (1, 2000, PART_BYTES):
        monkeypatch.setattr(parts, "PART_BYTES", size)
        found = parts_of_tables([str(tmp_path / "a.parquet")])
        rows = [r for part in found for r in rows_of_table(part, ["text"])]
        assert [r["text"] for _, r in rows] == [str(i) for i in range(1000)]
        assert [w for w, _ in rows] == [f"{tmp_path}/a.parquet, row {i}" for i in range(1000)]
        assert (size > 1 or len(found) == 12) and (size < PART_BYTES or len(found) == 1)


def test_processes_and_interruptions_change_nothing(tmp_path, monkeypatch):
    path = corpus(tmp_path / "corpus")
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    one = load("json", path, tmp_path / "one")
    three = load("json", path, tmp_path / "three", processes=3)
    assert one.content == three.content and one.counts() == three.counts() and len(one) == 3000
    assert len(list((tmp_path / "one").rglob("*.arrow"))) > 10
    # Stopped in the middle of the fifth part: the first four are not done again.
    from torchtitan_wlb.data.tokenize_parts import PartWriter

    write_part, done = PartWriter.write, []

    def stops(self, number, part):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(number)
        return write_part(self, number, part)

    monkeypatch.setattr(PartWriter, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        load("json", path, tmp_path / "again")
    monkeypatch.setattr(PartWriter, "write", lambda self, n, p: (done.append(n), write_part(self, n, p))[1])
    again = load("json", path, tmp_path / "again")
    assert again.content == one.content and len(done) == len(set(done)) == len(
        list((tmp_path / "one").rglob("*.arrow"))
    )


def test_a_fault_in_a_process_is_told(tmp_path, monkeypatch):
    path = corpus(tmp_path / "corpus")
    with (path / "c.jsonl").open("a") as file:
        file.write("{broken\n")
    monkeypatch.setattr(parts, "PART_BYTES", 20_000)
    with pytest.raises(ConfigError, match=r"c.jsonl, line 1001: Expecting property name"):
        load("json", path, tmp_path / "cache", processes=2)
    assert load("json", path, tmp_path / "cache", processes=2, bad_rows="skip").counts()[0]["bad_rows"] == 1


def test_a_preparation_that_is_killed_goes_on(tmp_path):
    path = corpus(tmp_path / "corpus", 60_000)
    command = [
        *(
            sys.executable,
            "scripts/prepare_data.py",
            "--training.dataset",
            "json",
            "--training.dataset_path",
            str(path),
        ),
        *("--training.dataset_cache", str(tmp_path / "cache"), "--training.prepare_processes", "2"),
    ]
    root = Path(__file__).parents[2]
    for wanted in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while (
            not list((tmp_path / "cache").rglob("*.arrow")) and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        process.send_signal(wanted)
        assert process.wait(20) != 0 or list((tmp_path / "cache").rglob("*.npy"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "60,000 documents" in done.stdout and "tokens/s" in done.stdout
    training = Training(dataset=("json",), dataset_path=(str(path),), dataset_cache=str(tmp_path / "other"))
    alone = load_documents(training, BYTES)
    assert (
        load_documents(training.model_copy(update={"dataset_cache": str(tmp_path / "cache")}), BYTES).content
        == alone.content
    )


def test_many_parts_fit_a_small_limit_of_open_files(tmp_path):
    write(tmp_path / "corpus", {f"{i:04}.jsonl": A for i in range(300)})
    code = (
        "import resource, sys; from torchtitan_wlb.data import token_store as s; from pathlib import Path;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]));"
        "print(len(s.ArrowTokens(Path(sys.argv[1])).row_lengths))"
    )
    load("json", tmp_path / "corpus", tmp_path / "cache")
    (folder,) = (tmp_path / "cache").glob("*/tokens")
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "300\n"
