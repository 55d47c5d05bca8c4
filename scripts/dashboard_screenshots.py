"""Take the pictures of docs/metrics.md of a running server: `python scripts/dashboard_screenshots.py URL --key KEY`.

Needs a Chromium on the PATH. While it looks, it keeps the server busy with excerpts of this repository's own texts.
"""

import argparse
import io
import shutil
import threading
import time
from pathlib import Path
from typing import Literal

from openai import OpenAI
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"
#: In CSS pixels; the height is the page's.
WIDTH = 1100
_WATCHED_SECONDS = 40
_USERS = 4
_COLOURS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, without a path")
    parser.add_argument("--key", default="none", help="API key")
    arguments = parser.parse_args()
    done = threading.Event()
    users = [threading.Thread(target=_use, args=(arguments.url, arguments.key, n, done)) for n in range(_USERS)]
    for user in users:
        user.start()
    try:
        with sync_playwright() as playwright:
            # Chromium's sandbox needs rights that containers seldom have, and the page is our own.
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            _shoot(browser, arguments.url, arguments.key)
            browser.close()
    finally:
        done.set()
        for user in users:
            user.join()


def _shoot(browser: Browser, url: str, key: str) -> None:
    """Let the page watch for a while, then take it in both colour schemes."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 800}, reduced_motion="reduce")
    page.goto(f"{url}/antkv/")
    page.get_by_label("API key").or_(page.get_by_text("Live")).first.wait_for()
    if page.get_by_label("API key").is_visible():
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Show the dashboard").click()
    page.get_by_text("Live").wait_for()
    time.sleep(_WATCHED_SECONDS)
    page.get_by_role("button", name="Newest prompt").click()
    time.sleep(1)
    schemes: list[tuple[Literal["light", "dark"], str]] = [("light", "dashboard.png"), ("dark", "dashboard-dark.png")]
    for scheme, name in schemes:
        page.emulate_media(color_scheme=scheme)
        _save(page.screenshot(full_page=True), FIGURES / name)


def _save(picture: bytes, path: Path) -> None:
    """Few colours are enough for a page, and make a small file."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(_COLOURS).save(path, optimize=True)


def _use(url: str, key: str, number: int, done: threading.Event) -> None:
    """Ask for one completion after the other."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = client.models.list().data[0].id
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    turn = number
    while not done.is_set():
        prompt = texts[turn % len(texts)][: 1500 + 900 * (turn % 3)]
        client.completions.create(model=model, prompt=prompt, max_tokens=200, extra_body={"ignore_eos": True})
        turn += _USERS


if __name__ == "__main__":
    main()
