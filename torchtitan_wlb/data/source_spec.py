"""One source of a recipe: what its documents depend on, its parts, and what makes ids of its rows."""

import inspect
from dataclasses import dataclass
from functools import cached_property

from torchtitan_wlb.data.chat import ChatTemplate
from torchtitan_wlb.data.encode import ChatEncoder, IdEncoder, TextEncoder
from torchtitan_wlb.data.parts import Part, parts_of_tables, parts_of_texts
from torchtitan_wlb.data.sources import SOURCES, Source, source_identity
from torchtitan_wlb.data.tokenizer import Tokenizer

_HF_ROWS = 10_000  # a part


@dataclass(frozen=True)
class SourceSpec:
    """What to prepare: one source and everything its documents depend on. Fields are keys of [training].

    Attributes:
        format: "text", "messages" (written by chat_template).
        config, split: of a Hugging Face dataset.
        bad_rows: "fail" or "skip".
        held_out: for evaluation.
    """

    name: str
    path: str
    column: str
    loss_mask_column: str
    seq_len: int
    long_documents: str
    format: str = "text"
    chat_template: str = ""
    config: str = ""
    split: str = "train"
    bad_rows: str = "fail"
    held_out: bool = False

    @property
    def source(self) -> Source:
        return SOURCES[self.name]

    @cached_property
    def files(self) -> list[str]:
        return self.source.files(self.path, self.held_out)

    def encoder(self, tokenizer: Tokenizer) -> TextEncoder | ChatEncoder | IdEncoder:
        """What makes ids of a row."""
        if self.name == "tokens":
            return IdEncoder(self.column, self.loss_mask_column)
        if self.format == "messages":
            return ChatEncoder(self.column, ChatTemplate(self.chat_template, tokenizer))
        return TextEncoder(self.column, tokenizer)

    def identity(self, tokenizer: Tokenizer) -> str:
        """A string that changes whenever the ids of a document could change."""
        code = inspect.getsource(self.source.read) if self.source.read else ""  # what a reader calls a document
        encoder = self.encoder(tokenizer)
        template = encoder.template.source if isinstance(encoder, ChatEncoder) else ""
        used = "" if self.name == "tokens" or self.source.kind in ("flat", "lengths") else tokenizer.fingerprint
        how = f"{self.column} {self.loss_mask_column} {self.format} {self.config} {self.split} {self.bad_rows}"
        return f"{code} {source_identity(self.name, self.path, self.files)} {how} {template} {used}"

    def parts(self) -> list[Part]:
        """In the order of the documents; the same with any number of processes."""
        if self.name == "hf":
            n = len(self.dataset())
            return [Part((), i, min(i + _HF_ROWS, n), 1) for i in range(0, n, _HF_ROWS)]
        return parts_of_texts(self.files) if self.source.kind == "text" else parts_of_tables(self.files)

    def dataset(self):
        """The Hugging Face dataset."""
        import datasets

        return datasets.load_dataset(self.path, self.config or None, split=self.split)
