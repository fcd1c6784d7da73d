"""A figure's SVG as it stands in the page: in the page's colours, without styles of its own, its points named.

The page's Content-Security-Policy allows no inline style, so each becomes the attributes that SVG has for it. Black and
white stay attributes too, which the page's style sheet turns into its own two colours: dark figures in dark mode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree

SVG, HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
LONG = re.compile(r"(-?\d+\.\d\d)\d+")
NEEDLESS = ("metadata", "style")
FONT = "font-family"  # the page's style sheet has it once for all


def inline(svg: bytes, name: str, alternative: str, marks: Mapping[str, tuple[int, str]]) -> str:
    """name: makes the ids differ from those of other figures. alternative: what a reader hears. marks: the id of a
    point → the number of its row and what it says under the pointer."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(SVG) in NEEDLESS:
                parent.remove(child)
    used = set(re.findall(r"#([\w-]+)", svg.decode()))
    for element in root.iter():
        _plain(element, name, used)
        if found := marks.get(element.get("id", "")):
            element.set("data-cell", str(found[0]))
            del element.attrib["id"]
            said = ElementTree.Element(f"{SVG}title")
            said.text = found[1]
            element.insert(0, said)
        elif element.get("id", "").removeprefix(f"{name}-") not in used:
            element.attrib.pop("id", None)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", alternative)
    text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)
    return re.sub(r">\s+<", "><", text.replace("ns0:", "").replace("xmlns:ns0", "xmlns"))


def _plain(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Styles as attributes, references to this figure's own ids, coordinates to a hundredth of a point."""
    for pair in element.attrib.pop("style", "").split(";"):
        key, colon, value = pair.partition(":")
        if colon and key.strip() != FONT:
            element.set(key.strip(), value.strip())
    if target := element.attrib.pop(HREF, ""):
        element.set("href", f"#{name}-{target[1:]}")
    if (own := element.get("id")) in used:
        element.set("id", f"{name}-{own}")
    for key, value in element.attrib.items():
        if key in ("d", "x", "y", "transform", "width", "height", "points"):
            element.set(key, LONG.sub(r"\1", value).replace("\n", " ").strip())
        elif key == "clip-path":
            element.set(key, value.replace("url(#", f"url(#{name}-"))
