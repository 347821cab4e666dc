"""The page in a real browser: drawn on, taught, asked, forgotten, reloaded, on a large screen and on a phone."""

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastweights.server.guard import Access
from fastweights.server.limits import Limits

from .conftest import Threaded, png

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here; apt install chromium")

LOCAL = ("http://127.0.0.1:", "data:", "blob:", "about:")
Stroke = list[tuple[float, float]]
CIRCLE: Stroke = [(0.5 + 0.4 * math.cos(t / 3), 0.5 + 0.4 * math.sin(t / 3)) for t in range(20)]
SIGNS: dict[str, list[Stroke]] = {
    "ring": [CIRCLE],
    "cross": [[(0.1, 0.1), (0.9, 0.9)], [(0.9, 0.1), (0.1, 0.9)]],
    "дом": [[(0.2, 0.9), (0.2, 0.4), (0.5, 0.1), (0.8, 0.4), (0.8, 0.9), (0.2, 0.9)]],
    "tee": [[(0.1, 0.1), (0.9, 0.1)], [(0.5, 0.1), (0.5, 0.9)]],
    "<i>zig</i>": [[(0.1, 0.1), (0.9, 0.1), (0.1, 0.9), (0.9, 0.9)]],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        arguments = ["--no-sandbox", "--disable-gpu", *fake]
        one = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield one
        one.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Threaded]:
    one = Threaded(tmp_path / "page.sqlite", Limits(), None)
    yield one
    one.stop()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a service in a browser that has never been there. Nothing may be said in its console."""
    contexts, said = [], []

    def open_page(address: str, expected: str = "", held: str = "", **options: Any) -> Any:
        """`expected` may be said; requests to addresses like `held` wait until the page's `release` is called."""
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1200, "height": 900}), **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda one: said.append(one.text) if not expected or expected not in one.text else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda one: said.append(one.url) if not one.url.startswith(LOCAL) else None,
        )
        if held:
            waiting: list[Any] | None = []
            page.route(held, lambda one: one.continue_() if waiting is None else waiting.append(one))

            def release() -> None:
                nonlocal waiting
                first, waiting = waiting, None
                for one in first or ():
                    one.continue_()

            page.release = release
        page.goto(address)
        if "#" in address and expected != "401" and not held:  # an unlocked memory is open at once
            page.wait_for_selector("body[data-ready]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def address_of(server: Threaded) -> str:
    return f"{server.address}/#{server.serving.memory}"


def draw(page: Any, strokes: list[Stroke], rng: np.random.Generator | None = None) -> None:
    """With the mouse; by a shaky hand, if `rng` says how."""
    page.locator("#pad").scroll_into_view_if_needed()
    box = page.locator("#pad").bounding_box()
    shake = (lambda: 0.0) if rng is None else (lambda: float(rng.uniform(-0.04, 0.04)))
    size, left, top = (0.7, 0.15, 0.15) if rng is None else (rng.uniform(0.5, 0.8), 0.1, 0.12)
    for stroke in strokes:
        points = [
            (
                box["x"] + box["width"] * (left + size * (x + shake())),
                box["y"] + box["height"] * (top + size * (y + shake())),
            )
            for x, y in stroke
        ]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point, steps=4)
        page.mouse.up()


def teach(page: Any, name: str, strokes: list[Stroke]) -> None:
    draw(page, strokes)
    page.fill("#name", name)
    page.press("#name", "Enter")
    page.wait_for_function("name => document.getElementById('status').textContent === `Learnt: ${name}.`", arg=name)


def bars(page: Any) -> dict[str, float]:
    """The widths of the bars, in percent."""
    rows = page.eval_on_selector_all(
        "#bars li",
        "rows => rows.map(row => [row.querySelector('.label').textContent, row.querySelector('.fill').style.width])",
    )
    return {label: float(width.rstrip("%")) for label, width in rows}


def asked(page: Any, strokes: list[Stroke], rng: np.random.Generator | None = None) -> str:
    """The answer to a drawing, once it has settled."""
    page.click("#clear")
    page.wait_for_function("() => !document.querySelector('#bars li')")
    draw(page, strokes, rng)
    page.wait_for_selector("#answer[aria-busy=false] #bars li")
    return page.inner_text("#bars li:first-child .label")


