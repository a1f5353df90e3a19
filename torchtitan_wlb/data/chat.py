"""Conversations to ids and masks: a chat template writes the text, only what the assistant says is a target.

The template decides where special tokens stand; what a message says is text, even where it spells one.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError

BUILT_IN = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
_ROLES = {"human": "user", "gpt": "assistant"}
# Code points that are no characters, so that no text has them: around what the assistant says, and around the id of a
# special token that a message spells.
_BEGIN, _END, _SPELT = "\ufdd0", "\ufdd1", "\ufdd2"


class ChatTemplate:
    """A jinja template of a model, or one of ours.

    Args:
        name: a key of BUILT_IN, the path of a .jinja file, or "" for the one of the tokenizer's folder
            (chat_template.jinja, else chat_template in tokenizer_config.json).
        tokenizer: whose special tokens it writes.

    Raises:
        ConfigError: no template, or one that cannot be parsed.
    """

    def __init__(self, name: str, tokenizer: Tokenizer):
        self.name, self.tokenizer = name, tokenizer
        self.source = BUILT_IN.get(name) or _read(name, tokenizer.folder)
        self._marks = re.search(r"{%-?\s*generation\b", self.source) is not None
        longest_first = sorted(tokenizer.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        names: dict[int | None, str] = {i: token for token, i in tokenizer.special.items()}
        self._named = {"bos_token": names.get(tokenizer.bos_id, ""), "eos_token": names.get(tokenizer.eos_id, "")}
        _ = self._template

    def __getstate__(self) -> dict[str, Any]:  # to worker processes, without what jinja has compiled
        return {k: v for k, v in vars(self).items() if k != "_template"}

    @cached_property
    def _template(self):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
        )
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, **{"ensure_ascii": False, **options})
        # No strftime_now: templates that print the date then print a fixed one, and ids do not depend on the day.
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"--model.chat_template {self.name}: {error}") from None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """The text of a conversation."""
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._named)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the assistant speaks next."""
        return self._encode(self.render(self._as_text(messages), add_generation_prompt=True))[0]

    def encode(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """(ids, 1 for every id that the assistant says, else 0): a token that reaches into what it says counts.

        Raises:
            ValueError: not a list of {"role", "content"} or {"from", "value"}, or the template refuses it.
        """
        messages = self._as_text(messages)
        return self._encode(self.render(messages) if self._marks else self._mark_turns(messages))

    def _as_text(self, messages: Any) -> list[dict[str, Any]]:
        """Messages with role and content, in which nothing looks like a special token."""
        found = []
        for m in messages if isinstance(messages, list) else [None]:
            if not isinstance(m, dict) or not isinstance(role := m.get("role", m.get("from")), str):
                raise ValueError("not a list of messages with role and content")
            m = {k: v for k, v in m.items() if v is not None and k not in ("from", "value")} | {
                "role": _ROLES.get(role, role),
                "content": m.get("content", m.get("value")),
            }
            found.append(self._spell(m))
        return found

    def _spell(self, value: Any) -> Any:
        if isinstance(value, str):
            if _BEGIN in value or _END in value or _SPELT in value:
                raise ValueError("a message with code points that are no characters")
            return self._special.sub(lambda m: f"{_SPELT}{self.tokenizer.special[m[0]]}{_SPELT}", value)
        if isinstance(value, dict):
            return {k: self._spell(v) for k, v in value.items()}
        return [self._spell(v) for v in value] if isinstance(value, list) else value

    def _mark_turns(self, messages: list[dict[str, Any]]) -> str:
        """The rendered text, with marks around what each turn of the assistant adds to it."""
        text, marked, at = self.render(messages), "", 0
        for i, m in enumerate(messages):
            if m["role"] == "assistant":
                before, after = self.render(messages[:i], add_generation_prompt=True), self.render(messages[: i + 1])
                if not (text.startswith(after) and after.startswith(before)):
                    raise ValueError(
                        "the chat template writes a turn of the assistant otherwise once others follow, or not after "
                        "its prompt; mark what is to be learnt in a copy of it: {% generation %} ... "
                        "{% endgeneration %}"
                    )
                marked += text[at : len(before)] + _BEGIN + text[len(before) : len(after)] + _END
                at = len(after)
        return marked + text[at:]

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """(ids of a rendered text, 1 for those that overlap what is marked in it)."""
        special, names = self.tokenizer.special, {str(i): token for token, i in self.tokenizer.special.items()}
        ids: list[int] = []
        mask: list[int] = []
        inside = 0
        for piece in re.split(f"({self._special.pattern})", text):
            if piece in special:
                ids.append(special[piece])
                mask.append(inside)
                continue
            plain, is_said = "", []  # one flag a character
            for part in re.split(f"([{_BEGIN}{_END}])", piece):
                if part in (_BEGIN, _END):
                    inside = int(part == _BEGIN)
                    continue
                part = re.sub(f"{_SPELT}(\\d+){_SPELT}", lambda m: names[m[1]], part)
                plain += part
                is_said += [inside] * len(part)
            found, starts = self.tokenizer.encode_with_starts(plain)
            ids += found
            mask += [int(any(is_said[a : max(b, a + 1)])) for a, b in zip(starts, [*starts[1:], len(plain)])]
        return ids, mask


def _read(name: str, folder: Path | None) -> str:
    """The template of a file, or of the tokenizer's folder."""
    flag = f"--model.chat_template {name or '(of the tokenizer)'}"
    try:
        if name:
            return Path(name).read_text()
        if folder and (path := folder / "chat_template.jinja").is_file():
            return path.read_text()
        if folder and (path := folder / "tokenizer_config.json").is_file():
            template = json.loads(path.read_bytes()).get("chat_template")
            if isinstance(template, list):  # several by name
                template = next((t["template"] for t in template if t["name"] == "default"), None)
            if isinstance(template, str):
                return template
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{flag}: {str(error)[:200]}") from None
    raise ConfigError(f"{flag}: there is none; legal are {', '.join(BUILT_IN)} and the path of a .jinja file")


def _refuse(message: str) -> None:
    raise ValueError(f"the chat template says: {message}")


def _generation() -> type:
    """{% generation %} ... {% endgeneration %}: marks what stands between them."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation
