"""The documentation site: built strictly, complete, and loading nothing from elsewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastweights.cli.main import MODULES

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOOLS = ("mkdocs", "material", "mkdocstrings")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(tool) is None for tool in TOOLS),
    reason="the tools of the site are not installed; make docs-tools",
)


class Loads(HTMLParser):
    """What a page loads by itself, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            self.ids.add(found["id"])
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and found.get("src"):
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found["href"])
        elif tag == "a" and found.get("href"):
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it; a warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {page.relative_to(site).as_posix(): Loads(page) for page in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert len(pages) > 30
    for name, page in pages.items():
        for address in page.loaded:
            assert not re.match(r"(https?:)?//", address), f"{name} loads {address}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_links_within_the_site_lead_somewhere(site, pages):
    for name, page in pages.items():
        if name == "404.html":  # its links are absolute: it may be shown for any address
            continue
        for link in page.links:
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            target = (site / name).parent / path if path else site / name
            assert target.resolve().exists(), f"{name} links to {link}"
            if anchor and path.endswith(".html"):
                there = target.resolve().relative_to(site.resolve()).as_posix()
                assert anchor in pages[there].ids, f"{name} links to {link}"


def test_results_notebooks_and_docstrings_are_in_it(site, pages):
    for page in ("results/index", "results/omniglot", "speed", "changelog", "contributing", "cite", "models/photos"):
        assert f"{page}.html" in pages
    notebook = (site / "notebooks" / "inside_the_memory.html").read_text(encoding="utf-8")
    assert (site / "notebooks" / "inside_the_memory-1.png").stat().st_size > 10_000
    assert "inside_the_memory-1.png" in notebook
    assert "the same as the library" in notebook
    api = (site / "reference" / "classifier.html").read_text(encoding="utf-8")
    assert "as if it had never been there" in api
    assert {"fastweights.Classifier.fit", "fastweights.Classifier.add"} <= pages["reference/classifier.html"].ids
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in MODULES:
        assert f'id="{name}' in commands, f"the page of commands lacks {name}"


def clicks_to(pages: dict[str, Loads], start: str) -> dict[str, int]:
    """The fewest clicks from one page to each other."""
    reached, edge = {start: 0}, [start]
    while edge:
        name = edge.pop(0)
        for link in pages[name].links:
            path = link.partition("#")[0]
            if not path or ":" in path:
                continue
            there = os.path.normpath(os.path.join(os.path.dirname(name), path))
            if there in pages and there not in reached:
                reached[there] = reached[name] + 1
                edge.append(there)
    return reached


def test_every_page_is_two_clicks_away(pages):
    reached = clicks_to(pages, "index.html")
    assert {name for name in pages if reached.get(name, 99) > 2} <= {"404.html"}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here; apt install chromium")
def test_the_search_works_from_a_disk(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{site}/index.html")
        page.locator("input.md-search__input").click()
        page.keyboard.type("outer product")
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        assert "How it works" in page.locator(".md-search-result__list").inner_text()
        browser.close()
    assert {address.partition(":")[0] for address in asked} <= {"file", "about", "data", "blob"}, asked
