"""`check_job_page`: read a job's page in the console over HTTP; `take_screenshots` where Chromium is."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

from benchmarks.first_hour.step import StepError, Terminal

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # where a Chromium is started for tests


@contextmanager
def server(terminal: Terminal, phalanx: Path) -> Iterator[tuple[str, str]]:
    """Run `phalanx ui` while the block runs; yield its address and the token that it prints to sign in with."""
    command = [str(phalanx), "ui", "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        command,
        cwd=terminal.folder,
        env=terminal.environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+?(?=/ui)", process.stderr.readline())
        if address is None:
            raise StepError("phalanx ui prints no address")
        yield address[0], process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def check_job_page(terminal: Terminal, address: str, token: str, job: str) -> None:
    """Sign in, read the pages of a job, and check that they say what became of it."""
    began = time.monotonic()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    form = urllib.parse.urlencode({"token": token}).encode()
    origin = {"Origin": address, "Sec-Fetch-Site": "same-origin"}
    with opener.open(urllib.request.Request(f"{address}/ui/sign-in", form, origin)) as answer:
        listed = answer.read().decode()
    with opener.open(f"{address}/ui/jobs/{job}") as answer:
        page = answer.read().decode()
    (terminal.outputs / "job.html").write_text(page)
    terminal.check("console over HTTP", f"GET /ui/jobs/{job}", time.monotonic() - began, listed, [job])
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))
    for pattern in (job, "Succeeded|succeeded", "accuracy|loss|Loss|Phases"):
        if not re.search(pattern, text):
            raise StepError(f"the page of {job} has nothing like {pattern!r}; see {terminal.outputs}/job.html")


def take_screenshots(terminal: Terminal, address: str, token: str, job: str) -> None:
    """Open the page in Chromium and store screenshots; without a Chromium there are none."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        sys.stdout.write("          Chromium is not installed: no screenshots\n")
        return
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    from chromium import browser

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as chrome:
        chrome.get(f"{address}/ui/")
        chrome.find_element(By.ID, "token").send_keys(token + Keys.ENTER)
        WebDriverWait(chrome, 20).until(lambda _: chrome.find_elements(By.CSS_SELECTOR, "header nav"))
        chrome.save_screenshot(str(terminal.outputs / "jobs.png"))
        chrome.get(f"{address}/ui/jobs/{job}")
        text = chrome.find_element(By.TAG_NAME, "main").text
        chrome.save_screenshot(str(terminal.outputs / "job.png"))
    terminal.check(
        "console in Chromium", f"{address}/ui/jobs/{job}", time.monotonic() - began, text, [job, "(?i)succeeded"]
    )
