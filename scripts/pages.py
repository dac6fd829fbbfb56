"""Stages the pages of the site: docs/ with what a site needs besides, and afterwards checks every link of it.

    python scripts/pages.py play DIR      # notebooks, run, as Markdown with what they print
    python scripts/pages.py stage DIR     # the pages beside them: what Zensical builds from
    python scripts/pages.py check SITE    # every link and anchor of the built pages leads somewhere

The README becomes the first page and docs/index.md the list of all; results and their history in benchmarks/
are pages too. A link to a file that is no page (a source file, a recipe) leads to a page that shows it; a
link to a directory becomes plain text. TeX between dollars becomes MathML, so that no script is needed to
show it.
"""

import argparse
import contextlib
import html
import io
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^(```|~~~).*?^\1$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
RENAMED = {
    "README.md": "index.md",
    "docs/index.md": "all-pages.md",
    "ARCHITECTURE.md": "architecture.md",
    "benchmarks/RESULTS.md": "results.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".md": "markdown"}

STYLE = """
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 0 1rem; }
.beside > * { min-width: 0; }
.md-typeset .printed pre > code { opacity: .8; border-left: .15rem solid var(--md-accent-fg-color); }
.md-typeset math[display="block"] { font-size: 1.1em; margin: .5em 0; padding: .5em 0; }
.md-typeset math[display="block"] { overflow: auto hidden; }
.md-grid { max-width: 72rem; }
"""


# ---------------------------------------------------------------------- notebooks


def cells(text: str) -> Iterator[tuple[str, str]]:
    """The cells of a percent-format script: ("markdown", prose) or ("code", program)."""
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        if kind.strip() == "[markdown]":
            yield "markdown", re.sub(r"^# ?", "", body.strip("\n"), flags=re.MULTILINE)
        else:
            yield "code", body.strip("\n")


def notebook(path: Path) -> str:
    """The same cells as a Jupyter notebook without outputs, as JSON."""
    written: list[dict[str, Any]] = []
    for number, (kind, body) in enumerate(cells(path.read_text(encoding="utf-8"))):
        cell = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": body.splitlines(keepends=True),
        }
        written.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def played(path: Path) -> str:
    """A notebook, run from top to bottom in a directory of its own, as Markdown with what it prints."""
    space: dict[str, Any] = {"__name__": path.stem}
    out = []
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for kind, body in cells(path.read_text(encoding="utf-8")):
                if kind == "markdown":
                    out.append(body)
                    continue
                out.append(f"```python\n{body.strip()}\n```")
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(compile(body, path.name, "exec"), space)
                if said.getvalue().strip():
                    out.append(f'<div class="printed" markdown>\n\n```text\n{said.getvalue()}```\n\n</div>')
        finally:
            os.chdir(here)
    return "\n\n".join(out) + "\n"


# ---------------------------------------------------------------------- pages


def where_pages_go() -> dict[str, str]:
    """Of each page and picture, by its path in the repository, its path in the site."""
    files = [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    files += [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".svg", ".py")]
    files += [p for p in (ROOT / "benchmarks").rglob("*") if p.suffix in (".md", ".svg")]
    names = [p.relative_to(ROOT).as_posix() for p in files]
    found = {name: RENAMED.get(name, name.removeprefix("docs/")) for name in names}
    return {name: re.sub(r"^notebooks/(\w+)\.py$", r"notebooks/\1.md", to) for name, to in found.items()}


class Staged:
    """The pages of a site in the making, and the files that they show."""

    def __init__(self, out: Path) -> None:
        self.out, self.places = out, where_pages_go()
        self.shown: set[str] = set()

    def write(self, name: str, text: str) -> None:
        """A page, by its path in the repository."""
        text = besides(with_api(self.relinked(name, with_formulas(text))))
        file = self.out / self.places[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def relinked(self, name: str, text: str) -> str:
        """A page with its links as they are in the site."""
        here = posixpath.dirname(self.places[name])

        def replace(found: re.Match[str]) -> str:
            mark, words, target = found.groups()
            path, _, anchor = target.partition("#")
            if not path or urlsplit(target).scheme:
                return found[0]
            wanted = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            place = self.places.get(wanted)
            to = place or self.shown_at(wanted)
            if not to:
                return words
            behind = f"#{anchor}" if place and anchor else ""  # a file is shown as text, without headings
            return f"{mark}[{words}]({posixpath.relpath(to, here or '.')}{behind})"

        return outside_fences(text, lambda part: LINK.sub(replace, part))

    def shown_at(self, path: str) -> str:
        """The page that shows a file of the repository; empty for a directory."""
        if not (ROOT / path).is_file():
            return ""
        self.shown.add(path)
        return f"files/{path}.md"

    def write_shown(self) -> None:
        """The pages of files that were linked to."""
        for path in sorted(self.shown):
            text = (ROOT / path).read_text(encoding="utf-8")
            file = self.out / "files" / f"{path}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            head = f"---\nsearch:\n  exclude: true\n---\n\n# {Path(path).name}\n\n`{path}`\n\n"
            language = LANGUAGES.get(Path(path).suffix, "text")
            file.write_text(f"{head}~~~~{language}\n{text}\n~~~~\n", encoding="utf-8")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """A page with its prose changed and its fenced blocks as they were."""
    out, at = [], 0
    for found in FENCED.finditer(text):
        out += [change(text[at : found.start()]), found[0]]
        at = found.end()
    return "".join([*out, change(text[at:])])


def besides(text: str) -> str:
    """Blocks between the comments `beside` and `end beside`, side by side where there is room."""
    if "<!-- beside -->" not in text:
        return text
    text = text.replace("<!-- beside -->", '<div class="beside" markdown>\n')
    return "---\nhide:\n  - navigation\n---\n\n" + text.replace("<!-- end beside -->", "\n</div>")


def with_api(text: str) -> str:
    """A page whose tables of public names are followed by their signatures, members and docstrings."""

    def replace(found: re.Match[str]) -> str:
        return found[0] + "\n" + "\n".join(f"::: posttrain.{name}\n" for name in found[1].split())

    return re.sub(r"<!-- generated: api ([\w ]+) -->\n.*?<!-- end -->\n", replace, text, flags=re.DOTALL)


def with_formulas(text: str) -> str:
    """A page whose TeX, between dollars, is MathML, which browsers show by themselves."""

    def block(found: re.Match[str]) -> str:
        return "\n" + _mathml(found[1], "block") + "\n"

    def inline(found: re.Match[str]) -> str:
        return _mathml(found[1], "inline")

    def change(part: str) -> str:
        part = re.sub(r"^\$\$\n(.+?)\n\$\$$", block, part, flags=re.DOTALL | re.MULTILINE)
        return re.sub(r"(?<![\w`$\\])\$(?!\s)([^$`\n]+?)(?<!\s)\$(?![\w$])", inline, part)

    return outside_fences(text, change)


def _mathml(tex: str, display: str) -> str:
    from latex2mathml.converter import convert  # of the site's environment

    return convert(tex.strip(), display=display).replace("\n", " ")


def play(out: Path) -> None:
    """Runs the notebooks; needs posttrain's environment."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "notebooks").mkdir(parents=True)
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.py")):
        (out / "notebooks" / f"{path.stem}.md").write_text(played(path), encoding="utf-8")


def stage(out: Path) -> None:
    """Writes everything that the site is built from; needs the site's environment."""
    staged = Staged(out)
    for name, to in staged.places.items():
        source = ROOT / name
        if source.suffix == ".svg":
            (out / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, out / to)
        else:
            source = out / to if source.suffix == ".py" else source
            staged.write(name, source.read_text(encoding="utf-8"))
    staged.write_shown()
    (out / "site.css").write_text(STYLE, encoding="utf-8")


# ---------------------------------------------------------------------- the built site


class Page(HTMLParser):
    """The links and the anchors of a built page, and what it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what one tag says."""
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        loads = [found["src"]] if "src" in found else []
        loads += [found["href"]] if tag == "link" and found.get("rel") in ("stylesheet", "preload") else []
        self.loads += loads


def broken(site: Path) -> list[str]:
    """Every link and anchor of a site that leads nowhere, and what it would load from other hosts."""
    pages = {p.resolve(): Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    out = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        out += [f"{name}: loads {url}" for url in page.loads if urlsplit(url).netloc]
        for link in [*page.links, *(url for url in page.loads if not urlsplit(url).netloc)]:
            parts = urlsplit(html.unescape(link))
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                out.append(f"{name}: {link} is not there")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
                out.append(f"{name}: {link} has no such anchor")
    return out


def main() -> int:
    """Plays, stages or checks; 1 if a link is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("do", choices=["play", "stage", "check"])
    parser.add_argument("path", type=Path)
    asked = parser.parse_args()
    if asked.do != "check":
        {"play": play, "stage": stage}[asked.do](asked.path)
        return 0
    found = broken(asked.path)
    print("\n".join(found) or f"{len(list(asked.path.rglob('*.html')))} pages, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
