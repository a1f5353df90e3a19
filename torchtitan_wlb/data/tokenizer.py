"""Text to token ids and back: raw bytes, tiktoken's encodings and rank files, tokenizer.json of Hugging Face.

A text is text: where it spells a special token, it is spelt out. Special tokens come from begin and end of a document
and from chat templates alone.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol

from torchtitan_wlb.config import Model
from torchtitan_wlb.data.tiktoken_files import from_name, from_rank_file
from torchtitan_wlb.errors import ConfigError

# Runs without a boundary between words cost a tokenizer time that grows with their square, or its stack.
_LONG_RUN = 25_000
_RUNS = re.compile(rf"(\s{{{_LONG_RUN}}}|\S{{{_LONG_RUN}}})")


class _Backend(Protocol):
    special: dict[str, int]
    n_ids: int

    def encode(self, text: str) -> list[int]: ...

    def starts(self, ids: list[int], text: str) -> list[int]:
        """For every id of encode(text) the first character that it covers, whole or in part."""
        ...

    def decode(self, ids: list[int]) -> str: ...


def _without_surrogates(text: str) -> str:
    """Halves of a pair, which JSON can spell and UTF-8 cannot, become one character or U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _starts_of_bytes(pieces: list[bytes], text: str) -> list[int]:
    """First character of every piece of the UTF-8 bytes of a text."""
    owner = [i for i, c in enumerate(text) for _ in c.encode("utf-8")]
    at, found = 0, []
    for piece in pieces:
        found.append(owner[at])
        at += len(piece)
    return found


