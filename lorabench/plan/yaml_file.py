"""Reading a user's YAML: what is no YAML, or would grow without end, is one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

LARGEST = 1 << 20  # bytes; the longest published configuration has some ten thousand
MOST_NODES = 20_000  # after every alias is written out: nine lines of aliases can stand for 10⁹ of them
DEEPEST = 50
INTERPOLATION = re.compile(r"\$\{\s*(\w[\w.-]*)\s*\}")


class YamlError(ValueError):
    """A file that cannot be used; the message says what was found."""


def read(path: Path) -> Any:
    """What the file holds. Raises YamlError."""
    try:
        if path.stat().st_size > LARGEST:
            raise YamlError(f"it has more than {LARGEST} bytes")
        return parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise YamlError("it is no text in UTF-8") from None
    except OSError as error:
        raise YamlError(f"it cannot be read: {error.strerror}") from None


def parsed(text: str) -> Any:
    """What a text holds, as OmegaConf reads it, interpolations resolved. Raises YamlError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _count(root, 0, [0])
        config = OmegaConf.create(text)
        _Expanded(OmegaConf.to_container(config)).add()
        return OmegaConf.to_container(config, resolve=True)
    except RecursionError:
        raise YamlError(f"it is nested deeper than {DEEPEST} levels") from None
    except YamlError:
        raise
    except Exception as error:  # YAML's errors, OmegaConf's, and ValueErrors of numbers and dates
        raise YamlError(f"it is no YAML: {' '.join(str(error).split())[:200]}") from None


def _count(node: yaml.Node, depth: int, counted: list[int]) -> None:
    """Counts every node as often as it stands for something. Raises YamlError where these are too many or too deep."""
    counted[0] += 1
    if counted[0] > MOST_NODES:
        raise YamlError(f"it stands for more than {MOST_NODES} values")
    if depth > DEEPEST:
        raise YamlError(f"it is nested deeper than {DEEPEST} levels")
    inner = [x for pair in node.value for x in pair] if isinstance(node, yaml.MappingNode) else node.value
    if isinstance(node, yaml.CollectionNode):
        for child in inner:
            _count(child, depth + 1, counted)


class _Expanded:
    """How much a configuration comes to when every interpolation stands for what it names: ten lines, each of ten times
    the one before, come to 10¹⁰ words."""

    def __init__(self, root: Any) -> None:
        self.root, self.values, self.characters = root, 0, 0

    def add(self, *of: Any, depth: int = 0) -> None:
        """The values `of` this depth, or all. Raises YamlError where they are too many, too long or too deep."""
        if depth > DEEPEST:
            raise YamlError(f"it is nested deeper than {DEEPEST} levels")
        for value in of or (self.root,):
            self.values += 1
            if isinstance(value, str):
                self._text(value, depth)
            elif isinstance(value, dict | list) and value:
                self.add(*(value.values() if isinstance(value, dict) else value), depth=depth + 1)
            if self.values > MOST_NODES or self.characters > LARGEST:
                raise YamlError(f"it stands for more than {MOST_NODES} values or {LARGEST} characters")

    def _text(self, text: str, depth: int) -> None:
        names = INTERPOLATION.findall(text)
        if len(names) != text.count("${"):
            raise YamlError("it has an interpolation of another form than ${key} or ${key.key}")
        self.characters += len(text)
        for name in names:
            self.add(self._named(name), depth=depth + 1)

    def _named(self, name: str) -> Any:
        """What stands under a name; None where nothing does, of which OmegaConf has the words."""
        found = self.root
        for key in name.split("."):
            own = dict(enumerate(found)) if isinstance(found, list) else found if isinstance(found, dict) else {}
            found = {str(k): v for k, v in own.items()}.get(key)
        return found