def test_five_signs_are_taught_asked_forgotten_and_found_again(server: Threaded, visit, tmp_path):
    page = visit(address_of(server))
    for name, strokes in SIGNS.items():
        teach(page, name, strokes)
    assert page.eval_on_selector_all(".card h3", "all => all.map(one => one.textContent)") == list(SIGNS)
    rng = np.random.default_rng(0)
    for name, strokes in [*SIGNS.items()] * 2:
        assert asked(page, strokes, rng) == name
        shown = bars(page)
        assert sum(shown.values()) == pytest.approx(100, abs=0.5)
        assert max(shown, key=shown.__getitem__) == name
        assert shown[name] > 50
        assert name in page.inner_text("#verdict")
    assert page.locator("#because img").count() == 1
    assert page.locator("#products canvas").count() == 15

    page.click("[aria-label='Forget <i>zig</i>']")
    page.wait_for_function("() => document.querySelectorAll('#bars li').length === 4")
    assert page.locator(".card").count() == 4
    assert "<i>zig</i>" not in bars(page)
    page.keyboard.press("Control+z")
    page.wait_for_function("() => document.querySelectorAll('.card').length === 5")
    assert asked(page, SIGNS["<i>zig</i>"]) == "<i>zig</i>"

    page.reload()
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == 5
    port = int(server.address.rpartition(":")[2])
    server.stop()
    again = Threaded(tmp_path / "page.sqlite", Limits(), None, port)
    try:
        assert asked(page, SIGNS["tee"]) == "tee"
        page.goto(again.address)  # without an identifier: this browser remembers
        page.wait_for_selector(".card")
        assert asked(page, SIGNS["дом"]) == "дом"
    finally:
        again.stop()


def test_an_answer_is_there_within_a_fifth_of_a_second(server: Threaded, visit):
    page = visit(address_of(server))
    for name in ("ring", "cross"):
        teach(page, name, SIGNS[name])
    rounds: list[float] = []
    while not rounds or (min(rounds) >= 200 and len(rounds) < 8):  # others may need the processor for a while
        rounds.append(float(np.median([answer_time(page) for _ in range(5)])))
    assert min(rounds) < 200, rounds


def answer_time(page: Any) -> float:
    """Milliseconds from lifting the pen to the bars."""
    page.click("#clear")
    page.wait_for_function("() => !document.querySelector('#bars li')")
    return page.evaluate(
        """async () => {
            const pad = document.getElementById("pad");
            const box = pad.getBoundingClientRect();
            const at = (type, x, y) => pad.dispatchEvent(new PointerEvent(type, {
                clientX: box.left + x, clientY: box.top + y, pointerId: 1, button: 0, bubbles: true }));
            pad.setPointerCapture = () => {};
            at("pointerdown", 40, 40);
            for (let i = 0; i < 20; i++) at("pointermove", 40 + 8 * i, 40 + 8 * i);
            const begin = performance.now();
            at("pointerup", 200, 200);
            while (!document.querySelector("#bars li")) await new Promise((done) => setTimeout(done, 2));
            return performance.now() - begin;
        }"""
    )


def test_a_first_visit_finds_ready_made_tasks(server: Threaded, visit):
    page = visit(address_of(server))
    page.wait_for_selector("#tasks li:nth-child(3)")
    for number in (1, 2, 3):
        page.click(f"#tasks li:nth-child({number}) button")
        page.wait_for_selector("#queries li")
        page.wait_for_function("() => document.querySelectorAll('.card').length === 5")
        page.click("#queries li:first-child button")
        page.wait_for_selector("#bars li")
        assert page.is_visible("#why")
        page.click("#new")
        page.wait_for_function("() => !document.querySelector('.card')")
    assert page.locator("#memories option").count() == 4
    page.select_option("#memories", index=3)
    page.wait_for_selector(".card")


def test_a_memory_is_downloaded_reset_and_loaded_again(server: Threaded, visit, tmp_path):
    page = visit(address_of(server))
    for name in ("ring", "cross"):
        teach(page, name, SIGNS[name])
    with page.expect_download() as download:
        page.click("#download")
    path = tmp_path / "mine.fw"
    download.value.save_as(path)
    page.click("#reset")
    page.wait_for_function("() => !document.querySelector('.card')")
    assert page.is_visible("#gallery")
    page.set_input_files("#file", path)
    page.wait_for_function("() => document.querySelectorAll('.card').length === 2")
    assert asked(page, SIGNS["ring"]) == "ring"
    page.set_input_files("#file", {"name": "x.fw", "mimeType": "application/octet-stream", "buffer": path.read_bytes()})
    page.wait_for_function("() => document.getElementById('status').textContent === 'Loaded: x.'")


