"""Text to token ids: raw bytes, a named tiktoken encoding, or a tiktoken rank file (Llama-3's tokenizer.model).

Every tokenizer has one begin-of-text and one end-of-text id.
"""

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_wlb.config import Model
from torchtitan_wlb.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

# Word boundaries of Llama-3's tokenizer; the rank file holds only the merges.
_LLAMA3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_LLAMA3_RANKS, _LLAMA3_SPECIAL_TOKENS = 128_000, 256


class Tokenizer:
    """Encode documents to ids.

    Args:
        name: "bytes", a tiktoken encoding name, or the path of a tiktoken rank file.
        pattern: expression that cuts text into words before merging; "" for Llama-3's rank file.
        add_bos, add_eos: whether `encode_documents` puts the begin and end ids around every document.

    Attributes:
        n_ids: number of ids in use, special ids included.
        identity: the name, or a hash of the rank file.
        fingerprint: changes whenever the ids of a document could change.

    Raises:
        ConfigError: neither a known name nor a file.
    """

    def __init__(self, name: str, add_bos: bool = True, add_eos: bool = True, pattern: str = ""):
        self.add_bos, self.add_eos = add_bos, add_eos
        self._encoding = None
        self.identity = name
        if name == "bytes":
            self.bos_id, self.eos_id, self.n_ids = 256, 257, 258
        elif Path(name).is_file():
            self._encoding = _from_rank_file(Path(name), pattern)
            content = Path(name).read_bytes() + pattern.encode()
            self.identity = f"a file of hash {hashlib.sha256(content).hexdigest()[:16]}"
        else:
            self._encoding = _from_name(name)
        if self._encoding is not None:
            special = self._encoding._special_tokens
            self.eos_id = special.get("<|end_of_text|>", special.get("<|endoftext|>", self._encoding.n_vocab - 1))
            self.bos_id = special.get("<|begin_of_text|>", self.eos_id)
            self.n_ids = self._encoding.n_vocab
        self.fingerprint = hashlib.sha256(f"{self.identity} {add_bos} {add_eos}".encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without begin and end ids; text that spells a special token is ordinary text."""
        if self._encoding is None:
            return list(text.encode("utf-8", errors="replace"))
        return self._encoding.encode_ordinary(text)

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Ids of documents, with begin and end ids as configured. An empty text stays empty."""
        head = [self.bos_id] if self.add_bos else []
        tail = [self.eos_id] if self.add_eos else []
        return [[*head, *self.encode(text), *tail] if text else [] for text in texts]

    def decode(self, ids: list[int]) -> str:
        if self._encoding is None:
            return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
        return self._encoding.decode(ids)


def _from_name(name: str) -> "tiktoken.Encoding":
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise ConfigError(
            f"--model.tokenizer {name}: not a file; legal names are bytes, {', '.join(tiktoken.list_encoding_names())}"
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # the library fetches it, once
        raise ConfigError(
            f"--model.tokenizer {name}: tiktoken cannot fetch its ranks ({type(error).__name__}); put them into the "
            "folder that the environment variable TIKTOKEN_CACHE_DIR names, or give the path of a rank file"
        ) from None


def _from_rank_file(path: Path, pattern: str) -> "tiktoken.Encoding":
    import tiktoken

    flag = f"--model.tokenizer {path}"
    try:  # not by tiktoken's own reader: it keeps a copy by path and would not see that a file has changed
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: not a tiktoken rank file, lines of base64 and rank ({str(error)[:200]})") from None
    n = len(ranks)
    if sorted(ranks.values()) != list(range(n)) or not all(bytes([i]) in ranks for i in range(256)):
        raise ConfigError(f"{flag}: its ranks must be 0 to {n - 1}, each once, with all 256 single bytes among them")
    if not pattern and n != _LLAMA3_RANKS:
        raise ConfigError(
            f"{flag} has {n} ranks, Llama-3's has {_LLAMA3_RANKS}: give the expression that cuts text into words for "
            "it in --model.tokenizer_pattern"
        )
    special = {"<|begin_of_text|>": n, "<|end_of_text|>": n + 1}
    special |= {f"<|reserved_special_token_{i}|>": n + i for i in range(2, _LLAMA3_SPECIAL_TOKENS)}
    try:
        return tiktoken.Encoding(
            path.name, pat_str=pattern or _LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
    except ValueError as error:
        raise ConfigError(f"--model.tokenizer_pattern {pattern}: {error}") from None


def build_tokenizer(model: Model) -> Tokenizer:
    """Tokenizer of the [model] section."""
    return Tokenizer(model.tokenizer, model.add_bos, model.add_eos, model.tokenizer_pattern)
