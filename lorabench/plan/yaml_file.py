"""Reading a user's YAML: what is no YAML, or would grow without end, is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

LARGEST = 1 << 20  # bytes; the longest published configuration has some ten thousand
MOST_NODES = 20_000  # after every alias is written out: nine lines of aliases can stand for 10⁹ of them
DEEPEST = 50


class YamlError(ValueError):
    """A file that cannot be used; the message says what was found."""


def read(path: Path) -> Any:
    """What the file holds, as OmegaConf reads it, interpolations resolved. Raises YamlError."""
    try:
        if path.stat().st_size > LARGEST:
            raise YamlError(f"it has more than {LARGEST} bytes")
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _count(root, 0, [0])
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except UnicodeDecodeError:
        raise YamlError("it is no text in UTF-8") from None
    except RecursionError:
        raise YamlError(f"it is nested deeper than {DEEPEST} levels") from None
    except OSError as error:
        raise YamlError(f"it cannot be read: {error.strerror}") from None
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
