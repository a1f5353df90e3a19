"""What a user's mistake ends in."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration or with a file it names, in one message."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(["The configuration cannot run:", *(f"  - {p}" for p in problems)]))
