"""The live page in Debian's Chromium, before a real router and emulated replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from tests.fakes.process import Router, free_port
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.ui.stage import LIMIT_S, Watched, browsing, emulated, loaded, routing, state_of

pytestmark = pytest.mark.browser

expect.set_options(timeout=LIMIT_S * 1000)

NAMES = ("r1", "r2", "r3")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def opened(browser: Browser, router: Router, path: str = "/ui", **context: Any) -> tuple[Page, Watched]:
    page = await (await browser.new_context(**context)).new_page()
    watched = Watched(page, router.admin_url)
    await page.goto(router.admin_url + path)
    return page, watched


async def fits(page: Page) -> bool:
    """Whether nothing has to be scrolled sideways."""
    return bool(await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


async def three(stack: AsyncExitStack, folder: Path, **settings: object) -> Router:
    fleet = dict(zip(NAMES, await emulated(stack, 3), strict=True))
    return await stack.enter_async_context(routing(fleet, folder, **settings))


async def test_an_empty_fleet_says_what_to_do_next(browser: Browser, stack: AsyncExitStack, tmp_path: Path) -> None:
    router = await stack.enter_async_context(routing({}, tmp_path))
    page, watched = await opened(browser, router)
    await expect(page.get_by_role("heading", name="No replicas yet")).to_be_visible()
    await expect(page.locator("main")).to_contain_text("warmroute serve --replica")
    await expect(page.locator(".verdict.bad")).to_contain_text("every request is refused")
    assert (watched.errors, watched.outside) == ([], [])


async def test_values_change_under_load_without_loading_the_page_anew(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    router = await three(stack, tmp_path, policy={"name": "session_affinity", "shadow": "dual_choice"})
    page, watched = await opened(browser, router)
    await page.evaluate("window.same = true")
    await expect(page.locator(".decisions")).to_have_count(0)
    await stack.enter_async_context(loaded(router.url, 6))
    await expect(page.locator(".decisions li .reason", has_text="home").first).to_be_visible()
    await expect(page.locator(".decisions .outcome", has_text="cached").first).to_be_visible()
    await expect(page.locator(".decisions .sentence").first).to_contain_text(" of queue and ")
    await expect(page.locator("aside")).to_contain_text("dual_choice chose the same replica in")
    counted = page.locator(".figures div", has=page.get_by_text("Sessions", exact=True))
    await expect(counted.locator("b")).to_have_text("6")
    newest = await page.locator(".decisions li").first.get_attribute("data-key")
    await expect(page.locator(".decisions li").first).not_to_have_attribute("data-key", str(newest))
    assert await page.evaluate("window.same"), "the page was brought up to date in place"
    assert (watched.errors, watched.outside) == ([], [])


async def test_a_dead_replica_cannot_be_missed(browser: Browser, stack: AsyncExitStack, tmp_path: Path) -> None:
    fleet = dict(zip(NAMES, await emulated(stack, 3), strict=True)) | {"a-dead": f"http://127.0.0.1:{free_port()}"}
    router = await stack.enter_async_context(routing(fleet, tmp_path))
    page, watched = await opened(browser, router, "/ui?sort=name")
    await expect(page.locator(".verdict.bad")).to_contain_text("1 ejected of 4 replicas")
    tile = page.locator(".tile.bad")
    await expect(tile).to_have_count(1)
    await expect(tile).to_contain_text("a-dead")
    await expect(tile.locator(".why")).to_contain_text("since")
    await expect(tile.locator(".why")).to_contain_text("refused")
    assert "1 ejected" in await page.title()
    await page.goto(f"{router.admin_url}/ui")
    await expect(page.locator(".tile").first).to_contain_text("a-dead")
    assert (watched.errors, watched.outside) == ([], [])


async def test_sixty_four_replicas_fit_and_a_thousand_are_paged(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """None of them is there, and hardly probed: it is the page that is looked at."""
    seldom = {"interval_s": 10}
    port = free_port()
    many = {f"r{number}": f"http://127.0.0.1:{port}/{number}" for number in range(1, 1001)}
    (tmp_path / "few").mkdir()
    few = dict(list(many.items())[:64])
    router = await stack.enter_async_context(routing(few, tmp_path / "few", health=seldom))
    page, watched = await opened(browser, router, viewport={"width": 1440, "height": 900})
    await expect(page.locator(".tile")).to_have_count(64)
    assert await fits(page)
    box = await page.locator(".tiles").bounding_box()
    assert box is not None
    assert box["height"] < 2 * 900, "two screens at most"
    overflowing = "tiles => tiles.filter(tile => tile.scrollWidth > tile.clientWidth).length"
    assert await page.locator(".tile").evaluate_all(overflowing) == 0
    assert (watched.errors, watched.outside) == ([], [])
    router = await stack.enter_async_context(routing(many, tmp_path, health=seldom))
    page, _ = await opened(browser, router, "/ui?sort=name")
    await expect(page.locator(".tile")).to_have_count(100)
    await page.get_by_role("link", name="101 to 200").click()
    await expect(page.locator(".tile").first).to_contain_text("r101")


async def test_a_narrow_window_scrolls_in_one_direction(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    fleet = {
        f"http://replica-{number}.some-long-domain.example:30000": f"http://127.0.0.1:9/{number}" for number in range(2)
    }
    fleet |= dict(zip(NAMES, await emulated(stack, 3), strict=True))
    router = await stack.enter_async_context(routing(fleet, tmp_path))
    await stack.enter_async_context(loaded(router.url, 3))
    page, _ = await opened(browser, router, viewport={"width": 360, "height": 740})
    await expect(page.locator(".decisions li").first).to_be_visible()
    assert await fits(page)
    await page.locator(".decisions .digest").first.click()
    await expect(page.get_by_role("heading", name="Homes")).to_be_visible()
    await page.wait_for_load_state()  # until then its style may not be there
    assert await fits(page)
    await page.goto(f"{router.admin_url}/ui/replicas/r1")
    await expect(page.get_by_role("heading", name="r1", exact=True)).to_be_visible()
    assert await fits(page)


async def test_everything_is_reached_by_keyboard_and_focus_survives_an_update(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    router = await three(stack, tmp_path)
    await stack.enter_async_context(loaded(router.url, 2))
    page, _ = await opened(browser, router)
    await expect(page.locator(".decisions li").first).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_text("Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()
    seen = []
    for _ in range(10):  # beyond are decisions, of which there may be none yet
        await page.keyboard.press("Tab")
        what = "[document.activeElement.textContent.trim() || document.activeElement.name, "
        what += "getComputedStyle(document.activeElement).outlineStyle]"
        name, outline = await page.evaluate(what)
        assert outline != "none", f"the focus on {name} is visible"
        seen.append(name)
    assert set(NAMES) < set(seen), seen
    assert {"Show", "replica", "session", "Filter"} < set(seen), seen
    tile = page.get_by_role("link", name="r2", exact=True).first
    await tile.focus()
    before = await page.locator("header time").text_content()
    await expect(page.locator("header time")).not_to_have_text(str(before))
    await expect(tile).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="r2", exact=True)).to_be_visible()


async def test_colours_follow_the_system_and_can_be_read(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    fleet = dict(zip(NAMES, await emulated(stack, 3), strict=True)) | {"dead": f"http://127.0.0.1:{free_port()}"}
    router = await stack.enter_async_context(routing(fleet, tmp_path))
    await until(lambda: state_of(router, "dead"), lambda state: state == "ejected", LIMIT_S, "it is ejected")
    grounds = {}
    for scheme in ("light", "dark"):
        page, _ = await opened(browser, router, color_scheme=scheme)
        grounds[scheme] = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        for where in (".meta", "dt", "small", ".why", ".state.bad", ".verdict", ".state.ok", "a.button", ".kv"):
            ratio = await page.locator(where).first.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{where} in {scheme} has a contrast of {ratio:.2f}"
    assert grounds["light"] != grounds["dark"]


CONTRAST = """element => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  let below = element;
  while (parse(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
  const [one, other] = [getComputedStyle(element).color, getComputedStyle(below).backgroundColor]
    .map(colour => light(parse(colour)));
  return (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
}"""
"""WCAG 2.2, section 1.4.3: of an element's text to what is painted below it; AA asks for 4.5."""


async def test_it_works_without_javascript(browser: Browser, stack: AsyncExitStack, tmp_path: Path) -> None:
    router = await three(stack, tmp_path)
    await stack.enter_async_context(loaded(router.url, 3))
    page, watched = await opened(browser, router, java_script_enabled=False)
    before = await page.locator("header time").get_attribute("datetime")
    await expect(page.locator("header time")).not_to_have_attribute("datetime", str(before))
    await expect(page.locator(".decisions li").first).to_be_visible()
    await page.get_by_role("link", name="Pause").click()
    await expect(page.get_by_role("link", name="Go on")).to_be_visible()
    assert await page.locator("noscript").count() == 0, "it stands still"
    await page.locator("select[name=reason]").select_option("new")
    await page.get_by_role("button", name="Filter").click()
    await expect(page.locator(".decisions li").first).to_be_visible()
    assert set(await page.locator(".decisions .reason").all_text_contents()) == {"new"}
    assert watched.outside == []


async def test_a_router_that_is_gone_is_told_and_its_return_seen(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    router = await three(stack, tmp_path)
    page, _ = await opened(browser, router)
    await expect(page.locator("#stale")).to_be_hidden()
    await asyncio.to_thread(router.stop)
    await expect(page.locator("#stale")).to_contain_text("The router does not answer")
    ports = ["--port", str(router.port), "--admin-port", router.admin_url.rpartition(":")[2]]
    again = Router([], tmp_path / "again.log", "--config", str(tmp_path / "warmroute.yaml"), *ports)
    try:
        await expect(page.locator("#stale")).to_be_hidden()
        await expect(page.locator(".tile")).to_have_count(3)
    finally:
        await asyncio.to_thread(again.stop)


HOSTILE = """x"><img/src=x/onerror=alert(1)><script>alert(2)</script>{{7*7}}"""


async def test_what_comes_from_outside_is_shown_and_not_run(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    router = await stack.enter_async_context(routing({HOSTILE: f"http://127.0.0.1:{free_port()}"}, tmp_path))
    page, watched = await opened(browser, router)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    await expect(page.locator(".tile.bad h3")).to_have_text(HOSTILE)
    await page.locator(".tile h3 a").click()
    await expect(page.locator("h2").first).to_have_text(HOSTILE)
    for path in (
        f"/ui?replica={HOSTILE}",
        f"/ui?sort={HOSTILE}",
        f"/ui/replicas/{HOSTILE}x",
        f"/ui/sessions/{HOSTILE}",
    ):
        await page.goto(router.admin_url + path)
        assert await page.locator("main script, main img").count() == 0
    assert dialogs == []
    assert watched.outside == []
    assert not [error for error in watched.errors if "404" not in error and "400" not in error]


async def test_no_raw_session_and_no_prompt_is_in_it(stack: AsyncExitStack, tmp_path: Path) -> None:
    router = await three(stack, tmp_path)
    headers = {"x-session-affinity": "raw-session-name"}
    body = {"model": "m", "messages": [{"role": "user", "content": "a secret prompt"}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.post(f"{router.url}/v1/chat/completions", json=body, headers=headers)).raise_for_status()
        told = (await client.get(f"{router.admin_url}/overview")).json()
        digest = told["decisions"][0]["session"]
        pages = [
            (await client.get(router.admin_url + path)).raise_for_status().text
            for path in (
                "/ui",
                "/overview",
                f"/ui/sessions/{digest}",
                "/ui/sessions/raw-session-name",
                "/ui/replicas/r1",
            )
        ]
    for page in pages:
        assert "raw-session-name" not in page
        assert "secret prompt" not in page


async def test_with_a_token_the_browser_asks_for_it(browser: Browser, stack: AsyncExitStack, tmp_path: Path) -> None:
    token = "0123456789abcdef0123456789abcdef"
    router = await three(stack, tmp_path, admin={"token": token})
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
        refused = await client.get("/ui")
    assert refused.status_code == 401
    assert any(value.startswith("Basic ") for value in refused.headers.get_list("www-authenticate")), "it is asked for"
    allowed, watched = await opened(browser, router, http_credentials={"username": "anyone", "password": token})
    await expect(allowed.locator(".tile")).to_have_count(3)
    before = await allowed.locator("header time").text_content()
    await expect(allowed.locator("header time")).not_to_have_text(str(before))
    assert token not in allowed.url
    assert watched.outside == []


async def test_a_drain_is_followed(browser: Browser, stack: AsyncExitStack, tmp_path: Path) -> None:
    router = await three(stack, tmp_path)
    page, watched = await opened(browser, router)
    drains = page.locator("section", has=page.get_by_role("heading", name="Drains"))
    await expect(drains).to_contain_text("No replica drains.")
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
        (await client.post("/replicas/r2/drain", json={"homes": "finish"})).raise_for_status()
    await expect(drains).to_contain_text("r2")
    await expect(drains).to_contain_text("go on there until they end")
    await expect(page.locator(".tile.warn")).to_contain_text("r2")
    await expect(page.locator(".verdict.warn")).to_contain_text("1 finishing of 3 replicas")
    assert (watched.errors, watched.outside) == ([], [])


async def test_decisions_stand_still_while_they_are_pointed_at(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    router = await three(stack, tmp_path)
    await stack.enter_async_context(loaded(router.url, 3))
    page, _ = await opened(browser, router)
    await expect(page.locator(".decisions li").nth(3)).to_be_visible()
    await page.locator(".decisions li").nth(3).hover()
    before = await page.locator(".decisions").inner_html()
    at = await page.locator("header time").text_content()
    await expect(page.locator("header time")).not_to_have_text(str(at))
    assert await page.locator(".decisions").inner_html() == before
    await page.mouse.move(0, 0)
    newest = await page.locator(".decisions li").first.get_attribute("data-key")
    await expect(page.locator(".decisions li").first).not_to_have_attribute("data-key", str(newest))


async def test_an_open_breaker_says_why_and_when_it_tries_again(
    browser: Browser, stack: AsyncExitStack, tmp_path: Path
) -> None:
    failing = await FakeReplica(ready=200, health=200).start()
    stack.push_async_callback(failing.stop)
    failing.say("/v1/models", 500)
    fleet = {"failing": failing.url} | dict(zip(NAMES, await emulated(stack, 3), strict=True))
    health = {"interval_s": 0.2, "open_s": 300}  # longer than a page may take to show it
    router = await stack.enter_async_context(routing(fleet, tmp_path, policy="round_robin", health=health))
    page, _ = await opened(browser, router)
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
        for _ in range(40):
            await client.get("/v1/models")
    tile = page.locator(".tile", has_text="failing")
    await expect(tile.locator(".why", has_text="Breaker open")).to_contain_text("500; tries again in")
