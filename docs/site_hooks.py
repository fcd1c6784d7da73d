"""Brings what lies outside docs/ into the site, with every page at its place in the repository (mkdocs.yml names this).

The first page is the leaderboard, made of every results folder below results/ (or below the folder that the environment
variable RESULTS names), and each of these folders has its report's page there, made anew from its records.

Beside these the site is README.md, docs/ and all that is linked from there, and from what is linked: a page where it is
Markdown, a copy where it is not. A README.md is its folder's page. A folder without one stays a name without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from lorabench.report import leaderboard, recommendation
from lorabench.report.folders import analyses
from lorabench.report.page import page as report_page
from lorabench.report.shown import show

ROOT = Path(__file__).resolve().parents[1]
FIRST, ABOUT = "index.md", "about.md"  # the leaderboard; README.md
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def target(source: str, path: str) -> str | None:
    """What a link of the file `source` leads to, both from the root; None where there is no such file or folder."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if found.startswith("..") or not (ROOT / found).exists():
        return None
    readme = posixpath.join(found, "README.md")
    return readme if (ROOT / readme).exists() else found


def place(path: str) -> str:
    """Where in the site a file of the repository stands."""
    if path == "README.md":
        return ABOUT
    folder, name = posixpath.split(path.removeprefix("docs/"))
    return posixpath.join(folder, "index.md" if name == "README.md" else name)


def linked(source: str) -> Iterator[str]:
    for link in LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
        found = target(source, link["path"])
        if found and (ROOT / found).is_file():
            yield found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    todo = ["README.md", *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    while todo:
        path = todo.pop()
        if not files.get_file_from_path(place(path)):
            source = str(ROOT / path)
            files.append(File.generated(config, place(path), abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV))
        elif not path.startswith("docs/"):
            continue
        if path.endswith(".md"):
            todo += [found for found in linked(path) if not files.get_file_from_path(place(found))]
    _results(files, config)
    return files


def _results(files: Files, config: MkDocsConfig) -> None:
    """The leaderboard, and the page of each results folder that it leads to."""
    root = Path(os.environ.get("RESULTS") or ROOT / "results")
    found = analyses(root)
    text = leaderboard.markdown(leaderboard.entries(found))
    files.append(File.generated(config, FIRST, content=text))
    for folder, analysis in found.items():
        html = report_page(analysis, show(analysis), recommendation.read(root / folder))
        uri = f"results/{folder}/report.html"
        if known := files.get_file_from_path(uri):
            files.remove(known)
        files.append(File.generated(config, uri, content=html))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Material's search is a dialog without a name, which a screen reader needs (axe: aria-dialog-name)."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if not page.file.abs_src_path:  # the leaderboard, whose links are the site's already
        return markdown
    source = posixpath.relpath(page.file.abs_src_path, ROOT)

    def moved(link: re.Match[str]) -> str:
        found = target(source, link["path"])
        if found is None:
            return link[0]
        if (ROOT / found).is_dir():
            return link["text"].strip("[]")
        here = posixpath.dirname(page.file.src_uri)
        return f"{link['text']}({posixpath.relpath(place(found), here)}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)