class _Bytes:
    special = {"<|begin_of_text|>": 256, "<|end_of_text|>": 257}
    n_ids = 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def starts(self, ids: list[int], text: str) -> list[int]:
        return _starts_of_bytes([bytes([i]) for i in ids], text)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class _Tiktoken:
    def __init__(self, encoding):
        self.encoding, self.n_ids = encoding, encoding.n_vocab
        self.special = dict(encoding._special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def starts(self, ids: list[int], text: str) -> list[int]:
        return _starts_of_bytes(self.encoding.decode_tokens_bytes(ids), text)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


class _HuggingFace:
    """A tokenizer.json."""

    def __init__(self, content: bytes):
        from tokenizers import Tokenizer as Reader

        self.content, self.reader = content, Reader.from_buffer(content)
        self.reader.encode_special_tokens = True  # as text
        self.special = {t.content: i for i, t in self.reader.get_added_tokens_decoder().items() if t.special}
        self.n_ids = 1 + max(self.reader.get_vocab(with_added_tokens=True).values())

    def __reduce__(self):  # to worker processes; a pickled reader would forget that special tokens are text
        return _HuggingFace, (self.content,)

    def encode(self, text: str) -> list[int]:
        return self.reader.encode(text, add_special_tokens=False).ids

    def starts(self, ids: list[int], text: str) -> list[int]:
        return [start for start, _ in self.reader.encode(text, add_special_tokens=False).offsets]

    def decode(self, ids: list[int]) -> str:
        return self.reader.decode(ids, skip_special_tokens=False)


class Tokenizer:
    """Encode documents to ids.

    Args:
        name: "bytes", a tiktoken encoding name, the path of a tiktoken rank file, of a tokenizer.json, or of a folder
            with one or the other (tokenizer.json, tokenizer.model) as Hugging Face has it.
        pattern: expression that cuts text into words before merging, of a rank file; "" for Llama-3's.
        add_bos, add_eos: whether `encode_documents` puts the begin and end ids around every document.
        bos, eos: names of those tokens; "": what the folder's tokenizer_config.json says, or the usual names.

    Attributes:
        n_ids: number of ids in use, special ids included.
        special: {name: id} of special tokens.
        bos_id, eos_id: None where the tokenizer has none.
        identity: the name, or a hash of the file.
        fingerprint: changes whenever the ids of a document could change.
        folder: of a tokenizer of Hugging Face, with its chat template; None for others.

    Raises:
        ConfigError: neither a known name nor a file, or a begin or end token is wanted that nobody names.
    """

    def __init__(
        self,
        name: str,
        add_bos: bool = True,
        add_eos: bool = True,
        pattern: str = "",
        bos: str = "",
        eos: str = "",
    ):
        self.folder: Path | None = None
        self._backend, self.identity = self._open(name, pattern)
        self.special, self.n_ids = self._backend.special, self._backend.n_ids
        known = _named_tokens(self.folder)
        usual = () if self.folder else ("<|end_of_text|>", "<|endoftext|>")
        self.eos_id = self._find("eos", eos or known.get("eos_token"), usual, add_eos)
        self.bos_id = self._find("bos", bos or known.get("bos_token"), ("<|begin_of_text|>", *usual[1:]), False)
        self.add_bos, self.add_eos = add_bos and self.bos_id is not None, add_eos
        about = f"{self.identity} {self.add_bos} {add_eos} {self.bos_id} {self.eos_id}"
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()[:16]

    def _open(self, name: str, pattern: str) -> tuple[_Backend, str]:
        path = Path(name)
        if name == "bytes":
            return _Bytes(), name
        if path.is_dir():
            found = [path / file for file in ("tokenizer.json", "tokenizer.model") if (path / file).is_file()]
            if not found:
                raise ConfigError(f"--model.tokenizer {name}: a folder without tokenizer.json or tokenizer.model")
            path = found[0]
        if not path.is_file():
            return _Tiktoken(from_name(name)), name
        content = path.read_bytes()
        identity = f"a file of hash {hashlib.sha256(content + pattern.encode()).hexdigest()[:16]}"
        if path.suffix != ".json":
            return _Tiktoken(from_rank_file(path, content, pattern)), identity
        self.folder = path.parent
        try:
            return _HuggingFace(content), identity
        except Exception as error:  # the library raises its base class
            raise ConfigError(f"--model.tokenizer {path}: not a tokenizer.json ({str(error)[:200]})") from None

    def _find(self, kind: str, name: str | None, usual: tuple[str, ...], needed: bool) -> int | None:
        """Id of the begin or end token."""
        if name and name not in self.special:
            raise ConfigError(f"--model.{kind}_token {name}: not one of {', '.join(list(self.special)[:20])}")
        for token in (name, *usual) if name else usual:
            if token in self.special:
                return self.special[token]
        if needed:
            raise ConfigError(
                f"--model.{kind}_token: neither it nor a tokenizer_config.json beside tokenizer.json names the token; "
                f"give one of {', '.join(list(self.special)[:20])}, or --model.add_{kind} false"
            )
        return None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin and end ids. Runs of 25,000 characters without white space, or of nothing else,
        are cut there, as Llama-3's own code does."""
        text = _without_surrogates(text)
        if len(text) < _LONG_RUN:
            return self._backend.encode(text)
        return [i for piece in _RUNS.split(text) if piece for i in self._backend.encode(piece)]

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """(ids of a text, the first character of each)."""
        all_ids, all_starts, at = [], [], 0
        for piece in _RUNS.split(_without_surrogates(text)):
            if piece:
                all_ids += (ids := self._backend.encode(piece))
                all_starts += [at + start for start in self._backend.starts(ids, piece)]
                at += len(piece)
        return all_ids, all_starts

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Ids of documents, with begin and end ids as configured. An empty text stays empty."""
        head = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        tail = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return [[*head, *self.encode(text), *tail] if text else [] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids)


def _named_tokens(folder: Path | None) -> dict[str, str]:
    """Begin and end token of a folder of Hugging Face."""
    config: dict[str, Any] = {}
    if folder and (path := folder / "tokenizer_config.json").is_file():
        try:
            config = json.loads(path.read_bytes())
            named = {kind: config.get(kind) for kind in ("bos_token", "eos_token")}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"--model.tokenizer {folder}: its tokenizer_config.json: {str(error)[:200]}") from None
        return {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if v}
    return {}


def build_tokenizer(model: Model) -> Tokenizer:
    """Tokenizer of the [model] section."""
    m = model
    return Tokenizer(m.tokenizer, m.add_bos, m.add_eos, m.tokenizer_pattern, m.bos_token, m.eos_token)
