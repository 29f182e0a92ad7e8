"""Looks at the site of docs/ with Chromium: `make docs-look`.

Every page has to show its heading without an error or a missing file, each answer of
tests/project/answers.toml has to be at most two links from the start, and the search has to find
"loss scale". Pictures of the start, a guide, the API and the search go to build/photographs.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SITE, PICTURES = ROOT / "build/site", ROOT / "build/photographs"
PHOTOGRAPHED = {"index.html": "start", "formats/index.html": "guide", "reference/index.html": "api"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def look(page: Page, address: str, wrong: list[str]) -> None:
    """Opens every page of the site, and searches it; adds what is wrong to `wrong`."""
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("response", lambda got: got.status < 400 or wrong.append(f"{page.url} lacks {got.url}"))
    for file in sorted(SITE.rglob("*.html")):
        name = str(file.relative_to(SITE))
        if name == "404.html":
            continue
        page.goto(address + name)
        if not page.locator("h1").count():
            wrong.append(f"{name} has no heading")
        if name in PHOTOGRAPHED:
            page.screenshot(path=PICTURES / f"{PHOTOGRAPHED[name]}.png")
    page.goto(address)
    page.locator("input.md-search__input").click()
    page.keyboard.type("loss scale", delay=20)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    page.screenshot(path=PICTURES / "search.png")


def answer(page: Page, address: str, wrong: list[str]) -> int:
    """Looks for the answers of answers.toml; returns how many there are."""

    def links_of(pages: set[str]) -> set[str]:
        found: set[str] = set()
        for name in pages:
            page.goto(name)
            found |= set(page.eval_on_selector_all("a", "all => all.map(a => a.href)"))
        return {link.partition("#")[0] for link in found if link.startswith(address)}

    start = {address}
    near = start | links_of(start)
    near |= links_of(near)
    tasks = tomllib.loads((ROOT / "tests/project/answers.toml").read_text())["answers"]
    for task, file, words in tasks:
        name = Path(file).stem
        place = address if name == "README" else f"{address}{name}/"
        if place not in near:
            wrong.append(f"{task}: {place} is more than two links from the start")
            continue
        page.goto(place)
        if words not in page.locator("article").inner_text():
            wrong.append(f"{task}: {place} lacks {words}")
    return len(tasks)


def main() -> None:
    """Serves the site on a free port, and looks at it."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("browse.py needs Chromium: apt install chromium")
    serve = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    PICTURES.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        address = f"http://127.0.0.1:{server.server_port}/"
        look(page, address, wrong)
        tasks = answer(page, address, wrong)
        browser.close()
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"every page is shown, {tasks} tasks are answered, the search finds: {PICTURES}")


if __name__ == "__main__":
    main()
