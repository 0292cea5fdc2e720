"""Pictures of the live page for the documentation: `make pictures`."""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Browser

from tests.fakes.process import ROOT, free_port
from tests.fakes.waiting import until
from tests.ui.stage import LIMIT_S, browsing, emulated, loaded, routing, state_of

WARM_S = 20
"""Of load before a picture: the figures of the last ten seconds are then of it alone."""


async def take(browser: Browser, url: str, path: Path, *, dark: bool, width: int, height: int) -> None:
    scheme = "dark" if dark else "light"
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = await context.new_page()
    answer = await page.goto(url)
    assert answer is not None
    assert answer.ok, await answer.text()
    drawn = io.BytesIO(await page.screenshot())
    await context.close()
    out = io.BytesIO()
    Image.open(drawn).save(out, "WEBP", lossless=True, quality=100)
    await asyncio.to_thread(path.write_bytes, out.getvalue())
    print(f"{path}: {len(out.getvalue()) // 1000} kB")


async def main(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = await stack.enter_async_context(browsing())
        few = dict(zip(("r1", "r2", "r3"), await emulated(stack, 3), strict=True))
        few["r4"] = f"http://127.0.0.1:{free_port()}"
        policy = {"name": "session_affinity", "shadow": "dual_choice"}
        async with routing(few, scratch, policy=policy) as router, loaded(router.url, 24, pause_s=1.5):
            await until(lambda: state_of(router, "r4"), lambda state: state == "ejected", LIMIT_S, "r4 is ejected")
            await asyncio.sleep(WARM_S)
            ui = f"{router.admin_url}/ui"
            await take(browser, ui, folder / "ui.webp", dark=False, width=1280, height=900)
            await take(browser, ui, folder / "ui-narrow.webp", dark=False, width=360, height=1300)
        many = {f"r{number}": url for number, url in enumerate(await emulated(stack, 64, 0.2, 150_000), 1)}
        many["r17"] = f"http://127.0.0.1:{free_port()}"
        async with routing(many, scratch) as router, loaded(router.url, 100, prompt_bytes=8000, pause_s=6):
            async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
                (await admin.post("/replicas/r40/drain", json={"homes": "move"})).raise_for_status()
            await until(lambda: state_of(router, "r17"), lambda state: state == "ejected", LIMIT_S, "r17 is ejected")
            await asyncio.sleep(WARM_S)
            ui = f"{router.admin_url}/ui"
            await take(browser, ui, folder / "ui-64.webp", dark=True, width=1440, height=1500)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs/images"))