def test_pictures_are_taken_and_what_is_none_is_said_to_be(server: Threaded, visit):
    page = visit(address_of(server), expected="status of 4")
    picture = {"name": "r.png", "mimeType": "image/png"}
    page.fill("#name", "ring")
    many = [{**picture, "name": f"{shift}.png", "buffer": png("ring", shift)} for shift in (0, 3, 6)]
    page.set_input_files("#pictures", many)
    page.wait_for_function("() => document.getElementById('status').textContent === 'Learnt: 3 of ring.'")
    assert page.locator(".example").count() == 3
    page.set_input_files("#pictures", {**picture, "buffer": png("tee")})
    page.wait_for_selector("#bars li")
    page.fill("#name", "tee")
    page.click("#teach button")
    page.wait_for_function("() => document.querySelectorAll('.card').length === 2")
    page.set_input_files("#pictures", {**picture, "buffer": b"nothing"})
    page.wait_for_selector("#status.wrong")
    assert "no picture" in page.inner_text("#status")
    page.click(".example >> nth=0")
    page.wait_for_function("() => document.querySelectorAll('.example').length === 3")
    page.set_input_files("#capture", {**picture, "buffer": png("tee")})
    page.wait_for_selector("#bars li")
    page.fill("#name", "ring")
    page.click("#teach button")  # the same picture under another name
    page.wait_for_selector("#status.wrong")
    assert "'tee'" in page.inner_text("#status")


def drop(page: Any, name: str, data: bytes, kind: str) -> None:
    """Let a file fall onto the page."""
    given = {"name": name, "data": list(data), "kind": kind}
    page.evaluate(
        """({ name, data, kind }) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([new Uint8Array(data)], name, { type: kind }));
            const event = { dataTransfer, bubbles: true, cancelable: true };
            for (const type of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(type, event));
        }""",
        given,
    )


def test_pictures_and_memories_are_dropped_onto_the_page(server: Threaded, visit):
    page = visit(address_of(server))
    page.wait_for_selector("#tasks li")
    for name in ("ring", "tee"):
        drop(page, f"{name}.png", png(name), "image/png")
        page.wait_for_function("() => document.getElementById('invitation').hidden")
        page.fill("#name", name)
        page.press("#name", "Enter")
        said(page, f"Learnt: {name}.")
    drop(page, "which.png", png("ring", 4), "image/png")
    page.wait_for_selector("#bars li")
    assert page.inner_text("#bars li:first-child .label") == "ring"
    file = page.request.get(f"{server.address}/v1/memories/{server.serving.memory}/file").body()
    drop(page, "dropped.fw", file, "")
    said(page, "Loaded: dropped.")
    assert page.locator(".card").count() == 2


def said(page: Any, sentence: str) -> None:
    """Wait until the page says so."""
    page.wait_for_function("said => document.getElementById('status').textContent === said", arg=sentence)


def ink(page: Any) -> int:
    """How many pixels of the pad are not white."""
    return page.evaluate(
        """() => {
            const pad = document.getElementById("pad");
            const data = pad.getContext("2d").getImageData(0, 0, pad.width, pad.height).data;
            return data.filter((value, i) => i % 4 === 0 && value < 250).length;
        }"""
    )


def test_the_camera_takes_a_picture_and_is_switched_off(server: Threaded, visit):
    page = visit(address_of(server), permissions=["camera"])
    page.wait_for_selector("#tasks li")
    live = "document.getElementById('video').srcObject !== null"
    for how, taken in ((lambda: page.click("#snap"), True), (lambda: page.keyboard.press("Escape"), False)):
        page.click("#clear")
        page.click("#camera")
        page.wait_for_selector("#shutter[open]")
        assert page.evaluate(live)
        assert page.evaluate("document.getElementById('video').videoWidth") > 0
        how()
        page.wait_for_function(f"() => !({live})")
        assert (ink(page) > 1000) is taken
    page.click("#camera")
    page.wait_for_selector("#shutter[open]")
    page.keyboard.press("Enter")  # the first button has the focus
    page.wait_for_function(f"() => !({live})")
    assert ink(page) > 1000
    page.fill("#name", "what the camera sees")
    page.press("#name", "Enter")
    said(page, "Learnt: what the camera sees.")


