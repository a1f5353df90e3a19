"""Text to token ids: raw bytes, a named tiktoken encoding, or a tiktoken rank file (Llama-3's tokenizer.model).

Every tokenizer has one begin-of-text and one end-of-text id. The model's vocabulary is `padded_vocab_size`: the number
of ids rounded up to a multiple of 128, whatever the layout, so that checkpoints fit every tensor-parallel degree.
"""

import hashlib
from pathlib import Path

from torchtitan_wlb.errors import ConfigError

VOCAB_MULTIPLE = 128

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
_LLAMA3_SPECIAL_TOKENS = 256


class Tokenizer:
    """Encode documents to ids.

    Args:
        name: "bytes", a tiktoken encoding name, or the path of a tiktoken rank file.
        add_bos, add_eos: whether `encode_documents` puts the begin and end ids around every document.

    Attributes:
        n_ids: number of ids in use, special ids included.
        padded_vocab_size: n_ids rounded up to a multiple of 128.
        identity: the name, or a hash of the rank file.
        fingerprint: changes whenever the ids of a document could change.

    Raises:
        ConfigError: neither a known name nor a file.
    """

    def __init__(self, name: str, add_bos: bool = True, add_eos: bool = True):
        self.add_bos, self.add_eos = add_bos, add_eos
        self._encoding = None
        self.identity = name
        if name == "bytes":
            self.bos_id, self.eos_id, self.n_ids = 256, 257, 258
        elif Path(name).is_file():
            self._encoding = _from_rank_file(Path(name))
            self.identity = f"a file of hash {hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]}"
        else:
            self._encoding = _from_name(name)
        if self._encoding is not None:
            special = self._encoding._special_tokens
            self.eos_id = special.get("<|end_of_text|>", special.get("<|endoftext|>", self._encoding.n_vocab - 1))
            self.bos_id = special.get("<|begin_of_text|>", self.eos_id)
            self.n_ids = self._encoding.n_vocab
        self.padded_vocab_size = -(-self.n_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
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


def _from_name(name: str):
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise ConfigError(
            f"--model.tokenizer {name}: not a file; legal names are bytes, {', '.join(tiktoken.list_encoding_names())}"
        )
    return tiktoken.get_encoding(name)


def _from_rank_file(path: Path):
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(path))
    n = len(ranks)
    special = {"<|begin_of_text|>": n, "<|end_of_text|>": n + 1}
    special |= {f"<|reserved_special_token_{i}|>": n + i for i in range(2, _LLAMA3_SPECIAL_TOKENS)}
    return tiktoken.Encoding(path.name, pat_str=_LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
