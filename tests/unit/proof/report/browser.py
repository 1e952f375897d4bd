"""A headless Chromium that opens report pages, and what it saw: errors, requests."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1440,1000",
)  # fmt: skip


class Page:
    """An open page."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, file: Path) -> None:
        """Open a file and wait until its code has built it."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(file.as_uri())
        self.until(lambda: self.js("return document.documentElement.dataset.ready === 'true'"))

    def js(self, code: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return its result."""
        return self.driver.execute_script(code, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        """Every element of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The text of every element of a CSS selector, with text that is not shown."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of a CSS selector that has this text."""
        element = next(e for e in self.all(selector) if text in (e.get_attribute("textContent") or ""))
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def type(self, selector: str, *keys: str) -> None:
        """Type into the first element of a CSS selector."""
        element = self.all(selector)[0]
        self.js(
            "arguments[0].scrollIntoView({block: 'center'}); if (arguments[0].select) arguments[0].select()", element
        )
        element.send_keys(*keys)

    def until(self, condition: Callable[[], Any], seconds: float = 20) -> None:
        """Wait for a condition. Raises AssertionError with the page's errors."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not true within {seconds} s; errors of the page: {self.errors()}"
            time.sleep(0.02)

    def errors(self) -> list[str]:
        """Messages of the console since the last call: script errors, violations of the security policy, failed
        requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for since the last call, without those of Chromium's own pages."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("chrome://", "chrome-untrusted://"))]


@contextmanager
def opened_browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile in `folder`."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()
