"""The page in a real browser: real clicks and keys against a backend that needs no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from browser import Browser, find_chromium
from fake_backend import FakeBackend
from headwater.server.http import RunningServer, make_app, serve

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
TOKEN = "page-token"
ENTER, TAB, ESCAPE = 13, 9, 27


@dataclass(frozen=True)
class Served:
    backend: FakeBackend
    server: RunningServer
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"{self.server.url}/#token={TOKEN}"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(10)


@pytest.fixture
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    backend = FakeBackend()
    server = asyncio.run_coroutine_threadsafe(serve(make_app(backend, TOKEN)), loop).result(10)
    running = Served(backend, server, loop)
    yield running
    running.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, served: Served) -> Browser:
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.open(served.address)
    chromium.wait("document.querySelectorAll('#jobs tbody tr').length === 10")
    return chromium


def test_token_leaves_the_address_bar_stays_in_the_tab_and_is_no_cookie(page: Browser, served: Served) -> None:
    assert "token" not in page.evaluate("location.href")
    assert page.evaluate("document.cookie") == ""
    page.open(f"{served.server.url}/")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 10")


def test_page_without_a_token_says_where_to_find_it_and_takes_it_later(chromium: Browser, served: Served) -> None:
    chromium.open(f"{served.server.url}/")
    chromium.wait("document.querySelector('#banner').textContent.includes('headwater token')")
    assert chromium.evaluate("document.querySelectorAll('#jobs tbody tr').length") == 0
    chromium.evaluate(f"location.hash = 'token={TOKEN}'")
    chromium.wait("document.querySelectorAll('#jobs tbody tr').length === 10")
    assert chromium.evaluate("location.hash") == ""


def test_errors_that_have_ended_and_those_of_jobs_that_are_gone_are_not_shown(page: Browser, served: Served) -> None:
    open_errors = served.backend.status()["errors"]
    page.wait(f"document.querySelectorAll('#errors li').length === {len(open_errors)}")
    ended = {**open_errors[0], "code": "ENDED", "ended_at": open_errors[0]["at"]}
    served.backend.errors = [ended, {**open_errors[0], "code": "GONE", "job_id": 4711}, open_errors[0]]
    page.wait("document.querySelectorAll('#errors li').length === 1")
    assert open_errors[0]["code"] in page.text("#errors")
    served.backend.errors = [ended]
    page.wait("document.querySelector('#errors-card').hidden")


def test_all_is_well_stands_neither_beside_errors_nor_beside_an_unhealthy_engine(page: Browser, served: Served) -> None:
    error = served.backend.status()["errors"][0]
    served.backend.all_live, served.backend.errors = True, []
    page.wait("document.querySelector('#f-jobs-note').textContent === 'all is well'")
    served.backend.errors = [error]
    page.wait("document.querySelector('#f-jobs-note').textContent === '1 error'")
    served.backend.errors, served.backend.is_healthy = [], False
    page.wait("document.querySelector('#f-jobs-note').textContent === 'not healthy'")
    assert page.text("#state") == "not healthy"
    assert "no epoch was completed for 47 s" in page.text("#banner")


def test_every_job_is_a_node_and_every_dependency_an_edge(page: Browser, served: Served) -> None:
    jobs = served.backend.status()["jobs"]
    assert page.evaluate("document.querySelectorAll('.node').length") == len(jobs)
    edges = sum(len(job["depends_on"]) for job in jobs)
    assert page.evaluate("document.querySelectorAll('.graph .edge').length") == edges
    assert page.evaluate("document.querySelectorAll('.graph .flow.on').length") > 0


def test_nodes_stand_to_the_right_of_what_they_read(page: Browser, served: Served) -> None:
    pair = "[node.dataset.name, node.getBoundingClientRect().x]"
    left = dict(page.evaluate(f"[...document.querySelectorAll('.node')].map(node => {pair})"))
    for job in served.backend.status()["jobs"]:
        assert all(left[name] < left[job["name"]] for name in job["depends_on"])


def test_progress_eta_and_what_a_job_waits_for_are_shown(page: Browser) -> None:
    orders = page.text("#jobs tbody tr:nth-child(3)")
    assert "backfill" in orders and "/100)" in orders and "1 min 15 s" in orders
    assert "the backfill of orders" in page.text("#jobs tbody tr:nth-child(6)")


def test_a_live_job_that_copied_nothing_does_not_claim_to_have_no_rows(page: Browser) -> None:
    assert "shop" in page.text("#jobs tbody tr:nth-child(1)")
    assert page.text("#jobs tbody tr:nth-child(1) td:nth-child(5)") == "–"


def test_sources_log_stores_and_errors_are_shown(page: Browser) -> None:
    assert "80.0 MiB" in page.text("#sources") and "2A/" in page.text("#sources")
    assert "1,204" in page.text("#stores")
    assert "COLUMN_DROPPED" in page.text("#errors") and "DROP MATERIALIZED VIEW stock" in page.text("#errors")
    assert page.evaluate("document.querySelectorAll('#plot rect').length") == 120


def test_query_run_by_click_shows_rows_with_all_digits_and_no_markup(page: Browser, served: Served) -> None:
    page.click("#query")
    page.type("SELECT * FROM revenue")
    page.click("#run")
    page.wait("document.querySelectorAll('#rows tbody tr').length === 2")
    assert served.backend.statements[-1] == "SELECT * FROM revenue"
    assert "9007199254740993" in page.text("#rows")
    assert "<b>FR</b>" in page.text("#rows")
    assert "2 rows" in page.text("#answer-note") and "epoch" in page.text("#answer-note")


def test_query_by_keyboard_shows_an_error_with_its_hint(page: Browser) -> None:
    page.click("#query")
    page.type("SELECT * FROM nosuch")
    page.press("Enter", code=ENTER, control=True)
    page.wait("!document.querySelector('#answer-error').hidden")
    assert "UNKNOWN_TABLE" in page.text("#answer-error")
    assert "SHOW JOBS lists what there is" in page.text("#answer-error")


def test_pause_and_resume_reach_the_engine(page: Browser, served: Served) -> None:
    page.click("#pause")
    page.wait("document.querySelector('#pause').textContent === 'Resume' && !document.querySelector('#pause').disabled")
    assert served.backend.paused
    assert page.text("#state") == "paused"
    page.click("#pause")
    page.wait("document.querySelector('#pause').textContent === 'Pause'")
    assert not served.backend.paused


def test_node_opens_its_definition_by_click_and_by_key_and_closes_by_escape(page: Browser) -> None:
    page.click(".node[data-name=revenue]")
    page.wait("document.querySelector('#detail').open")
    assert "CREATE MATERIALIZED VIEW revenue" in page.text("#d-definition")
    page.press("Escape", code=ESCAPE)
    page.wait("!document.querySelector('#detail').open")
    page.evaluate("document.querySelector('.node[data-name=orders]').focus()")
    page.press("Enter", code=ENTER)
    page.wait("document.querySelector('#detail').open")
    assert page.text("#d-name") == "orders"


def test_everything_is_reached_by_the_tab_key(page: Browser) -> None:
    reached = set()
    for _ in range(60):
        page.press("Tab", code=TAB)
        name = "document.activeElement.id || document.activeElement.dataset?.name || document.activeElement.textContent"
        reached.add(page.evaluate(name))
    assert {"pause", "theme", "query", "run", "revenue", "SHOW JOBS"} <= reached


def test_focus_survives_the_polling(page: Browser) -> None:
    page.evaluate("document.querySelector('.node[data-name=stock]').focus()")
    epoch = page.text("#f-epoch")
    page.wait(f"document.querySelector('#f-epoch').textContent !== '{epoch}'")
    assert page.evaluate("document.activeElement.dataset.name") == "stock"


def test_theme_follows_the_system_until_it_is_chosen_and_then_stays(page: Browser, served: Served) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.prefer("dark")
    dark = page.evaluate(background)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(background) == light
    page.open(f"{served.server.url}/")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 10")
    assert page.evaluate(background) == light
    page.evaluate("localStorage.clear()")


def test_phone_width_needs_no_sideways_scrolling(page: Browser) -> None:
    page.resize(360, 740)
    page.wait("document.querySelector('.graph svg').getBoundingClientRect().width <= 360")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    rights = "[...document.querySelectorAll('.card, .figure, button')].map(one => one.getBoundingClientRect().right)"
    assert max(page.evaluate(rights)) <= 360


def test_lost_engine_is_said_and_the_last_state_stays(page: Browser, served: Served) -> None:
    served.stop()
    page.wait("!document.querySelector('#banner').hidden")
    assert "No answer from the engine" in page.text("#banner")
    assert page.evaluate("document.querySelectorAll('.node').length") == 10


def test_empty_engine_says_how_to_begin(chromium: Browser, served: Served) -> None:
    served.backend.empty = True
    chromium.open(served.address)
    chromium.wait("!document.querySelector('#graph-empty').hidden")
    assert "CREATE SOURCE" in chromium.text("#graph-empty")
    assert chromium.text("#f-epoch") == "none yet"


def test_console_has_no_complaints_on_a_normal_visit(served: Served) -> None:
    with Browser() as fresh:
        fresh.open(served.address)
        fresh.wait("document.querySelectorAll('#jobs tbody tr').length === 10")
        assert fresh.complaints() == []
