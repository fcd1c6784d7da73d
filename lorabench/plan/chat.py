"""A chat as tokens by the tokenizer's own template, and which of them the assistant said.

Where the template marks them ({% generation %}), its marks are taken. Else each of the assistant's turns begins where
the chat before it ends with the template's prompt for an answer, and ends where the chat up to it ends: what the
template puts after an answer (its end-of-turn token) is part of it, what it puts before (the role's header) is not.

Of a chat in two parts, a prompt and its completion, all that comes after the prompt is trained, as TRL does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

MARKS = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
ASSISTANT = "assistant"
PROBE = "LORABENCHPROBE"  # stands for an answer, to see where the template puts it

Message = Mapping[str, Any]


class ChatError(ValueError):
    """A chat that the template refuses, or whose answers cannot be found in what it makes of it."""


def tokenize(tokenizer: Any, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], list[bool]]:
    """(tokens of the whole chat, for each whether the assistant said it). Raises ChatError."""
    template = _template(tokenizer, tools)
    with _in_one_line():
        if MARKS.search(template) and tokenizer.is_fast:
            made = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(made["input_ids"]), [bool(said) for said in made["assistant_masks"]]
        return _by_prefixes(_Rendered(tokenizer, list(messages), tools))


def tokenize_completion(
    tokenizer: Any, prompt: Sequence[Message], completion: Sequence[Message], tools: Any = None
) -> tuple[list[int], list[bool]]:
    """(tokens of both, for each whether it comes after the prompt with the template's prompt for an answer). Raises
    ChatError."""
    _template(tokenizer, tools)
    with _in_one_line():
        chat = _Rendered(tokenizer, [*prompt, *completion], tools)
        tokens = chat.tokens(chat.whole)
        begin = common(tokens, chat.tokens(chat.text(prompt, prompt=True)))
        return tokens, [number >= begin for number in range(len(tokens))]


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except ChatError:
        raise
    except Exception as error:  # a template may raise anything: roles that do not alternate, a field that it misses
        raise ChatError(f"the chat template refuses it: {' '.join(str(error).split())[:200]}") from None


def _template(tokenizer: Any, tools: Any) -> str:
    try:
        return tokenizer.get_chat_template(tools=tools)
    except (ValueError, AttributeError):
        raise ChatError(
            "the tokenizer has no chat template; expected one with it, or name the tokenizer of a model that has one: "
            "{FILE.jsonl: {tokenizer: ORG/NAME}}"
        ) from None


def _by_prefixes(chat: _Rendered) -> tuple[list[int], list[bool]]:
    tokens = chat.tokens(chat.whole)
    said = [False] * len(tokens)
    for number, message in enumerate(chat.messages):
        if message["role"] == ASSISTANT:
            begin, end = (common(tokens, chat.tokens(chat.whole[:cut])) for cut in chat.turn(number))
            said[begin:end] = [True] * (end - begin)
    return tokens, said


class _Rendered:
    """A chat, and what the template makes of it and of parts of it."""

    def __init__(self, tokenizer: Any, messages: list[Message], tools: Any) -> None:
        self.tokenizer, self.messages, self.tools = tokenizer, messages, tools
        self.whole = self.text(messages)

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tools=self.tools, tokenize=False, add_generation_prompt=prompt
        )

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def turn(self, number: int) -> tuple[int, int]:
        """(begin, end) of a turn, in characters of the whole. Raises ChatError."""
        before = self.text(self.messages[:number], prompt=True) if number else ""
        upto = self.text(self.messages[: number + 1])
        if before and self.whole.startswith(before) and self.whole.startswith(upto):
            return len(before), len(upto)
        return self._probed(number, before)

    def _probed(self, number: int, before: str) -> tuple[int, int]:
        """Of a turn that the template renders otherwise when others follow it (Qwen3 leaves out what was thought), or
        that is the first: what stands around an answer there, and what still follows it when it is the last."""
        probe = {**self.messages[number], "content": PROBE}
        probed = self.text([*self.messages[:number], probe, *self.messages[number + 1 :]])
        head, found, rest = probed.partition(PROBE)
        last = self.text([*self.messages[:number], probe]).partition(PROBE)[2]
        begin = before if before and self.whole.startswith(before) else head
        if not (found and self.whole.startswith(begin) and self.whole.endswith(rest)):
            raise ChatError(
                f"the chat template renders message {number + 1} in a way in which the assistant's words cannot be "
                "found; expected one with {% generation %} marks, or train on all: {FILE.jsonl: {train_on: all}}"
            )
        return len(begin), len(self.whole) - len(rest) + common(last, rest)


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many of their first items are the same."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
