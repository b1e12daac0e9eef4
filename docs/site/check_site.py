"""Checks a built site: every link, anchor, picture, script and style is there, and none is fetched
from elsewhere; every picture has a text, every page one first heading, and no heading skips a
level; nothing of a table or an example that is none in Markdown is left.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

PLAIN = re.compile(r"={8}|>>> ")
"""Tables and examples of docstrings, where they have not become tables and code."""
CODE = ("code", "pre", "script", "style")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """What a page names and what it asks for.

    Attributes:
        ids: Of its elements.
        links: Targets of `a`.
        loads: Targets of scripts, styles, pictures and frames.
        twice: Ids of more than one element.
        silent: Pictures without a text that stands for them.
        levels: Of its headings, in order.
        plain: Markup of docstrings that is shown as it is.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set[str](), list[str](), list[str]()
        self.twice: list[str] = []
        self.silent: list[str] = []
        self.levels: list[int] = []
        self.plain: list[str] = []
        self._in_code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element is called, links to and loads."""
        found = dict(attrs)
        name = found.get("id")
        if name:
            if name in self.ids and tag != "path":
                self.twice.append(name)
            self.ids.add(name)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        self._in_code += tag in CODE
        if tag == "img" and not found.get("alt"):
            self.silent.append(found.get("src") or "")
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        target = found.get(LOADED.get(tag, ""))
        if target and found.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loads.append(target)

    def handle_endtag(self, tag: str) -> None:
        """Note that code ends."""
        self._in_code -= tag in CODE

    def handle_data(self, data: str) -> None:
        """Note markup outside of code."""
        if not self._in_code and PLAIN.search(data):
            self.plain.append(data.strip()[:40])


def problems(site: Path) -> Iterator[str]:
    """Yield a line for everything that is missing, doubled or fetched from elsewhere."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        if file.name == "404.html":  # its links start at the root of the server
            continue
        name = file.relative_to(site)
        yield from (f"{name}: two elements have the id {i!r}" for i in page.twice)
        yield from (f"{name}: {source} has no alt text" for source in page.silent)
        yield from (f"{name}: shows {text!r} as it is" for text in page.plain)
        if (count := page.levels.count(1)) != 1:
            yield f"{name}: {count} headings of level 1"
        for above, level in pairwise(page.levels):
            if level > above + 1:
                yield f"{name}: a heading of level {level} follows one of level {above}"
        for target in (*page.links, *page.loads):
            address = urlsplit(target)
            if address.scheme or address.netloc:
                if target in page.loads and address.scheme != "data":
                    yield f"{name}: loads {target}"
                continue
            path, heading = urldefrag(target)
            goal = (file.parent / unquote(path)).resolve() if path else file
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file():
                yield f"{name}: {target} does not exist"
            elif heading and goal in pages and unquote(heading) not in pages[goal].ids:
                yield f"{name}: {target} has no such heading"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    found = list(problems(parser.parse_args().site.resolve()))
    print("\n".join(found) or "every link, heading and file is there")
    sys.exit(bool(found))
