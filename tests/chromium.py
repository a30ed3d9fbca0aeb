"""Debian's Chromium without a screen, installed if it is missing and this user may."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from debian import WAIT_FOR_APT

_PACKAGES = ("chromium", "chromium-driver")


def _found() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


def need() -> None:
    """Skip the test, with the reason, if there is no Chromium and none can be installed."""
    if _found():
        return
    if os.getuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("needs Chromium and its driver (apt-get install chromium chromium-driver)")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "-o", WAIT_FOR_APT, *_PACKAGES]):
        done = subprocess.run(["apt-get", "-q", *command], capture_output=True, text=True, env=environment, check=False)
    if done.returncode or not _found():
        pytest.skip(f"Chromium cannot be installed: {done.stderr.strip()[-300:]}")


@contextmanager
def browser(profile: Path, *, width: int = 1280, height: int = 900, language: str = "en") -> Iterator[webdriver.Chrome]:
    """Give a browser with an empty profile in the folder `profile`; it has ended when the block has."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests run as root in CI
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        f"--accept-lang={language}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        driver.quit()
