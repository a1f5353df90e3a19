"""Types of configuration fields: ranges, "auto" and one value where several may stand."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")


def _is_auto_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 or at least 1")
    return value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _as_tuple_or_auto(value: Any) -> Any:
    return "auto" if value in ("auto", ["auto"], ("auto",)) else _as_tuple(value)


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Count = Annotated[int, Field(ge=1, le=2**40)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
CountOrAuto = Annotated[int, Field(le=2**40), AfterValidator(_is_auto_or_positive)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Several = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]  # one value stands for a tuple of one
CountOrOp = Annotated[Literal["op"] | Count, BeforeValidator(_as_number)]  # torchtitan writes the number as a word
SeveralOrAuto = Annotated[T | Literal["auto"], BeforeValidator(_as_tuple_or_auto)]


class Section(BaseModel):
    # TOML has types, so a number in quotes or a word for a flag is a mistake there.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
