"""Makes the site of the documents from the Markdown pages of this repository, and the reference from the docstrings.

    scripts/docs [--out FOLDER] [--serve PORT]

The pages are those that a forge shows, too: `docs/` is the site, and what lies beside the code (README.md of each
package, CHANGELOG.md) has its place in it. Their links are written anew, since a site has no folders to look into. A
page that no part of the contents names, a link that leads nowhere, or to a heading that is not there, ends the script
with 1. The site needs no server and loads nothing from elsewhere: open index.html.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Final

from manual import ROOT, pages

SITE: Final = ROOT / "scripts" / "site"
PUBLIC: Final = (
    *("federation", "federation.sync", "federation.activitypub", "federation.sync.activitypub", "federation.testing"),
    *("workers", "workers.sync", "workers.storage", "workers.testing"),
)
"""The modules whose names applications import: each has a page of the reference."""
ELSEWHERE: Final = "https://unpkg.com/iframe-worker/shim"
LINK: Final = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
FENCE: Final = re.compile(r"(^```.*?^```$)", re.S | re.M)


def main() -> None:
    """Make the site; with `--serve`, show it, too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="a folder that is made anew (default: site)")
    parser.add_argument("--serve", type=int, metavar="PORT", help="show it on this machine until Ctrl-C")
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="federation-docs-") as folder:
        stage(Path(folder))
        make(folder, str(out))
    need_nobody(out)
    print(f"docs: {out / 'index.html'}")
    if arguments.serve is not None:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out))
        with http.server.ThreadingHTTPServer(("127.0.0.1", arguments.serve), handler) as server:
            print(f"docs: http://127.0.0.1:{server.server_port}")
            server.serve_forever()


def make(folder: str, out: str) -> None:
    from mkdocs.commands.build import build  # tests of the rest have no such package
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort, MkDocsException

    try:
        build(load_config(str(SITE / "contents.yml"), docs_dir=folder, site_dir=out, strict=True))
    except (Abort, MkDocsException) as error:
        sys.exit(f"docs: {error}")


def stage(folder: Path) -> None:
    """Write every page to its place in the site, with all files that they link to."""
    for page in pages():
        text = (ROOT / page).read_text()
        parts = (part if FENCE.fullmatch(part) else rewritten(page, part, folder) for part in FENCE.split(text))
        write(folder / place(page), "".join(parts))
    for name in PUBLIC:
        write(folder / "reference" / "api" / f"{name}.md", f"# {name}\n\n::: {name}\n")


def place(path: str) -> str:
    """Return where a page or file of the repository lies in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def rewritten(page: str, text: str, folder: Path) -> str:
    """Return the prose with links to places in the site; what has none there keeps its text alone."""

    def anew(found: re.Match[str]) -> str:
        path, hash_, anchor = found["target"].partition("#")
        if not path or re.match(r"\w+:", path):
            return found[0]
        target = os.path.normpath((PurePosixPath(page).parent / path).as_posix())
        if (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md".removeprefix("./")
        if not (ROOT / target).is_file():
            return found["text"][1:-1]
        if not target.endswith(".md"):
            copy(ROOT / target, folder / place(target))
        there = os.path.relpath(place(target), PurePosixPath(place(page)).parent)
        return f"{found['text']}({there}{hash_}{anchor})"

    return LINK.sub(anew, text)


def need_nobody(site: Path) -> None:
    """Have the pages load from the site itself what they would load from elsewhere: the help of their search."""
    copy(SITE / "iframe-worker.js", site / "assets" / "iframe-worker.js")
    for page in site.rglob("*.html"):
        own = os.path.relpath(site / "assets" / "iframe-worker.js", page.parent)
        write(page, page.read_text().replace(ELSEWHERE, own))


def copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def write(to: Path, text: str) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)


if __name__ == "__main__":
    main()
