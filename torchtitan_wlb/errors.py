"""What a user's mistake ends in."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration or with a file it names, in one message."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(["The configuration cannot run:", *(f"  - {p}" for p in problems)]))


def first_reason(error: Exception) -> str:
    """Where and why a file is not what it should be: the first finding of a pydantic error, else the error itself."""
    from pydantic import ValidationError  # kernels and shard plans, which raise errors too, go without it

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole file'}: {first['msg']}"
