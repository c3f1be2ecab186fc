"""The page at `/` in a real browser: asks, streams, stops, begins anew, and shows what is said as text only."""

import re
import shutil
import time

import httpx
import pytest

from lockstep.data import StreamDecoder
from tests.server.conftest import running_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH (Debian: chromium-driver)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=900,700"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def _wait(browser, condition, seconds=60):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, poll_frequency=0.05).until(lambda _: condition())


def _texts(browser, role):
    return [element.text for element in browser.find_elements("css selector", f".{role} p")]


def _say(browser, text):
    browser.find_element("id", "said").send_keys(text + "\n")


def _answered(browser):
    return browser.find_element("id", "send").is_enabled()


def _set(browser, **values):
    """Of the settings' fields, as if typed."""
    for name, value in values.items():
        browser.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def test_the_page_runs_nothing_from_elsewhere_and_no_script_but_its_own(server):
    answer = httpx.get(server.url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r"https?://|\bsrc=|innerHTML|@import|url\(", answer.text)


@needs_browser
def test_a_conversation_streams_its_answer_and_the_next_question_is_asked_with_it(server, browser):
    browser.get(server.url + "/")
    _wait(browser, lambda: browser.title == "small")
    _set(browser, temperature="0", tokens="8")
    question = "<b>hello</b> <script>document.title = 'x'</script>"
    _say(browser, question)
    _wait(browser, lambda: _answered(browser))
    assert _texts(browser, "user") == [question] and browser.title == "small"
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
    said = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert browser.execute_script("return messages[1].content") == said and said
    notes = [element.text for element in browser.find_elements("class name", "note")]
    assert notes == ["stopped at the token limit"]
    _say(browser, "more")
    _wait(browser, lambda: _answered(browser))
    roles = browser.execute_script("return messages.map((message) => message.role)")
    assert roles == ["user", "assistant", "user", "assistant"] and len(_texts(browser, "assistant")) == 2
    browser.find_element("id", "reset").click()
    assert browser.execute_script("return messages.length") == 0 and not _texts(browser, "user")
    severe = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert not severe, severe


@needs_browser
def test_stop_ends_the_answer_at_the_server_too_and_keeps_what_was_said(server, browser):
    browser.get(server.url + "/")
    _wait(browser, lambda: browser.title == "small")
    # Slow enough to be stopped on any machine: a page that is served a token at a time.
    step = server.engine.step

    def slowly():
        time.sleep(0.05)
        return step()

    server.engine.step = slowly
    try:
        _say(browser, "go on")
        _wait(browser, lambda: _texts(browser, "assistant") and browser.find_element("id", "stop").is_enabled())
        browser.find_element("id", "stop").click()
        _wait(browser, lambda: _answered(browser))
        server.wait_until(server.all_pages_free)
    finally:
        server.engine.step = step
    assert [element.text for element in browser.find_elements("class name", "note")] == ["stopped"]
    kept = browser.execute_script("return messages[1].content")
    assert kept and kept == browser.execute_script("return document.querySelector('.assistant p').textContent")


@needs_browser
def test_a_refusal_is_shown_and_a_key_is_sent_where_the_server_asks_for_one(chat_folder, browser):
    with running_server(chat_folder, model_name="small", api_key="k1") as keyed:
        browser.get(keyed.url + "/")
        asks = "The server asks for an API key: enter it under Settings."
        _wait(browser, lambda: _texts(browser, "error") == [asks])
        assert browser.find_element("id", "key").is_displayed()  # the settings are open
        _set(browser, tokens="4")
        _say(browser, "hello")
        _wait(browser, lambda: _texts(browser, "error") == [asks, asks])
        # What was not answered stands in the field again.
        assert browser.find_element("id", "said").get_property("value") == "hello"
        _set(browser, key="wrong")
        _say(browser, "")
        _wait(browser, lambda: _texts(browser, "error")[2:] == ["The server does not accept this API key."])
        browser.find_element("id", "key").clear()
        browser.find_element("id", "key").send_keys("k1\t")
        _wait(browser, lambda: browser.title == "small")
        _say(browser, "")
        _wait(browser, lambda: browser.execute_script("return messages.length") == 2)


@needs_browser
def test_markup_in_an_answer_is_shown_as_text_and_no_script_beside_the_pages_own_can_run(server, browser, monkeypatch):
    markup = "<img src=x onerror=\"document.title='x'\"><script>document.title = 'y'</script><b>bold</b>"
    monkeypatch.setattr(StreamDecoder, "push", lambda self, token: markup)
    browser.get(server.url + "/")
    _wait(browser, lambda: browser.title == "small")
    _set(browser, tokens="3")
    _say(browser, "hello")
    _wait(browser, lambda: _answered(browser) and _texts(browser, "assistant"))
    (shown,) = browser.find_elements("css selector", ".assistant p")
    assert shown.text.startswith(markup) and not shown.find_elements("css selector", "*")
    # Were it markup after all, the page's policy would still run none of it.
    browser.execute_script("document.querySelector('.assistant p').innerHTML = arguments[0]", markup)
    browser.execute_script(
        "const own = document.createElement('script'); own.textContent = \"document.title = 'z'\";"
        "document.body.append(own);"
    )
    refused = [line["message"] for line in browser.get_log("browser") if "Content Security Policy" in line["message"]]
    assert len(refused) >= 2 and browser.title == "small"