def test_a_phone_without_https_takes_pictures_by_its_own_camera(server: Threaded, visit):
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    page = visit("about:blank", **phone)
    page.add_init_script("Object.defineProperty(navigator, 'mediaDevices', { value: undefined })")
    page.goto(address_of(server))
    page.wait_for_selector("#tasks li")
    with page.expect_file_chooser() as chooser:
        page.tap("#camera")
    assert chooser.value.element.get_attribute("capture") == "environment"
    assert not chooser.value.is_multiple()
    chooser.value.set_files({"name": "p.png", "mimeType": "image/png", "buffer": png("ring")})
    page.wait_for_function("() => document.getElementById('invitation').hidden")
    assert ink(page) > 1000
    page.fill("#name", "ring")
    page.tap("#teach button")
    said(page, "Learnt: ring.")


def test_classes_are_renamed_and_forgotten_by_keyboard(server: Threaded, visit):
    page = visit(address_of(server))
    for name in ("ring", "cross", "tee"):
        teach(page, name, SIGNS[name])
    keys, focused = page.keyboard, "document.activeElement.getAttribute('aria-label')"

    def cards() -> list[str]:
        return page.eval_on_selector_all(".card h3", "all => all.map(one => one.textContent)")

    page.focus("[aria-label='Rename ring']")
    keys.press("Enter")
    page.wait_for_selector("#naming[open]")
    keys.type("круг")  # the old name is selected, and overwritten
    keys.press("Enter")
    said(page, "ring is called круг now; Undo brings it back.")
    assert cards() == ["круг", "cross", "tee"]
    assert page.evaluate(focused) == "Rename круг"
    keys.press("Enter")
    page.wait_for_selector("#naming[open]")
    keys.type("no")
    keys.press("Escape")
    assert cards() == ["круг", "cross", "tee"]
    page.click("[aria-label='Rename cross']")
    page.fill("#another", "круг")
    page.click("#naming .main")
    said(page, "cross and круг are one now; Undo brings it back.")
    assert cards() == ["круг", "tee"]
    page.focus("[aria-label='Forget круг']")
    keys.press("Enter")
    said(page, "Forgotten: круг; Undo brings it back.")
    assert page.evaluate(focused) == "Forget tee"
    for left in (["круг", "tee"], ["круг", "cross", "tee"], ["ring", "cross", "tee"]):
        keys.press("Control+z")
        page.wait_for_function(
            "names => [...document.querySelectorAll('.card h3')].map(one => one.textContent).join() === names",
            arg=",".join(left),
        )
    assert asked(page, SIGNS["cross"]) == "cross"


def test_memories_are_renamed_and_deleted(server: Threaded, visit):
    page = visit(address_of(server))
    teach(page, "ring", SIGNS["ring"])
    page.click("#new")
    page.wait_for_function("() => !document.querySelector('.card')")
    teach(page, "tee", SIGNS["tee"])
    page.focus("#rename")
    page.keyboard.press("Enter")
    page.wait_for_selector("#naming[open]")
    page.keyboard.type("Letters <b>")
    page.keyboard.press("Enter")
    said(page, "It is called Letters <b> now.")
    titles = "all => all.map(one => one.textContent)"
    assert page.eval_on_selector_all("#memories option", titles) == ["Letters <b>", "My memory"]
    page.focus("#delete")
    page.keyboard.press("Enter")
    page.wait_for_selector("#deleting[open]")
    assert page.inner_text("#deleting-what") == "Delete Letters <b> and its 1 class for good? This cannot be undone."
    page.keyboard.press("Enter")  # the safe answer has the focus
    page.wait_for_function("() => !document.querySelector('dialog[open]')")
    assert page.inner_text(".card h3") == "tee"
    page.click("#delete")
    page.click("#deleting .main")
    said(page, "Deleted: Letters <b>.")
    assert page.inner_text(".card h3") == "ring"
    page.click("#delete")
    page.click("#deleting .main")
    said(page, "Deleted: My memory.")
    assert page.is_visible("#gallery")  # an empty one is made
    teach(page, "tee", SIGNS["tee"])


