"""The console in a real browser, as a person uses it: sign in, look, submit, follow, stop; in two languages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

import chromium
from job_server import JobServer, job_server, report
from phalanx.jobs import paths
from phalanx.jobs.attempt import usage
from phalanx.jobs.attempt.usage import Sample
from phalanx.jobs.models import Cause, Failure, JobState, MemberRole
from phalanx.plan.files import write_run_plan
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ModelShape, ParamShape
from phalanx.strategy import DistributedStrategy
from phalanx.ui.pages.job_page import TABS

pytestmark = pytest.mark.dist

SERVER = {
    "time": 1.0, "server": 0, "lag": 3, "bytes": 10_850_000, "budget": 21 << 30, "log_bytes": 0,
    "tables": {"clicks": {"rows": 100_089, "bytes": 10_850_000, "pulled": 1000, "missed": 22, "pushed": 4_553_699}},
    "requests": {"waiting": 1}, "rates": {"pulls_per_s": 849, "pushes_per_s": 424, "ms_per_request": 0.05},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    with job_server(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def open_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chromium.need()
    with chromium.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def browser(open_browser: Chrome, server: JobServer) -> Iterator[Chrome]:
    """A browser in which the store's owner has signed in; what a page complains of fails the test."""
    open_browser.get(f"{server.url}/ui/sign-in")
    open_browser.delete_all_cookies()
    _sign_in(open_browser, server.url, server.owner_token())
    open_browser.get_log("browser")
    yield open_browser
    expected = ("favicon", "status of 422")  # a form that is refused is shown again with that status
    complaints = [one["message"] for one in open_browser.get_log("browser")]
    assert [one for one in complaints if not any(word in one for word in expected)] == []


def _sign_in(browser: Chrome, url: str, token: str) -> None:
    browser.get(f"{url}/")
    browser.find_element(By.ID, "token").send_keys(token + Keys.ENTER)
    _until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "header nav"))


def _until(browser: Chrome, seen: object, seconds: float = 20) -> None:
    # A page that is being left takes its elements with it.
    wait = WebDriverWait(browser, seconds, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException])
    wait.until(lambda _: seen())  # type: ignore[operator]


def _text(browser: Chrome) -> str:
    # In one call: an element that was found a moment ago may be gone with the page that is being left.
    return str(browser.execute_script("return document.querySelector('main')?.innerText ?? ''"))


def test_only_a_valid_token_lets_in(open_browser, server):
    open_browser.get(f"{server.url}/ui/sign-in")
    open_browser.delete_all_cookies()
    open_browser.get(f"{server.url}/ui/w/default/")
    assert "/ui/sign-in" in open_browser.current_url
    open_browser.find_element(By.ID, "token").send_keys("made up" + Keys.ENTER)
    _until(open_browser, lambda: "unknown or has expired" in _text(open_browser))
    open_browser.find_element(By.ID, "token").send_keys(server.owner_token() + Keys.ENTER)
    _until(open_browser, lambda: "No jobs yet" in _text(open_browser) or "Name" in _text(open_browser))
    assert open_browser.execute_script("return document.cookie") == ""


def test_a_list_that_changes_by_itself(browser, server):
    browser.get(f"{server.url}/ui/w/default/")
    job = server.queue("appears")
    server.store.jobs.explain({job.id: "needs 4 cpu, 2 cpu are free; 3rd in line"})
    _until(browser, lambda: job.id in _text(browser))
    assert "needs 4 cpu, 2 cpu are free; 3rd in line" in _text(browser)
    folder = server.start(server.queue("trains"))
    report(folder, 0, 10, total_steps=40)
    _until(browser, lambda: "step 10 of 40" in _text(browser))
    assert browser.find_elements(By.CSS_SELECTOR, "svg.spark polyline")
    browser.find_element(By.PARTIAL_LINK_TEXT, "running").click()
    _until(browser, lambda: "state=running" in browser.current_url)
    assert job.id not in _text(browser)


def test_several_jobs_are_sorted_compared_and_stopped(browser, server):
    server.store.workspaces.create("many")
    jobs = [server.queue(name, workspace="many", env={"LR": lr}) for name, lr in (("slow", "0.1"), ("fast", "0.3"))]
    for job in jobs:
        report(server.start(job), 0, 10)
    browser.get(f"{server.url}/ui/w/many/")
    browser.find_element(By.LINK_TEXT, "Name").click()
    names = lambda: [row.text for row in browser.find_elements(By.CSS_SELECTOR, "tbody th")]  # noqa: E731
    _until(browser, lambda: names() == sorted((job.id for job in jobs), reverse=True) or names() == sorted(names()))
    assert [row.text for row in browser.find_elements(By.CSS_SELECTOR, "td.resources")] == ["1 rank", "1 rank"]
    assert "loss 0.2" in browser.find_element(By.CSS_SELECTOR, "tbody .progress").text
    browser.find_element(By.CSS_SELECTOR, "[data-select-all]").click()
    boxes = browser.find_elements(By.NAME, "job")
    assert all(box.is_selected() for box in boxes)
    boxes[0].click()
    assert not browser.find_element(By.CSS_SELECTOR, "[data-select-all]").is_selected()
    boxes[0].click()
    browser.find_element(By.CSS_SELECTOR, "button[value=compare]").click()
    _until(browser, lambda: "env.LR" in _text(browser))
    _until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "[data-compare] canvas")) == 2)
    smoothing = browser.find_element(By.NAME, "smoothing")
    smoothing.send_keys(Keys.RIGHT * 20)
    browser.find_element(By.NAME, "log").click()
    browser.find_element(By.NAME, "time").click()
    shown = lambda: [c.text for c in browser.find_elements(By.CSS_SELECTOR, "figcaption") if c.is_displayed()]  # noqa: E731
    both = shown()
    assert len(both) == 2
    browser.find_element(By.NAME, "filter").send_keys("LOSS")
    assert shown() == ["loss"]
    browser.find_element(By.NAME, "filter").send_keys(Keys.BACKSPACE * 4)
    assert shown() == both
    browser.get(f"{server.url}/ui/w/many/")
    browser.find_elements(By.NAME, "job")[0].click()
    browser.find_element(By.CSS_SELECTOR, "button[value=stop]").click()
    browser.switch_to.alert.accept()
    states = lambda: sorted(server.store.jobs.get(job.id).state for job in jobs)  # noqa: E731
    _until(browser, lambda: states() in ([JobState.RUNNING, JobState.STOPPED], [JobState.RUNNING, JobState.STOPPING]))


def test_a_job_is_followed_while_it_runs(browser, server):
    job = server.queue("followed", resources={"nodes": 2})
    folder = server.start(job)
    log = paths.logs(folder) / "workerlog.0"
    log.write_text("first line\n")
    (paths.logs(folder) / "workerlog.1").write_text("the other rank\n")
    report(folder, 0, 10)
    browser.get(f"{server.url}/ui/jobs/{job.id}?tab=logs")
    shown = browser.find_element(By.CSS_SELECTOR, "pre.log")
    _until(browser, lambda: "first line" in shown.text)
    with log.open("a") as file:
        file.write("second line <script>alert(1)</script>\n")
    _until(browser, lambda: "second line <script>" in shown.text)
    browser.find_element(By.ID, "log-search").send_keys("SECOND")
    _until(browser, lambda: "first line" not in shown.text and "second line" in shown.text)
    assert browser.find_element(By.ID, "log-matches").text == "1 lines"
    saved = browser.find_element(By.LINK_TEXT, "Download").get_attribute("href")
    whole = browser.execute_async_script("fetch(arguments[0]).then((a) => a.text()).then(arguments[1])", saved)
    assert whole == log.read_text()
    browser.find_element(By.LINK_TEXT, "Charts").click()
    _until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "[data-reports] canvas")) == 2)
    report(folder, 1, 10)
    _until(browser, lambda: "worker.1" in browser.find_element(By.CSS_SELECTOR, "[data-reports]").text)
    shown = lambda: [one.text for one in browser.find_elements(By.CSS_SELECTOR, "[data-reports] .u-value")]  # noqa: E731
    _until(browser, lambda: shown() and "--" not in shown())  # the last values, as no pointer is there
    report(folder, 0, 11, loss=0.6875)
    _until(browser, lambda: "0.0625" in shown())
    for number in range(2):
        for node in range(2):
            sample = Sample(number, 1.7e9 + 5 * number, 1.5, (1 + node) << 30, 2 << 30)
            usage.append(folder, node, sample)
    used = browser.find_element(By.CSS_SELECTOR, "[data-usage]")
    _until(browser, lambda: len(used.find_elements(By.CSS_SELECTOR, "canvas")) == 2)
    assert [one.text for one in used.find_elements(By.TAG_NAME, "figcaption")] == ["processor cores", "memory, GiB"]
    assert "Node 1" in used.text
    assert "Nothing measured" not in used.text
    (paths.logs(folder) / "status.server.0.json").write_text(json.dumps(SERVER))
    browser.get(f"{server.url}/ui/queue")
    assert "1.5" in browser.find_element(By.XPATH, f"//tr[th/a='{job.id}']").text
    browser.get(f"{server.url}/ui/jobs/{job.id}")
    _until(browser, lambda: "clicks" in browser.find_element(By.CSS_SELECTOR, "[aria-labelledby=tables]").text)
    server.end(
        job, Failure(Cause.OOM, "rank 1 was killed: out of memory", node=0, rank=1, exit_code=-9, detail="Killed")
    )
    _until(browser, lambda: "Why it failed: out of memory" in _text(browser))
    assert "rank 1 was killed" in _text(browser)
    browser.find_element(By.LINK_TEXT, "Rank 1").click()
    _until(browser, lambda: "the other rank" in browser.find_element(By.CSS_SELECTOR, "pre.log").text)


def test_submitting_by_keyboard_alone(browser, server, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    browser.get(f"{server.url}/ui/w/default/new")
    browser.find_element(By.ID, "name").send_keys("Not A Name", Keys.TAB, "python train.py", Keys.ENTER)
    _until(browser, lambda: "Not submitted" in _text(browser))
    assert browser.find_element(By.CSS_SELECTOR, ".problem a").get_attribute("href").endswith("#name")
    wrong = browser.find_element(By.ID, "name")
    assert wrong.get_attribute("aria-invalid") == "true"
    assert browser.find_element(By.ID, "command").get_attribute("value") == "python train.py"
    wrong.clear()
    wrong.send_keys("typed")
    browser.find_element(By.ID, "code.path").send_keys(str(tmp_path))
    browser.find_element(By.ID, "resources.cpu").send_keys("0.5", Keys.ENTER)
    _until(browser, lambda: "/ui/jobs/typed-" in browser.current_url)
    made = server.store.jobs.get(browser.current_url.rpartition("/")[2])
    assert made.state is JobState.QUEUED
    assert made.spec["resources"]["cpu"] == 0.5
    assert made.spec["code"]["digest"]


def test_a_form_and_its_yaml_follow_each_other(browser, server, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    server.store.workspaces.create("forms")
    server.store.secrets.save("forms", "HUB_TOKEN", "s3cret")
    browser.get(f"{server.url}/ui/w/forms/new")
    assert not browser.find_element(By.ID, "code.git").is_displayed()
    assert not browser.find_element(By.ID, "slurm.partition").is_displayed()
    Select(browser.find_element(By.ID, "backend")).select_by_visible_text("slurm")
    _until(browser, lambda: browser.find_element(By.ID, "slurm.partition").is_displayed())
    browser.find_element(By.CSS_SELECTOR, "[name=secrets][value=HUB_TOKEN]").click()
    yaml = browser.find_element(By.ID, "yaml")
    _until(browser, lambda: "backend: slurm" in yaml.get_attribute("value"))
    _until(browser, lambda: "- HUB_TOKEN" in yaml.get_attribute("value"))
    yaml.clear()
    yaml.send_keys(f"name: typed\ncommand: python train.py\ncode: {{path: {tmp_path}}}\nresources: {{nodes: '1:2'}}\n")
    browser.find_element(By.CSS_SELECTOR, "button[value=fill]").click()
    _until(browser, lambda: browser.find_element(By.ID, "name").get_attribute("value") == "typed")
    assert browser.find_element(By.ID, "resources.nodes").get_attribute("value") == "1:2"
    browser.find_element(By.CSS_SELECTOR, "button[value=check]").click()
    _until(browser, lambda: "phalanx" in browser.find_element(By.ID, "rendered").text)
    assert server.store.jobs.find(workspaces=["forms"]) == []
    browser.find_element(By.ID, "yaml").send_keys("\nnodes: 3")
    browser.find_element(By.CSS_SELECTOR, "button[value=fill]").click()
    _until(browser, lambda: "there is no such field" in _text(browser))


def test_a_workspace_is_filled_and_emptied(browser, server):
    server.store.workspaces.create("filled")
    place = f"{server.url}/ui/w/filled"
    for page, name, where in (
        ("datasets", "mnist", "s3://bucket/mnist"),
        ("codes", "vision", "git+https://h/v.git@main"),
    ):
        browser.get(f"{place}/{page}")
        browser.find_element(By.ID, "name").send_keys(name)
        browser.find_element(By.ID, "where").send_keys(where, Keys.ENTER)
        _until(browser, lambda name=name: browser.find_elements(By.XPATH, f"//tbody//th[.='{name}']"))
        browser.find_element(By.CSS_SELECTOR, "td button").click()
        browser.switch_to.alert.accept()
        _until(browser, lambda: "None yet" in _text(browser))
    browser.get(f"{place}/datasets")
    browser.find_element(By.ID, "name").send_keys("Not A Name")
    browser.find_element(By.ID, "where").send_keys("ftp://nowhere", Keys.ENTER)
    _until(browser, lambda: "no address of a dataset" in browser.find_element(By.CSS_SELECTOR, ".problem").text)
    browser.get(f"{place}/secrets")
    browser.find_element(By.ID, "name").send_keys("HUB_TOKEN")
    browser.find_element(By.ID, "value").send_keys("s3cret-value", Keys.ENTER)
    _until(browser, lambda: "HUB_TOKEN" in _text(browser))
    assert "s3cret-value" not in browser.page_source
    assert server.store.secrets.values("filled", ["HUB_TOKEN"]) == {"HUB_TOKEN": "s3cret-value"}
    browser.get(f"{place}/members")
    browser.find_element(By.ID, "name").send_keys("ann", Keys.ENTER)
    _until(browser, lambda: "ann" in _text(browser))
    assert server.store.workspaces.get("filled").members == {"ann": MemberRole.VIEWER}
    browser.get(f"{server.url}/ui/tokens")
    Select(browser.find_element(By.ID, "days")).select_by_visible_text("until it is removed")
    browser.find_element(By.ID, "name").send_keys("lap/top", Keys.ENTER)
    _until(browser, lambda: browser.find_elements(By.ID, "new-token"))
    text = browser.find_element(By.ID, "new-token").text
    assert server.store.tokens.actor_of(text).owner
    browser.get(f"{server.url}/ui/tokens")
    assert text not in browser.page_source
    assert [token.expires for token in server.store.tokens.find() if token.name == "lap/top"] == [None]
    browser.find_element(By.CSS_SELECTOR, "button[aria-label='Remove lap/top']").click()
    browser.switch_to.alert.accept()
    _until(browser, lambda: "lap/top" not in _text(browser))


def test_what_the_checks_of_submission_say_is_shown(browser, server, tmp_path):
    browser.get(f"{server.url}/ui/w/default/new")
    browser.find_element(By.ID, "name").send_keys("nothing")
    browser.find_element(By.ID, "command").send_keys("python missing.py")
    browser.find_element(By.ID, "code.path").send_keys(str(tmp_path), Keys.ENTER)
    _until(browser, lambda: "missing.py" in browser.find_element(By.CSS_SELECTOR, ".problem").text)


def test_stopping_asks_first(browser, server):
    job = server.queue("to-stop")
    browser.get(f"{server.url}/ui/jobs/{job.id}")
    browser.find_element(By.CSS_SELECTOR, "button.danger").click()
    browser.switch_to.alert.dismiss()
    assert server.store.jobs.get(job.id).state is JobState.QUEUED
    browser.find_element(By.CSS_SELECTOR, "button.danger").click()
    browser.switch_to.alert.accept()
    _until(browser, lambda: server.store.jobs.get(job.id).state is JobState.STOPPED)
    _until(browser, lambda: "stopped" in _text(browser))


def test_chinese_is_chinese_on_every_page(browser, server):
    job = server.queue("zhongwen")
    shape = ModelShape((ParamShape(name="fc.weight", shape=(8, 8), dtype="float32", item_bytes=4),))
    plan = plan_from_strategy(DistributedStrategy(), shape, 2)
    (paths.checkpoints(server.home / "jobs" / job.id, None) / "step-3").mkdir(parents=True)
    plans = paths.launcher_logs(server.start(job), 0)
    plans.mkdir()
    write_run_plan(plan, shape, plans)
    server.end(job, Failure(Cause.USER_CODE, "rank 0 raised ValueError: no", rank=0))
    browser.get(f"{server.url}/ui/w/default/")
    browser.find_element(By.LINK_TEXT, "中文").click()
    _until(browser, lambda: browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "zh-CN")
    for place, word in (
        ("w/default/", "作业"),
        (f"jobs/{job.id}", "训练代码出错"),
        (f"jobs/{job.id}", "进程 0 抛出 ValueError: no"),
        (f"jobs/{job.id}/plan.svg", "并行方案：data=2"),
        (f"jobs/{job.id}?tab=charts", "资源使用"),
        (f"jobs/{job.id}?tab=checkpoints", "未完成"),
        ("queue", "本机"),
        ("w/default/new", "必填"),
        ("w/default/datasets", "数据集"),
        ("w/default/codes", "代码"),
        ("w/default/secrets", "密钥"),
        ("w/default/members", "成员"),
        ("tokens", "令牌"),
        (f"jobs/{job.id}?tab=logs", "没有任何进程输出"),
    ):
        browser.get(f"{server.url}/ui/{place}")
        # The first page may come while the one that the link led to still loads.
        _until(browser, lambda word=word: word in browser.page_source)


def test_every_page_is_whole_for_screen_readers(browser, server):
    job = server.queue("read-aloud")
    folder = server.start(job)
    (paths.logs(folder) / "workerlog.0").write_text("hello\n")
    tabs = [f"jobs/{job.id}?tab={tab}" for tab in TABS]
    pages = ("datasets", "codes", "secrets", "members", f"compare?job={job.id}")
    for place in ("w/default/", "w/default/new", *tabs, "queue", "tokens", *(f"w/default/{page}" for page in pages)):
        browser.get(f"{server.url}/ui/{place}")
        unnamed = browser.execute_script("""
            const named = (one) => one.labels?.length || one.ariaLabel || one.title || one.textContent.trim();
            return [...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a, meter')]
                .filter((one) => !named(one)).map((one) => one.outerHTML)""")
        assert unnamed == []
        assert len(browser.find_elements(By.TAG_NAME, "h1")) == 1
        assert all(table.find_elements(By.TAG_NAME, "caption") for table in browser.find_elements(By.TAG_NAME, "table"))
        assert browser.find_elements(By.CSS_SELECTOR, "a.skip[href='#content']")


def test_a_viewer_looks_and_cannot_touch(open_browser, server):
    server.store.workspaces.create("secret-things")
    hidden = server.queue("hidden", workspace="secret-things")
    job = server.queue("looked-at")
    open_browser.get(f"{server.url}/ui/sign-in")
    open_browser.delete_all_cookies()
    _sign_in(open_browser, server.url, server.token("vera", MemberRole.VIEWER))
    open_browser.get(f"{server.url}/ui/jobs/{hidden.id}")
    assert "There is no such page" in _text(open_browser)
    open_browser.get(f"{server.url}/ui/w/secret-things/")
    assert "hidden" not in _text(open_browser)
    open_browser.get(f"{server.url}/ui/jobs/{job.id}")
    assert open_browser.find_elements(By.CSS_SELECTOR, "main form, main .actions > *") == []
    open_browser.get(f"{server.url}/ui/w/default/new")
    assert "vera has role viewer" in _text(open_browser)
    assert open_browser.find_elements(By.CSS_SELECTOR, "header nav a")
    # What no page offers is refused all the same.
    open_browser.get(f"{server.url}/ui/jobs/{job.id}")
    post = (
        "const form = document.createElement('form'); form.method = 'post'; form.action = location.pathname + '/stop'"
    )
    open_browser.execute_script(f"{post}; document.body.append(form); form.submit()")
    _until(open_browser, lambda: "vera has role viewer" in _text(open_browser) and "stop" in open_browser.current_url)
    assert server.store.jobs.get(job.id).state is JobState.QUEUED


def test_nothing_is_fetched_from_elsewhere(browser, server):
    browser.get(f"{server.url}/ui/w/default/")
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert fetched
    assert all(one.startswith(server.url) for one in fetched)


WIDER_THAN_PAGE = """
const page = document.documentElement;
if (page.scrollWidth <= page.clientWidth) return [];
return [...document.querySelectorAll("main *, header *")]
    .filter((it) => it.getBoundingClientRect().right > page.clientWidth)
    .map((it) => it.outerHTML.slice(0, 200));
"""
"""Elements that reach beyond the page, where it is wider than the window."""


def test_pages_fit_a_telephone(browser, server):
    browser.set_window_size(500, 900)
    try:
        job = server.queue("m" * 36)  # the widest letter, and no place to break a line
        report(server.start(job), 0, 10)
        tabs = [f"jobs/{job.id}?tab={tab}" for tab in TABS]
        for place in ("w/default/", "w/default/new", "queue", "tokens", "w/default/datasets", *tabs):
            browser.get(f"{server.url}/ui/{place}")
            assert browser.execute_script(WIDER_THAN_PAGE) == [], place
    finally:
        browser.set_window_size(1280, 900)


def test_signing_out(browser: Chrome, server: JobServer, tmp_path: Path) -> None:
    browser.get(f"{server.url}/ui/w/default/")
    browser.find_element(By.CSS_SELECTOR, "button.plain").click()
    _until(browser, lambda: "/ui/sign-in" in browser.current_url)  # another page would stop what the click began
    browser.get(f"{server.url}/ui/queue")
    assert "/ui/sign-in" in browser.current_url
