"""Makes the site of the documentation and looks at it: every link and anchor of every page leads somewhere, nothing is fetched from elsewhere,
and the search finds something.

usage: docs_site.py SOURCE_FOLDER SCRATCH_FOLDER      (status 77: skipped, with the reason)
"""
import html.parser
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.parse

source, site = (pathlib.Path(word).resolve() for word in sys.argv[1:3])


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.fetched = set(), set(), set()
        self.feed(path.read_text(errors="replace"))

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors |= {named.get("id"), named.get("name")}
        if tag == "a" and named.get("href"):
            self.links.add(named["href"])
        self.fetched |= {named[key] for key in ("src", "href") if tag != "a" and named.get(key)}


def dead_links():
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100, f"{len(pages)} pages"
    for path, page in pages.items():
        for link in page.links | page.fetched:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or link.startswith("//"):
                if link in page.fetched and parts.scheme not in ("javascript", "data"):
                    yield f"{path.relative_to(site)} fetches {link}"
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(site)}: no {link}"
            elif parts.fragment == "nested-classes":
                continue  # doxygen's own, where all of them are private
            elif parts.fragment and target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: no anchor {link}"


def main():
    python = os.environ.get("EMEND_TEST_PYTHON", source / ".venv-tests/bin/python")
    if not (shutil.which("doxygen") and os.path.exists(python)) or subprocess.run(
            [python, "-c", "import sphinx, myst_parser"], capture_output=True).returncode:
        print("skipped: needs doxygen and Sphinx, which ./run-tests installs")
        sys.exit(77)
    subprocess.run([sys.executable, source / "tools/site", site], check=True)
    dead = sorted(dead_links())
    if dead:
        sys.exit("\n".join(dead))
    if shutil.which("chromium"):
        search = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={site}-browser",
                  "--virtual-time-budget=20000", "--dump-dom", f"file://{site}/search.html?q=tokenizers"]
        found = subprocess.run(search, capture_output=True, text=True, timeout=120).stdout
        assert "docs/tokenizers.html" in found, found[-3000:]
    print(f"{sum(1 for _ in site.rglob('*.html'))} pages")
    for folder in (site, f"{site}-source", f"{site}-browser"):
        shutil.rmtree(folder, ignore_errors=True)


main()
