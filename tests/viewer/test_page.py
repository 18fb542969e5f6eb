"""The page in a real browser: what is shown, keys, links, colours, and hostile texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
FONT = "getComputedStyle(document.body).color"


async def test_a_reader_walks_from_the_list_to_a_message_with_keys_alone(
    served: Served, browser: Browser
) -> None:
    assert "token=" not in str(await browser.run("location.href"))
    assert "small-model" in await browser.text()
    await browser.go(served.page("run", run="small-model", task="sort-1"))
    assert "4 of 40 attempts" in await browser.text()
    for key in "jj":
        await browser.press(key)
    await browser.press("Enter")
    await browser.until("document.querySelectorAll('.turn').length == 3")
    text = await browser.text()
    assert "sort-1 #1" in text
    for shown in ("turn 2", "echo 1 > out.txt", "I have to write it.", "right", "cached", "one"):
        assert shown in text
    await browser.press("n")
    await browser.until("document.querySelector('h1').innerText.includes('sort-1 #2')")
    await browser.press("u")
    await browser.until("location.hash.includes('task=sort-1')")
    await browser.press("?")
    await browser.until("document.querySelector('dialog').open")
    assert browser.problems == []


async def test_filters_are_typed_and_become_part_of_the_address(
    served: Served, browser: Browser
) -> None:
    await browser.go(served.page("run", run="small-model"))
    await browser.press("/")
    await browser.send("Input.insertText", text="no such file")
    await browser.press("Enter")
    await browser.until("document.getElementById('page').innerText.includes('8 of 40 attempts')")
    address = str(await browser.run("location.href"))
    assert "q=no+such+file" in address
    await browser.send("Page.navigate", url="about:blank")
    await browser.go(address)
    await browser.until("document.getElementById('page').innerText.includes('8 of 40 attempts')")
    await browser.run("document.querySelector('th:nth-child(7) a').click()")
    await browser.until("location.hash.includes('sort=-total_tokens')")


async def test_a_link_to_a_message_opens_its_page_at_it(served: Served, browser: Browser) -> None:
    (row,) = served.get("units", run="hostile", reward="solved")["rows"]
    await browser.go(served.page("unit", run="hostile", id=row["trajectory_id"], m=3))
    assert await browser.run("document.querySelector('article.selected').id") == "m3"
    assert await browser.run("window.scrollY") > 0


async def test_hostile_texts_are_only_text(served: Served, browser: Browser) -> None:
    rows = served.get("units", run="hostile")["rows"]
    a, b = (row["trajectory_id"] for row in rows)
    pages = [
        served.page("runs"),
        served.page("run", run="hostile"),
        served.page("unit", run="hostile", id=a),
        served.page("groups", run="hostile"),
        served.page("diff", run="hostile", id=a, run2="hostile", id2=b),
        served.page("rundiff", run="hostile", run2="small-model"),
        served.page("run", run="<img src=x onerror=alert(1)>"),
        served.page("run", run="hostile", q="<svg onload=alert(1)>", task="'\"><b>"),
        served.page("__proto__", run="hostile"),
        served.page("constructor"),
    ]
    for page in pages:
        await browser.send("Page.navigate", url="about:blank")
        await browser.go(page)
        await browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
        foreign = "document.querySelectorAll('script, style, svg, base, iframe, object').length"
        assert await browser.run(foreign) == 1  # our script
        links = await browser.run("[...document.links].map((a) => a.getAttribute('href'))")
        assert all(link.startswith("#") for link in links)
        assert "owned" not in str(await browser.run("document.title")).split("=")[0]
        assert await browser.run("document.getElementById('page').innerText.length") > 0
        text = await browser.text()
        assert not set("\x00\x07\x1b\u202e\u2066\u200b") & set(text)
        assert "[object" not in text
    policy = [problem for problem in browser.problems if "404" not in problem]
    assert not [one for one in policy if "400 (Bad Request)" not in one], policy
    assert all(
        r.startswith(f"http://127.0.0.1:{served.port}/") or r == "about:blank"
        for r in browser.requests
    )


async def test_long_texts_fold_and_images_show(served: Served, browser: Browser) -> None:
    (row,) = served.get("units", run="hostile", reward="solved")["rows"]
    await browser.go(served.page("unit", run="hostile", id=row["trajectory_id"]))
    await browser.until("document.querySelector('img')?.naturalWidth == 120")
    assert "image at http://192.0.2.1/far.png" in await browser.text()
    assert "THE END" not in (await browser.text()).split("SCRIPT:")[1].split("turn 4")[1]
    buttons = "[...document.querySelectorAll('button')]"
    await browser.run(f"{buttons}.filter((b) => b.innerText.startsWith('show all')).at(-1).click()")
    await browser.until(
        "[...document.querySelectorAll('article.assistant')].at(-1).innerText.includes('THE END')"
    )


@pytest.mark.parametrize("width", [1280, 400])
async def test_pages_fit_their_window_in_light_and_dark(
    served: Served, browser: Browser, width: int, tmp_path: Path
) -> None:
    a, b = (r["trajectory_id"] for r in served.get("units", run="small-model")["rows"][:2])
    row = served.get("units", run="small-model", task="sort-1")["rows"][0]
    exact = served.get("units", run="rl/exact")["rows"][0]
    pages = {
        "runs": served.page("runs"),
        "run": served.page("run", run="small-model"),
        "unit": served.page("unit", run="small-model", id=row["trajectory_id"]),
        "groups": served.page("groups", run="small-model"),
        "tokens": served.page("tokens", run="rl/exact", id=exact["trajectory_id"]),
        "diff": served.page("diff", run="small-model", id=a, run2="small-model", id2=b),
        "rundiff": served.page("rundiff", run="small-model", run2="large-model"),
    }
    colours = set()
    for name, page in pages.items():
        for dark in (False, True):
            await browser.size(width, 900, dark=dark)
            await browser.go(page)
            assert await browser.run("document.documentElement.scrollWidth") <= width
            colours.add((dark, await browser.run(FONT)))
            if name == "rundiff":
                tables = "[...document.querySelectorAll('table')].map((t) => t.innerText)"
                assert all("large-model" in text for text in await browser.run(tables))
            await browser.screenshot(tmp_path / f"{name}-{dark}.png")
            assert (tmp_path / f"{name}-{dark}.png").stat().st_size > 5_000
            texts = "document.querySelectorAll('bdi, li, p:not(:has(*))')"
            await browser.run(f"{texts}.forEach((e) => {{ e.textContent = 'x'.repeat(300) }})")
            assert await browser.run("document.documentElement.scrollWidth") <= width
    assert len(colours) == 2
    before = await browser.run(FONT)
    await browser.press("t")
    assert await browser.run(FONT) != before


async def test_two_marked_attempts_are_compared(served: Served, browser: Browser) -> None:
    await browser.go(served.page("run", run="small-model", task="mixed-0"))
    await browser.press("j")
    await browser.press("d")
    await browser.until("document.getElementById('marked').innerText.includes('mixed-0 #0')")
    await browser.press("j")
    await browser.press("d")
    await browser.until("location.hash.startsWith('#diff')")
    await browser.until("document.querySelector('h1').innerText == 'Two attempts'")
    text = await browser.text()
    assert "equal messages" in text
    assert text.count("Grading") == 2  # equal messages may have different rewards


async def test_the_segments_page_marks_each_token(served: Served, browser: Browser) -> None:
    row = served.get("units", run="rl/exact")["rows"][0]
    shown = served.get("tokens", run="rl/exact", id=row["trajectory_id"], branch=0)
    await browser.go(served.page("tokens", run="rl/exact", id=row["trajectory_id"]))
    count = "document.querySelectorAll('.tokens span.trained').length"
    assert await browser.run(count) == sum(shown["loss_mask"]) > 0
    total = "document.querySelectorAll('.tokens span').length"
    assert await browser.run(total) == len(shown["input_ids"])
    await browser.until("document.body.innerText.includes('show ids')")
    first = "document.querySelector('.tokens span.trained')"
    place = shown["loss_mask"].index(1)
    title = await browser.run(f"{first}.title")
    assert f"id {shown['input_ids'][place]}, position {place}, turn 1, trained, logprob " in title
    assert ", version " in title
    # A text that looks like markup is text.
    assert await browser.run("document.querySelectorAll('.tokens span *').length") == 0
    assert await browser.run(f"{first}.innerText") == shown["texts"][place].replace("\n", "↵")
    await browser.go(served.page("tokens", run="rl/exact", id=row["trajectory_id"], ids=1))
    assert await browser.run(f"{first}.innerText") == str(shown["input_ids"][place])


async def test_an_old_token_leads_to_a_page_that_says_what_to_do(
    served: Served, browser: Browser
) -> None:
    await browser.send("Network.clearBrowserCookies")
    await browser.send("Page.navigate", url=f"http://127.0.0.1:{served.port}/")
    await browser.until("document.body?.innerText.includes('Open the address')")
