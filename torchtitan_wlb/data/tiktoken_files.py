"""tiktoken's encodings by name, and rank files such as Llama-3's tokenizer.model."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_wlb.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

# Word boundaries of Llama-3's tokenizer; the rank file holds only the merges.
LLAMA3_PATTERN = "|".join(
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
_LLAMA3_RANKS, _N_SPECIAL = 128_000, 256
# Special tokens of Llama 3.1 by place after the ranks; the others are reserved.
_LLAMA3_NAMES = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}


def _llama3_special(n: int) -> dict[str, int]:
    """{name: id}, the reserved ones numbered among themselves."""
    free = (i for i in range(_N_SPECIAL))
    names = (_LLAMA3_NAMES.get(i) or f"reserved_special_token_{next(free)}" for i in range(_N_SPECIAL))
    return {f"<|{name}|>": n + i for i, name in enumerate(names)}


def from_name(name: str) -> "tiktoken.Encoding":
    """A named encoding.

    Raises:
        ConfigError: not a name, or its ranks are neither here nor to be fetched.
    """
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise ConfigError(
            f"--model.tokenizer {name}: neither a file nor a folder; legal names are bytes, "
            f"{', '.join(tiktoken.list_encoding_names())}"
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # the library fetches it, once
        raise ConfigError(
            f"--model.tokenizer {name}: tiktoken cannot fetch its ranks ({type(error).__name__}); put them into the "
            "folder that the environment variable TIKTOKEN_CACHE_DIR names, or give the path of a rank file"
        ) from None


def from_rank_file(path: Path, content: bytes, pattern: str) -> "tiktoken.Encoding":
    """The encoding of a rank file, with Llama-3's special tokens after the ranks.

    Args:
        content: of the file; not read by tiktoken, which would keep a copy by path and not see that it has changed.
        pattern: expression that cuts text into words; "" for Llama-3's own file.
    """
    import tiktoken

    flag = f"--model.tokenizer {path}"
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise ConfigError(f"{flag}: not a tiktoken rank file, lines of base64 and rank ({str(error)[:200]})") from None
    n = len(ranks)
    if sorted(ranks.values()) != list(range(n)) or not all(bytes([i]) in ranks for i in range(256)):
        raise ConfigError(f"{flag}: its ranks must be 0 to {n - 1}, each once, with all 256 single bytes among them")
    if not pattern and n != _LLAMA3_RANKS:
        raise ConfigError(
            f"{flag} has {n} ranks, Llama-3's has {_LLAMA3_RANKS}: give the expression that cuts text into words for "
            "it in --model.tokenizer_pattern"
        )
    try:
        return tiktoken.Encoding(
            path.name,
            pat_str=pattern or LLAMA3_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=_llama3_special(n),
        )
    except ValueError as error:
        raise ConfigError(f"--model.tokenizer_pattern {pattern}: {error}") from None
