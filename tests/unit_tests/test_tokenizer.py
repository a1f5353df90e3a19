"""Ids are those of the libraries; text stays text; runs without end cost seconds; begin and end are known, not guessed."""

import base64
import json
import pickle
import time

import numpy as np
import pytest
import tiktoken
from tokenizers import Tokenizer as Reader

from tests.hf_tokenizer import CODE, SPECIAL
from torchtitan_wlb.data.tiktoken_files import LLAMA3_PATTERN
from torchtitan_wlb.data.tokenizer import _LONG_RUN, Tokenizer
from torchtitan_wlb.errors import ConfigError


@pytest.fixture(scope="module")
def ranks(folder):
    """The same merges as a rank file."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    as_byte = {c: b for b, c in byte_letters().items()}
    tokens = sorted(((i, bytes(as_byte[c] for c in t)) for t, i in vocab.items() if t not in SPECIAL))
    path = folder / "ranks.model"
    path.write_text("".join(f"{base64.b64encode(t).decode()} {n}\n" for n, (_, t) in enumerate(tokens)))
    return path


def byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes for a byte: printable ones as they are, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def texts(n: int) -> list[str]:
    """Texts of all scripts, code, long runs, things that look like special tokens."""
    rng = np.random.default_rng(0)
    blocks = [(32, 127), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F)]
    blocks += [
        (0xE00, 0xE7F),
        (0x1100, 0x11FF),
        (0x3040, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0x1F300, 0x1F6FF),
    ]
    out = []
    for i in range(n):
        kind = i % 4
        if kind == 0:
            code = CODE[int(rng.integers(len(CODE)))]
            start = int(rng.integers(max(1, len(code) - 500)))
            out.append(code[start : start + int(rng.integers(1, 500))])
        elif kind == 1:
            first, last = blocks[int(rng.integers(len(blocks)))]
            out.append("".join(chr(int(c)) for c in rng.integers(first, last, int(rng.integers(1, 200)))))
        elif kind == 2:
            words = [
                "<|endoftext|>",
                "<|im_end|>",
                "<think>",
                " ",
                "\n\n",
                "\t",
                "don't",
                "12345",
                "é",
                "\u200d",
                "👩‍💻",
                "\x00",
            ]
            out.append("".join(words[int(w)] for w in rng.integers(len(words), size=20)))
        else:
            out.append("aÜ \n^="[int(rng.integers(6))] * int(rng.integers(1, 3000)))
    return out


def test_ids_are_those_of_the_tokenizers_library(folder):
    reader = Reader.from_file(str(folder / "tokenizer.json"))
    reader.encode_special_tokens = True
    t = Tokenizer(str(folder))
    t = pickle.loads(pickle.dumps(t))  # as worker processes get it
    for text in texts(1000):
        assert t.encode(text) == reader.encode(text, add_special_tokens=False).ids
        assert t.decode(t.encode(text)) == text
    assert t.special == {name: i for i, name in enumerate(SPECIAL)} and t.n_ids == 1501
    assert not {t.special[s] for s in SPECIAL} & set(t.encode("".join(SPECIAL)))
    assert t.encode("<think>") == [1500]  # no special token for its makers: a word


def test_ids_are_those_of_tiktoken(ranks):
    pairs = (line.split() for line in ranks.read_text().splitlines())
    merges = {base64.b64decode(token): int(rank) for token, rank in pairs}
    library = tiktoken.Encoding("x", pat_str=LLAMA3_PATTERN, mergeable_ranks=merges, special_tokens={})
    t = pickle.loads(pickle.dumps(Tokenizer(str(ranks), pattern=LLAMA3_PATTERN)))
    for text in texts(1000):
        assert t.encode(text) == library.encode_ordinary(text)
        assert t.decode(t.encode(text)) == text
    names = list(t.special)
    assert len(names) == 256 and t.bos_id == len(merges) and t.eos_id == t.bos_id + 1
    assert [names[i] for i in (2, 5, 6, 9, 11, 255)] == [
        *("<|reserved_special_token_0|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|eot_id|>"),
        *("<|reserved_special_token_3|>", "<|reserved_special_token_247|>"),
    ]


@pytest.mark.parametrize("kind", ["bytes", "hf", "ranks"])
def test_where_every_token_starts(kind, folder, ranks):
    t = Tokenizer({"bytes": "bytes", "hf": str(folder), "ranks": str(ranks)}[kind], pattern=LLAMA3_PATTERN)
    for text in [*texts(60), "x" * (_LONG_RUN - 1) + "ü" * 5 + " " + "y" * _LONG_RUN, "a\ud800b"]:
        ids, starts = t.encode_with_starts(text)
        assert ids == t.encode(text) and starts == sorted(starts) and (not text or starts[0] == 0)
        text = text.replace("\ud800", "\ufffd")
        for i in {1, len(ids) // 3, len(ids) // 2, len(ids) - 1} - {0}:
            # Where a token begins with a whole character, what comes before decodes to the text before.
            if starts[i] > starts[i - 1] and not (before := t.decode(ids[:i])).endswith("\ufffd"):
                assert before == text[: starts[i]]


@pytest.mark.parametrize("kind", ["bytes", "hf", "ranks"])
@pytest.mark.parametrize("run", ["^", " ", "\n", "ab", "字"])
def test_runs_without_end_cost_seconds(kind, run, folder, ranks):
    t = Tokenizer({"bytes": "bytes", "hf": str(folder), "ranks": str(ranks)}[kind], pattern=LLAMA3_PATTERN)
    text = run * (1_000_000 // len(run))
    began = time.perf_counter()
    ids = t.encode(text)
    assert time.perf_counter() - began < 20 and t.decode(ids) == text


def test_begin_and_end_are_known_or_asked_for(folder, tmp_path):
    t = Tokenizer(str(folder))
    assert (t.bos_id, t.eos_id, t.add_bos, t.add_eos) == (None, 2, False, True)
    assert t.encode_documents(["a", ""]) == [[*t.encode("a"), 2], []]
    t = Tokenizer(str(folder), bos="<|im_start|>", eos="<|endoftext|>")
    assert t.encode_documents(["a"]) == [[1, *t.encode("a"), 0]]
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"--model.eos_token: neither it nor .*<\|im_end\|>.*--model.add_eos false"):
        Tokenizer(str(alone))
    assert Tokenizer(str(alone), add_eos=False).eos_id is None
    one, two = Tokenizer(str(alone), eos="<|im_end|>"), Tokenizer(str(alone), eos="<|endoftext|>")
    assert one.fingerprint != two.fingerprint
    with pytest.raises(ConfigError, match=r"--model.bos_token <s>: not one of <\|endoftext\|>"):
        Tokenizer(str(alone), bos="<s>", eos="<|im_end|>")
    with pytest.raises(ConfigError, match=r"a folder without tokenizer.json or tokenizer.model"):
        (tmp_path / "empty").mkdir()
        Tokenizer(str(tmp_path / "empty"))
    for content in (b"", b"{}", b"[]", b'{"model": 1}', b"\xff" * 9):
        alone.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--model.tokenizer .*: not a tokenizer.json"):
            Tokenizer(str(alone))
    with pytest.raises(
        ConfigError, match=r"--model.tokenizer nothing: neither a file nor a folder; legal names are bytes"
    ):
        Tokenizer("nothing")


def test_bytes():
    t = Tokenizer("bytes")
    assert t.n_ids == 258 and t.encode_documents(["é", ""]) == [[256, 195, 169, 257], []]
    assert t.encode("a\ud83d\ude00\ud800") == list("a😀\ufffd".encode())