def test_it_is_drawn_on_and_taught_by_keyboard_alone(server: Threaded, visit):
    page = visit(address_of(server))
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "pad":
            break
    keys = page.keyboard
    keys.press("Space")
    for arrow in ("ArrowLeft", "ArrowDown", "ArrowRight"):
        for _ in range(8):
            keys.press(arrow)
    keys.press("Space")
    for _ in range(10):
        keys.press("Tab")
        if page.evaluate("document.activeElement.id") == "name":
            break
    keys.type("hook")
    keys.press("Enter")
    page.wait_for_selector(".card")
    assert page.inner_text(".card h3") == "hook"
    assert page.evaluate(
        "[...document.querySelectorAll('button, input:not([hidden]), select, canvas')].every(one =>"
        " one.textContent.trim() || one.labels?.length || one.getAttribute('aria-label'))"
    )


def test_a_phone_has_all_of_it_without_sideways_scrolling(server: Threaded, visit):
    page = visit(address_of(server), viewport={"width": 375, "height": 700}, has_touch=True, is_mobile=True)
    page.wait_for_selector("#tasks li")
    page.click("#tasks li:first-child button")
    page.wait_for_selector("#queries li")
    page.tap("#queries li:first-child button")
    page.wait_for_selector("#products canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.evaluate("getComputedStyle(document.getElementById('pad')).touchAction") == "none"
    sizes = page.eval_on_selector_all("#draw button", "all => all.map(one => one.getBoundingClientRect().height)")
    assert min(sizes) >= 36
    page.evaluate("scrollTo(0, 0)")
    touch(page, SIGNS["cross"])
    page.wait_for_selector("#bars li")


def touch(page: Any, strokes: list[Stroke]) -> None:
    """With a finger."""
    page.click("#clear")
    page.wait_for_function("() => !document.querySelector('#bars li')")
    box = page.locator("#pad").bounding_box()
    client = page.context.new_cdp_session(page)
    for stroke in strokes:
        for kind, points in [
            ("touchStart", stroke[:1]),
            *[("touchMove", [point]) for point in stroke],
            ("touchEnd", []),
        ]:
            at = [{"x": box["x"] + box["width"] * x, "y": box["y"] + box["height"] * y} for x, y in points]
            client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(server: Threaded, visit, scheme):
    page = visit(address_of(server), color_scheme=scheme)
    page.wait_for_selector("#tasks li")
    found = page.evaluate(
        """() => ["body", "section", "button.main", ".quiet", "a"].map((which) => {
            const one = document.querySelector(which);
            let behind = one;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [getComputedStyle(one).color, getComputedStyle(behind).backgroundColor];
        })"""
    )
    for pair in found:
        dark, light = sorted(luminance(colour) for colour in pair)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair


def luminance(colour: str) -> float:
    """Of a CSS colour, as the WCAG has it."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("token", ["sesame", "voilà ✓"])
def test_a_service_with_a_token_asks_for_it(visit, tmp_path, token):
    server = Threaded(tmp_path / "token.sqlite", Limits(), Access(token=token))
    try:
        page = visit(address_of(server), expected="401")
        page.fill("#token", token)
        page.click("#locked button")
        page.wait_for_selector("#tasks li")
        teach(page, "ring", SIGNS["ring"])
    finally:
        server.stop()


def test_a_service_that_is_gone_is_said_to_be(visit, tmp_path):
    server = Threaded(tmp_path / "gone.sqlite", Limits(), None)
    page = visit(address_of(server), expected="ERR_CONNECTION_REFUSED")
    page.wait_for_selector("#tasks li")
    server.stop()
    draw(page, SIGNS["ring"])
    page.wait_for_selector("#status.wrong")
    assert "still running" in page.inner_text("#status")


def test_what_is_done_before_the_memory_is_open_waits_for_it(server: Threaded, visit):
    page = visit(address_of(server), held="**/v1/memories/**")
    draw(page, SIGNS["ring"])
    page.fill("#name", "ring")
    page.press("#name", "Enter")
    page.wait_for_timeout(200)
    assert page.inner_text("#status") == ""
    page.release()
    page.wait_for_selector("text=Learnt: ring.")
    assert page.inner_text(".card h3") == "ring"


def test_the_interface_is_described_for_people(server: Threaded, visit):
    page = visit(f"{server.address}/api.html")
    page.wait_for_selector("#reference article")
    assert page.locator("#reference article").count() > 15
    assert server.address in page.inner_text("pre")
    time.sleep(0.1)
