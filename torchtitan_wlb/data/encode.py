"""A row of a source as token ids and, where only some of them are targets, a mask."""

import string
from collections.abc import Sequence
from typing import Any

from torchtitan_wlb.data.chat import ChatTemplate
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError

Encoded = tuple[list[int], list[int] | None]


def fields_of(column: str) -> list[str]:
    """Columns that a template such as "{title}\\n\\n{text}" names, in order; a column alone names itself."""
    if "{" not in column:
        return [column]
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(column) if name is not None]
        if wrong := [name for name in names if not name or set(name) & set(".[]")]:
            raise ValueError(f"{{{wrong[0]}}} is no column")
    except ValueError as error:
        raise ConfigError(f"--training.dataset_column {column}: {error}") from None
    return list(dict.fromkeys(names))


class TextEncoder:
    """Rows of text.

    Args:
        column: of the text, or a template over columns; a null is an empty text.
    """

    def __init__(self, column: str, tokenizer: Tokenizer):
        self.column, self.columns, self.tokenizer = column, fields_of(column), tokenizer

    def __call__(self, row: dict[str, Any]) -> Encoded:
        values = {c: _text(row, c) for c in self.columns}
        text = self.column.format_map(values) if "{" in self.column else values[self.column]
        (ids,) = self.tokenizer.encode_documents([text])
        return ids, None


class ChatEncoder:
    """Rows of conversations; what the assistant says is the target."""

    def __init__(self, column: str, template: ChatTemplate):
        self.columns, self.template = [column], template

    def __call__(self, row: dict[str, Any]) -> Encoded:
        return self.template.encode(_value(row, self.columns[0]))


class IdEncoder:
    """Rows of ids as they are.

    Args:
        mask_column: of one number an id, 0 where it is no target; "" for none.
    """

    def __init__(self, column: str, mask_column: str):
        self.columns = [column, mask_column] if mask_column else [column]

    def __call__(self, row: dict[str, Any]) -> Encoded:
        ids = _numbers(row, self.columns[0])
        if any(isinstance(i, bool) for i in ids):
            raise ValueError(f"{self.columns[0]} does not hold lists of integers")
        if max(ids, default=0) >= 2**31 or min(ids, default=0) < -(2**31):
            raise ValueError(f"{self.columns[0]} has an id that is too large")
        if len(self.columns) == 1:
            return ids, None
        mask = _numbers(row, self.columns[1])
        if len(ids) != len(mask):
            raise ValueError(f"has {len(ids)} ids and {len(mask)} entries in {self.columns[1]}")
        return ids, [int(m != 0) for m in mask]


def _value(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise MissingColumn(column, list(row))
    return row[column]


def _text(row: dict[str, Any], column: str) -> str:
    value = _value(row, column)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{column} holds {type(value).__name__} there, not text")
    return value or ""


def _numbers(row: dict[str, Any], column: str) -> list[int]:
    value = _value(row, column) or []
    if not isinstance(value, list) or any(isinstance(x, (str, float, dict, list)) for x in value):
        raise ValueError(f"{column} does not hold lists of integers")
    if None in value:
        raise ValueError(f"{column} has an id that is null")
    return value


class MissingColumn(ValueError):
    """A row without a column, which it names with those that are there."""

    def __init__(self, column: str, has: Sequence[str]):
        self.column, self.has = column, list(has)
        super().__init__(f"no column {column}, it has {', '.join(has) or 'none'}")
