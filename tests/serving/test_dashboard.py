"""The page at /antkv/ in a real browser, served by a real server: what it shows, to whom, and for everybody to use."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.serving.embedded_server import API_KEY, MODEL_NAME, PRESET
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: requirements/dev.in has it"
)
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="requirements/dev.in has axe")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium")

NUM_LAYERS, NUM_HEADS = 5, 2
#: Three full blocks and a part of one.
PROMPT = [0, *range(100, 499)]
WAIT_MS = 1000 * PATIENCE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        launched = running.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, *quiet])
        yield launched
        launched.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser says against the page: errors, and breaches of its own security policy."""
    return []


@pytest.fixture
def page(browser, server, complaints) -> Iterator[Any]:
    """The page in a tab of its own, before a key is given."""
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    tab = context.new_page()
    tab.set_default_timeout(WAIT_MS)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    tab.goto(server.url + "/antkv/")
    yield tab
    context.close()


def log_in(page: Any, key: str = API_KEY) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Show the dashboard").click()


def without_refusals(complaints: list[str]) -> list[str]:
    """Chromium reports every answer of 401."""
    return [each for each in complaints if "401" not in each]


def problems(page: Any) -> list[str]:
    """What axe-core finds fault with."""
    report = axe.Axe().run(page).response
    assert len(report["passes"]) > 10, "it found nothing to look at"
    return [f"{each['id']}: {node['html']}" for each in report["violations"] for node in each["nodes"]]


def test_a_visitor_without_the_key_sees_nothing_but_the_question(page, complaints):
    page.get_by_label("API key").wait_for()
    assert page.get_by_label("API key").evaluate("element => element === document.activeElement")
    assert not page.get_by_role("heading", name="Cache in use").is_visible()
    log_in(page, "wrong")
    page.get_by_text("The server refused this API key.").wait_for()
    assert PRESET not in page.locator("body").inner_text()
    assert page.evaluate("sessionStorage.length") == 0
    assert not without_refusals(complaints)


def test_the_key_stays_in_the_tab(page, server):
    log_in(page)
    page.get_by_role("heading", name="Cache in use").wait_for()
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    assert API_KEY not in page.url
    page.reload()
    page.get_by_text("Live").wait_for()
    other = page.context.browser.new_page()
    other.goto(server.url + "/antkv/")
    other.get_by_label("API key").wait_for()
    other.close()


def test_the_page_shows_the_cache_and_the_anchors_of_the_last_prompt(page, server, complaints):
    server.complete(PROMPT, 4)
    log_in(page)
    page.get_by_text("Live").wait_for()
    assert page.locator("#subtitle").inner_text() == f"{MODEL_NAME}, {PRESET}"
    blocks = (len(PROMPT) + 3) // VQ_BLOCK_SIZE
    tokens = blocks * VQ_BLOCK_SIZE
    anchors = blocks * AntKVConfig().anchor_rows * NUM_LAYERS * NUM_HEADS
    summary = page.locator("#map-summary").inner_text()
    assert f"tokens 0 to {tokens - 1} of {tokens}: {anchors} K anchors in {NUM_LAYERS} layers" in summary
    page.get_by_text("The map as a table").click()
    cells = page.locator("#map-table tbody tr").locator("td:last-child").all_inner_texts()
    shown = [[int(token) for token in cell.split(", ")] for cell in cells]
    answer = server.get("/antkv/anchors").json()["map"]
    assert shown == [positions for layer in answer["k"] for positions in layer]
    assert page.locator("#map-svg .marks").count() == NUM_LAYERS * NUM_HEADS
    page.get_by_label("V", exact=True).check()
    assert f"{anchors} V anchors" in page.locator("#map-summary").inner_text()
    # By default nobody gets to read what others wrote.
    assert answer["text"] is None
    assert not page.locator("#map-text").is_visible()
    assert page.locator("#operations").get_by_text("fall-backs").locator("xpath=../td").inner_text() == "0"
    assert not without_refusals(complaints)


def test_the_page_follows_a_request(page, server):
    log_in(page)
    page.get_by_text("no request is running").wait_for()
    before = page.locator("#total").inner_text()
    server.complete(PROMPT, 4)
    page.wait_for_function("before => document.getElementById('total').textContent !== before", arg=before)
    page.wait_for_function("!document.getElementById('spark').ariaLabel.startsWith('Now 0, at most 0')")


def test_the_page_adds_up_engines(page):
    """The server's only one, taken for two."""
    seen: list[dict[str, Any]] = []

    def twice(route: Any) -> None:
        answer = route.fetch().json()
        seen.append(answer["engines"][0])
        route.fulfill(json=answer | {"engines": 2 * answer["engines"]})

    page.route("**/antkv/status", twice)
    log_in(page)
    page.get_by_text("Live").wait_for()
    assert page.locator("#total").inner_text() == f"{2 * seen[-1]['tokens_stored']:,}"
    for name, work in seen[-1]["operations"].items():
        cell = page.locator("#operations").get_by_text(name, exact=True).locator("xpath=../td")
        assert cell.inner_text() == f"{2 * work['calls']:,} calls, {2 * work['seconds']:.1f} s"


def test_the_page_says_when_the_server_does_not_answer(page):
    log_in(page)
    page.get_by_text("Live").wait_for()
    page.route("**/antkv/status", lambda route: route.abort())
    page.get_by_text("No answer, trying again").wait_for()
    page.unroute("**/antkv/status")
    page.get_by_text("Live").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(page, server, scheme):
    server.complete(PROMPT, 4)
    page.emulate_media(color_scheme=scheme)
    page.get_by_label("API key").wait_for()
    assert problems(page) == []
    log_in(page)
    page.get_by_text("Live").wait_for()
    for summary in page.locator("summary:visible").all():
        summary.click()
    assert problems(page) == []


def test_everything_can_be_reached_by_keyboard(page, server):
    server.complete(PROMPT, 4)
    page.get_by_label("API key").wait_for()
    page.keyboard.type(API_KEY)
    page.keyboard.press("Enter")
    page.get_by_text("Live").wait_for()
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent || 'radio'"))
    assert {"prompt", "radio", "renew", "Tokens that most heads keep", "The map as a table"} <= reached


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_overflows_the_window(page, server, width):
    server.complete(PROMPT, 4)
    page.set_viewport_size({"width": width, "height": 800})
    log_in(page)
    page.get_by_text("Live").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
