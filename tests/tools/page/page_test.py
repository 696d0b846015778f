#!/usr/bin/env python3
"""Tests the interactive report in a browser: page_test.py KVLAB SOURCE. With page_test.py KVLAB SOURCE --images
hour/report.html, it takes the pictures of docs/images from that report instead.

It tests that every control changes what it should change, that figures show the numbers of results.csv, and that a page
makes no network request and logs nothing. Needs Chromium, its driver and Selenium (Debian: chromium chromium-driver
python3-selenium).
"""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select
except ImportError:
    sys.exit(print("skipped: there is no Selenium for this Python (Debian: python3-selenium)"))

CHROME, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
HOSTILE = "x</script><img src=//e.example/x onerror=alert(1)>\"'&lt;\u202eevil" + "y" * 10_000


class Browser:
    """A headless Chromium that records what pages request and log."""

    def __init__(self, width: int = 1280) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROME
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument("--" + argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(service=Service(DRIVER), options=options)
        self.driver.set_script_timeout(60)
        self.resize(width)

    def resize(self, width: int, height: int = 900) -> None:
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def open(self, page: Path) -> float:
        """Opens a page. Returns the seconds from the request until the last figure is drawn."""
        began = time.monotonic()
        self.driver.get(page.as_uri())
        self.until("return document.documentElement.dataset.ready === 'yes'")
        return time.monotonic() - began

    def until(self, script: str, seconds: float = 20) -> None:
        for _ in range(int(seconds / 0.02)):
            if self.driver.execute_script(script):
                return
            time.sleep(0.02)
        raise AssertionError(f"not true within {seconds} s: {script}; log: {self.driver.get_log('browser')}")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        self.driver.execute_async_script(
            "const done = arguments[0]; Promise.all(kvlabPage.charts.map((c) => c.drawn)).then(() => done())")

    def choose(self, name: str, value: str) -> None:
        Select(self.driver.find_element("css selector", f"select[name={name}]")).select_by_value(value)
        self.settle()

    def dots(self) -> list[dict[str, Any]]:
        return self.js("return kvlabPage.charts[0].view.data('dots').map((d) => ({...d}))")

    def check_quiet(self) -> None:
        log = self.driver.get_log("browser")
        assert not log, log
        requested = [entry["message"] for entry in self.driver.get_log("performance")
                 if "Network.requestWillBeSent\"" in entry["message"]]
        urls = [message.split('"url":"')[1].split('"')[0] for message in requested]
        assert all(url.startswith(("file:", "data:", "blob:")) for url in urls), urls


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-30)


def check_dots(browser: Browser, run: Path, metric: str, layer: str = "all", head: str = "all") -> None:
    """Compares the drawn points with the rows of results.csv."""
    wanted = {(row["policy"], row["budget"]): row for row in rows_of(run)
              if (row["metric"], row["layer"], row["head"]) == (metric, layer, head)}
    dots = browser.dots()
    assert len(dots) >= 6, dots
    for dot in dots:
        row = wanted[(dot["label"].split(" ")[0], dot["requested"])]
        assert same(dot["y"], float(row["value"])), (dot, row)
        assert dot["count"] == int(row["count"]), (dot, row)
        if row["stderr"]:
            assert same(dot["error"], float(row["stderr"])), (dot, row)


def check_controls(browser: Browser, run: Path) -> None:
    check_dots(browser, run, browser.js("return kvlabPage.page.state.metric"))
    browser.choose("metric", "recall")
    check_dots(browser, run, "recall")
    browser.choose("layer", "1")
    check_dots(browser, run, "recall", "1")
    browser.choose("head", "0")
    check_dots(browser, run, "recall", "1", "0")
    browser.choose("layer", "-1")
    check_dots(browser, run, "recall")
    before = len(browser.dots())
    browser.driver.find_element("css selector", ".chips input").click()
    browser.settle()
    assert len(browser.dots()) == before - 2, "a policy that is switched off is drawn"
    browser.driver.find_element("css selector", ".chips button").click()  # shows all policies again
    browser.settle()
    assert len(browser.dots()) == before
    browser.choose("metric", "nll_recall")
    browser.choose("budget", "0")
    ranking = "return document.querySelector('#explore table').innerText"
    first = browser.js(ranking)
    browser.choose("budget", "1")
    assert browser.js(ranking) != first, "the ranking does not change with the budget"


def check_heads(browser: Browser, run: Path) -> None:
    for base in ("-1", "1"):
        browser.choose("shown", "0")
        browser.choose("base", base)
        series = browser.js("return kvlabPage.page.data.series.map((s) => s.policy)")
        budget = browser.js("return kvlabPage.page.data.budgets[kvlabPage.page.state.budget].text")
        value = {(row["policy"], row["layer"], row["head"]): float(row["value"]) for row in rows_of(run)
                 if row["metric"] == "nll_recall" and row["budget"] == budget}
        cells = browser.js("return kvlabPage.charts[1].view.data('cells').map((d) => ({...d}))")
        assert len(cells) == 8, cells
        for cell in cells:
            place = (str(cell["layer"]), str(cell["head"]))
            less = value[(series[1], *place)] if base == "1" else 0
            assert abs(cell["value"] - (value[(series[0], *place)] - less)) < 1e-6, cell


def check_tables(browser: Browser) -> None:
    column = ("return [...[...document.querySelectorAll('table')].at(-1).tBodies[0].rows].map("
              "(r) => Number(r.cells[2].textContent.split(' ')[0]))")
    header = browser.driver.find_elements("css selector", "table")[-1].find_elements("css selector", ".sort")[2]
    for reverse in (False, True):
        browser.js("arguments[0].click()", header)
        values = [v for v in browser.js(column) if v is not None]
        assert values == sorted(values, reverse=reverse), values
    text = browser.js("return kvlabPage.csvOf([...document.querySelectorAll('table')].at(-1))")
    lines = list(csv.reader(text.splitlines()))
    assert lines[0][0] == "policy" and len({len(line) for line in lines}) == 1, lines[:2]
    assert "recall, standard error" in lines[0], lines[0]
    for line in lines[1:]:
        for cell in line[2:]:
            assert cell in ("", "–") or float(cell) is not None, line


def check_axis(browser: Browser) -> None:
    """Checks that a metric whose values span several powers of ten gets a logarithmic axis, that shares do not, and
    that the user can change the axis."""
    kind = "return kvlabPage.charts[0].view.scale('y').type"
    for metric, wide in (("nll_recall", False), ("recall", False)):
        browser.choose("metric", metric)
        assert (browser.js(kind) == "log") == wide, metric
    assert browser.js("return document.querySelector('select[name=axis]').parentElement.hidden")
    browser.choose("metric", "nll_recall")
    browser.choose("axis", "log")
    assert browser.js(kind) == "log"
    browser.choose("axis", "linear")
    assert browser.js(kind) == "linear"


# Returns an object for each figure that draws points. For each axis, it has the scale and the visible labels with the
# positions of their ticks. For each point, it has its numbers and the position of its symbol.
AXES = r"""
const at = (node) => /translate\(([-\d.e]+),([-\d.e]+)\)/.exec(node.getAttribute('transform')).slice(1).map(Number);
const dotsOf = (c) => { try { return c.view.data('dots'); } catch { return null; } };
return kvlabPage.charts.filter((c) => c.view && c.box.offsetParent && dotsOf(c)).map((c) => {
  const all = (selector, box = c.box) => [...box.querySelectorAll(selector)];
  const axes = all('.role-axis').filter((a) => all('.role-axis-label text', a).length);
  return {title: c.box.ariaLabel, axes: ['x', 'y'].map((name, along) => {
    const scale = c.view.scale(name), [start, end] = along ? ['top', 'bottom'] : ['left', 'right'];
    const anchor = (a) => all('.role-axis-label text', a)[0].getAttribute('text-anchor');
    const own = axes.find((a) => anchor(a) === (along ? 'end' : 'middle'));
    const middle = (box) => (box[start] + box[end]) / 2, ticks = all('.role-axis-tick line', own);
    const labels = all('.role-axis-label text', own).map((t, i) => ({text: t.textContent, tick: at(ticks[i])[along],
      seen: t.textContent && t.getAttribute('opacity') !== '0', box: t.getBoundingClientRect(),
      off: middle(t.getBoundingClientRect()) - middle(ticks[i].getBoundingClientRect())}));
    return {name, type: scale.type, domain: scale.domain(), range: scale.range(), ticks: ticks.length,
      all: labels.length, labels: labels.filter((l) => l.seen).map((l) => ({text: l.text, tick: l.tick, off: l.off,
        start: l.box[start], end: l.box[end]}))};
  }), dots: dotsOf(c).map((d) => [d.x, d.y]), symbols: all('.mark-symbol path').map(at)};
})"""


def place_on(axis: dict[str, Any], value: float) -> float:
    """Returns the position of a number on an axis. It is computed only from the axis's type, domain and range."""
    if axis["type"] == "point":
        step = (max(axis["range"]) - min(axis["range"])) / len(axis["domain"])
        return min(axis["range"]) + step * (value + 0.5)
    turn = math.log if axis["type"] == "log" else float
    low, high = (turn(end) for end in axis["domain"])
    first, last = axis["range"]
    return float(first + (turn(value) - low) / (high - low) * (last - first))


def check_ticks(browser: Browser, charts: int = 1) -> None:
    """Checks that every label and every symbol is at its number, and that no two labels overlap. On a logarithmic axis,
    a value of 0 has to be at the label 0."""
    found = browser.js(AXES)
    assert len(found) >= charts, found
    for chart in found:
        assert len(chart["symbols"]) >= len(chart["dots"]), chart
        for along, axis in enumerate(chart["axes"]):
            check_labels(chart, axis, along)
            zeros = [label["tick"] for label in axis["labels"] if label["text"] == "0"]
            for dot, symbol in zip(chart["dots"], chart["symbols"]):
                floored = axis["type"] == "log" and dot[along] == 0
                wanted = zeros[0] if floored else place_on(axis, dot[along])
                assert abs(symbol[along] - wanted) < 1, (chart["title"], axis, dot, symbol)


def check_ticks_at_widths(browser: Browser) -> None:
    for width in (390, 1280):
        browser.resize(width)
        browser.until("return kvlabPage.drawnAt === innerWidth")
        browser.settle()
        check_ticks(browser)


def check_labels(chart: dict[str, Any], axis: dict[str, Any], along: int) -> None:
    labels, where = axis["labels"], (chart["title"], axis)
    several = len({dot[along] for dot in chart["dots"]}) > 1
    assert axis["ticks"] == axis["all"] and len(labels) >= (2 if several else 1), where
    for label in labels:
        value = float(label["text"].replace(",", "").replace("\u2212", "-")) if axis["type"] != "point" else None
        if value is not None and not (value == 0 and axis["type"] == "log"):
            assert abs(label["tick"] - place_on(axis, value)) < 1, (label, place_on(axis, value), where)
        assert min(axis["range"]) - 1 <= label["tick"] <= max(axis["range"]) + 1, (label, where)
        assert abs(label["off"]) < 2, (label, where)
    edges = sorted((label["start"], label["end"]) for label in labels)
    assert all(a[1] < b[0] + (2 if along else -2) for a, b in zip(edges, edges[1:])), where


def check_legend(browser: Browser) -> None:
    """Checks that the samples of all lines in the legend look different and show dash and marker, also in the exported
    figure."""
    looks = browser.js("return [...document.querySelectorAll('#explore .chips svg.swatch')].map((s) => s.innerHTML)")
    first = browser.js("return [...document.querySelectorAll('#figure-frontier .chips bdi')].map((b) => b.innerText)")
    assert first == ["window", "sink", "lru", "h2o"], "the frontier needs its own legend, without oracles of attention"
    assert len(looks) >= 6 and len(set(looks)) == len(looks), looks
    assert any('stroke-dasharray="7 4"' in look for look in looks) and any(" d=\"M-4 0a4" in look for look in looks), looks
    svg = browser.driver.execute_async_script("const done = arguments[0]; kvlabPage.charts[0].svgText().then(done)")
    assert "oracle_attention" in svg and svg.count("mark-rule role-mark") >= 3, svg[:500]


def check_frozen(browser: Browser) -> None:
    """Checks that a wide table scrolls in its box, and that its first column stays visible."""
    for width in (1280, 400):
        browser.resize(width)
        time.sleep(0.3)
        places = browser.js(
            "const t = [...document.querySelectorAll('table')].at(-1), box = t.parentElement;"
            "const before = t.rows[1].cells[0].getBoundingClientRect().left; box.scrollLeft = 300;"
            "const after = t.rows[1].cells[0].getBoundingClientRect().left, moved = box.scrollLeft; box.scrollLeft = 0;"
            "return [before, after, moved]")
        assert places[0] == places[1] and places[2] > 100, (width, places)
    browser.resize(1280)


def check_halving(browser: Browser, policy_file: Path) -> None:
    """Checks the page of successive halving: its first screen shows the winner, the budget, the difference and the
    texts, and the rounds follow below."""
    answer = browser.js("return document.querySelector('.answer').innerText")
    check_front(browser, [json.loads(policy_file.read_text())["run"]["recommendation"]])
    for part in ("budget of 32 tokens", "KL 0.", "96 decoded tokens of carroll-alice"):
        assert part in answer, answer
    file = json.loads(policy_file.read_text())["run"]
    last = [one["policy"].split(":")[0] for one in file["rounds"][-1]["ranking"]]
    rows = texts_of(browser, "Rounds of successive halving")
    assert [row[0].split(":")[0] for row in rows][:len(last)] == last and "leads" in rows[0], rows
    said = browser.js("return document.querySelector('main').innerText")
    for part in ("Recommendation by KL", "Order by offline replay", "all ", f"Ended: {file['ended']}."):
        assert part in said, (part, said)
    text = browser.js("return document.body.innerText")
    assert "count" not in text and "budget: round" not in text and "sinks=0:recent=0" not in text
    assert browser.js("return document.querySelectorAll('input[type=checkbox]').length") == 0
    bottom = browser.js("return document.querySelector('.chart').getBoundingClientRect().bottom + scrollY")
    assert bottom < 800, bottom


def check_hand(browser: Browser) -> None:
    """Checks that the keyboard selects points, and that figures can be downloaded."""
    chart = browser.driver.find_element("css selector", "#explore .chart")
    chart.send_keys(Keys.ARROW_RIGHT)
    text = browser.js("return document.querySelector('#explore .readout').value")
    assert "±" in text and "values" in text, text
    taken = browser.driver.execute_async_script(
        "const done = arguments[0]; const c = kvlabPage.charts[0];"
        "Promise.all([c.svgText(), c.pngBlob()]).then(([svg, png]) => done([svg, png.size, png.type]))")
    svg, size, kind = taken
    assert svg.startswith("<svg") and "sink" in svg and "stroke=\"#" in svg and "var(" not in svg, svg[:300]
    assert size > 5000 and kind == "image/png", (size, kind)


def check_kept(browser: Browser, run: Path) -> None:
    """Compares the displayed kept tokens with kept.json, at several steps and for both policies and heads."""
    kept = json.loads((run / "kept.json").read_text())
    assert kept["heads"][0]["series"][0]["policy"] != "window", "the winner comes first"
    slider = browser.driver.find_element("css selector", "input[name=query]")
    for head, step, policy in ((0, 0, 0), (0, 40, 2), (1, 90, 1)):
        Select(browser.driver.find_element("css selector", "select[name=place]")).select_by_value(str(head))
        Select(browser.driver.find_element("css selector", "select[name=left]")).select_by_value(str(policy))
        browser.js("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", slider, str(step))
        query = kept["queries"][step]
        lives = kept["heads"][head]["series"][policy]["lifetimes"]
        wanted = sorted({position for position, first, last in lives if first <= query <= last})
        shown = browser.js("return [...document.querySelector('.text').children].map((s, i) => [s.classList.contains("
                           "'kept') && !s.hidden, i]).filter(([k]) => k).map(([, i]) => i)")
        assert shown == wanted, (head, step, policy)
        assert f"keeps {len(wanted)} of {query + 1} tokens" in browser.js(
            "return document.querySelector('.pair .quiet').textContent")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.js("return kvlabPage.page.keptView.at") == 91
    assert len(browser.driver.find_elements("css selector", ".pair .text")) == 2


def check_looks(browser: Browser) -> None:
    ink = "return getComputedStyle(document.body).color"
    light = browser.js(ink)
    browser.choose("theme", "dark")
    assert browser.js(ink) != light, "the dark and the light page have the same colours"
    browser.choose("theme", "light")
    for width in (1280, 400):
        browser.resize(width)
        time.sleep(0.3)
        browser.settle()
        wide = browser.js("return document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} pixels wide in a window of {width}"
    browser.resize(1280)


def taint(value: Any) -> Any:
    """Returns a copy of a JSON value with hostile text added to each string."""
    if isinstance(value, dict):
        return {key: taint(one) for key, one in value.items()}
    if isinstance(value, list):
        return [taint(one) for one in value]
    return HOSTILE + value if isinstance(value, str) else value


def hostile(page: str) -> str:
    """Returns the report with hostile names in its data, escaped as in JSON."""
    opened = page.index('id="data">') + len('id="data">')
    closed = page.index("</script>", opened)
    data = json.loads(page[opened:closed])
    for series in data["series"]:
        series["label"] = series["policy"] = HOSTILE + series["policy"]
    for budget in data["budgets"]:
        budget["text"] = HOSTILE + budget["text"]
    data["groups"][0]["name"] = data["kept"]["trace"] = HOSTILE
    for figure in data["figures"]:
        figure["title"] = figure["x"]["title"] = HOSTILE
        for series in figure["series"]:
            series["label"] = HOSTILE + series["label"]
    for made in data["recommendations"]:
        made["name"] = HOSTILE
        made["notes"] = made["warnings"] = [HOSTILE]
        for one in made["budgets"]:
            one["budget"] = one["choice"] = one["runner_up"] = one["metric"] = HOSTILE
            one["not_significantly_different"] = [HOSTILE]
    data["facts"] = taint(data["facts"])
    data["note"] = HOSTILE
    data["kept"]["tokens"] = [HOSTILE] * len(data["kept"]["tokens"])
    return page[:opened] + json.dumps(data).replace("<", "\\u003c") + page[closed:]


def check_hostile(browser: Browser, page: Path) -> None:
    page.write_text(hostile(page.read_text()))
    browser.resize(1280)
    browser.open(page)
    assert browser.js("return document.querySelectorAll('img').length") == 0
    assert browser.js("return document.documentElement.scrollWidth") <= 1280
    text = browser.js("return document.querySelector('main').innerText")
    assert "<img src=//e.example/x onerror=alert(1)>" in text and "\u202e" not in text, "names should be shown as text"
    browser.choose("metric", "recall")
    assert len(browser.dots()) >= 6
    check_hand_text = browser.driver.execute_async_script(
        "const done = arguments[0]; kvlabPage.charts[0].svgText().then(done)")
    assert "<img" not in check_hand_text and "\u202e" not in check_hand_text


def check_other_pages(browser: Browser, call: Any, source: Path, folder: Path) -> None:
    """Checks that the pages of evaluations, tasks, successive halving and comparisons open, and that they show their
    figures and the right numbers in their tables."""
    call("capture", "--model", source / "engine/models/tiny", "--prompt-file", source / "tools/texts/carroll-alice.txt",
         "--teacher-forced", "--prompt-tokens", "256", "--max-tokens", "640", "--out", folder / "second")
    tiny, text = source / "engine/models/tiny", source / "tools/texts/carroll-alice.txt"
    call("eval", "--model", tiny, "--text", text, "--max-tokens", "400", "--window", "200", "--policy", "window,sink,h2o",
         "--budget", "32,64", "--prefill", "stream", "--out", folder / "eval")
    call("task", "passkey", "--model", tiny, "--policy", "sink,h2o", "--budget", "32,64", "--words", "60", "--depth",
         "20%,50%", "--samples", "2", "--out", folder / "task")
    call("tune", "--model", tiny, "--text", text, "--prompt-tokens", "64", "--max-tokens", "160", "--budget", "32",
         "--policy", "h2o,sink,window", "--out", folder / "tuned.json")
    call("replay", "--trace", source / "traces/samples/tiny-story", "--policy", "h2o,lru", "--budget", "64,128", "--out",
         folder / "other")
    for what, name in (("eval", "eval.csv"), ("task", "task.csv"), ("tuned.json", "")):
        page = folder / f"{what}.html"
        call("report", folder / what, "--out", page)
        browser.open(page)
        check_ticks_at_widths(browser)
        dots = browser.dots()
        assert dots, what
        if what == "tuned.json":
            check_halving(browser, folder / what)
        if what == "eval":
            check_eval(browser, folder / what)
            check_front(browser, json.loads((folder / "eval/eval.json").read_text())["recommendations"])
            answer = browser.js("return document.querySelector('header').innerText")
            assert "6 configurations and the full cache, over 198 scored tokens" in answer, answer
            assert browser.js("return kvlabPage.charts.at(-1).view.data('dots').length") == 6, "expected 6 dots"
            first = browser.js("return document.querySelector('main section h2').innerText")
            assert first == "KL, nats against memory", first
        if name:
            check_orders(browser)
            rows = list(csv.DictReader((folder / what / name).open(newline="")))
            metric = browser.js("return kvlabPage.page.state.metric")
            values = {float(row["value"]) for row in rows if row["metric"] == metric}
            assert all(any(same(dot["y"], value) for value in values) for dot in dots), what
        browser.check_quiet()
    call("compare", folder / "run", folder / "other", "--out", folder / "compare.html")
    browser.open(folder / "compare.html")
    check_ticks_at_widths(browser)
    check_orders(browser)
    runs = {dot["label"].rsplit("run=", 1)[-1] for dot in browser.dots()}
    assert runs >= {"run", "other"}, runs
    assert "other − run" in browser.js("return document.body.innerText")
    answer = browser.js("return document.querySelector('.answer').innerText")
    assert answer == ("4 configurations are in both and measured on the same texts. other is significantly better than "
                      "run in 0, significantly worse in 0, and not significantly different in 4."), answer
    browser.check_quiet()
    call("replay", "--trace", folder / "second", "--policy", "h2o,lru", "--budget", "64,128", "--out", folder / "elsewhere")
    call("compare", folder / "run", folder / "elsewhere", "--out", folder / "compare.html")
    browser.open(folder / "compare.html")
    text = browser.js("return document.body.innerText")
    assert text.count("the runs scored nothing in common, so differences cannot be paired and are not shown") == 1, text
    assert "nothing scored in common" not in text, text
    browser.check_quiet()


def check_plan(browser: Browser, call: Any, folder: Path) -> None:
    """Checks that the page of a plan draws the losses of the plan's file, and marks the format that each layer got."""
    file = folder / "plan.json"
    call("plan", "--trace", folder / "second", "--budget", "4.25bits", "--out", file)
    plan = json.loads(file.read_text())
    call("report", file, "--out", folder / "plan.html")
    browser.open(folder / "plan.html")
    check_ticks_at_widths(browser)
    bits, *parts = [browser.js(f"return kvlabPage.charts[{i}].view.data('dots').map((d) => ({{...d}}))") for i in range(3)]
    drawn = [(dot["x"], dot["y"]) for dot in bits if dot["label"] == "best plan of its size"]
    wanted = [(one["bits"], one["sum_of_losses"]) for one in plan["frontier"] if one["bits"] < 16]
    assert len(drawn) == len(wanted), (drawn, wanted)
    assert all(same(a, b) for one, other in zip(drawn, wanted) for a, b in zip(one, other)), (drawn, wanted)
    assert plan["plan"]["tiers"] != plan["uniform"]["tiers"], "the plan is one format, which tests nothing"
    for part, dots in zip(("keys", "values"), parts):
        losses = {own["layer"]: own[part] for own in plan["losses"]}
        assert dots, part
        for dot in dots:
            name = dot["note"] if dot["label"] == "chosen by the plan" else dot["label"]
            assert same(dot["y"], losses[dot["x"]][name]), (part, dot)
    rows = texts_of(browser, "Formats by layer")
    sums = [sum(float(row[column].replace(",", "")) for row in rows) for column in (4, 5)]
    assert abs(sum(sums) / plan["plan"]["sum_of_losses"] - 1) < 0.02, (sums, plan["plan"])
    answer = browser.js("return document.querySelector('.answer').innerText")
    assert "formats by layer at 4." in answer, answer
    browser.check_quiet()


def check_refetch(browser: Browser, call: Any, source: Path, folder: Path) -> None:
    """Checks that the page of a replay with refetch draws lru_curve.csv, explains its oracle, and does not lead to a command
    that refuses the run."""
    call("replay", "--trace", source / "traces/samples/tiny-story", "--policy", "lru,sieve", "--budget", "64,128",
         "--refetch", "top:32", "--out", folder / "refetch")
    call("report", folder / "refetch", "--out", folder / "refetch.html")
    browser.open(folder / "refetch.html")
    check_ticks_at_widths(browser)
    dots = browser.js("return kvlabPage.charts.at(-1).view.data('dots').map((d) => ({...d}))")
    curve = {int(row["budget_tokens"]): float(row["fetch_rate"])
             for row in csv.DictReader((folder / "refetch/lru_curve.csv").open(newline=""))}
    drawn = [dot for dot in dots if dot["label"] == "lru, all sizes"]
    assert len(drawn) > 50 and all(same(dot["y"], curve[dot["x"]]) for dot in drawn if curve[dot["x"]] > 0), len(drawn)
    assert {dot["label"] for dot in dots} == {"lru", "sieve", "belady", "lru, all sizes"}, dots
    assert all(same(dot["y"], curve[dot["x"]]) for dot in dots if dot["label"] == "lru"), "lru is off its own curve"
    text = browser.js("return document.querySelector('main').innerText")
    assert "kvlab predict" in text and "kvlab deploy" not in text, "deploy refuses a run with refetch"
    assert "Smallest buffers with which lru fetches" in text and "no policy fetches fewer tokens" in text, text
    assert "oracle_attention" not in text, "explains an oracle that the page does not show"
    browser.check_quiet()


def check_without_vega(browser: Browser, call: Any, folder: Path) -> None:
    """Checks that without Vega, pages have their tables and say in one line what is missing."""
    before = os.environ.get("KVLAB_VEGA")
    os.environ["KVLAB_VEGA"] = "/nowhere"
    for what in ("run", "eval", "tuned.json"):
        call("report", folder / what, "--out", folder / "bare.html")
        browser.open(folder / "bare.html")
        text = browser.js("return document.querySelector('main').innerText")
        assert text.count("libjs-vega") == 1, text
        assert browser.js("return document.querySelectorAll('main table.recommendations tbody tr').length") >= 1
        assert browser.js("return document.querySelectorAll('main table').length") >= 2, what
        assert browser.js("return document.querySelectorAll('.chart').length") == 0
        browser.check_quiet()
    del os.environ["KVLAB_VEGA"]
    if before is not None:
        os.environ["KVLAB_VEGA"] = before


def texts_of(browser: Browser, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    return browser.js("const h = [...document.querySelectorAll('h2')].find((h) => h.innerText === arguments[0]);"
                      "return [...h.parentElement.querySelector('table').tBodies[0].rows].map((r) => "
                      "[...r.cells].map((c) => c.textContent))", heading)


def check_replay(browser: Browser, run: Path) -> None:
    """Checks that the report says from what it was made, and that its table of all metrics has the numbers of
    results.csv."""
    text = browser.js("return document.querySelector('main').innerText")
    info = json.loads((run / "run.json").read_text())
    for part in ("Metrics by budget", "By layer and head", "Which tokens were kept", "What the metrics mean",
                 "Where this comes from", "queries and keys come from the full-cache run", info["traces"][0]["hash"],
                 "4 policies at 2 budgets, replayed over 1 captured text"):
        assert part in text, (part, text)
    labels = {label: name for label, name in browser.js("return kvlabPage.page.data.metrics.map((m) => [m.label, m.name])")}
    heads = browser.js("return [...[...document.querySelectorAll('table')].at(-1).tHead.rows[0].cells].map((c) => c.innerText)")
    cells = browser.js("return [...[...document.querySelectorAll('table')].at(-1).tBodies[0].rows].map((r) => "
                       "[...r.cells].map((c) => c.dataset.value ?? c.textContent))")
    value = {(row["policy"], row["budget"], row["metric"]): float(row["value"]) for row in rows_of(run) if row["layer"] == "all"}
    assert len(cells) == 2 * (4 + 2) + 1, [row[:2] for row in cells]
    for row in cells:
        for head, cell in list(zip(heads, row))[2:]:
            wanted = value.get((row[0], row[1], labels[head]))
            assert cell == "–" if wanted is None else same(float(cell), wanted), (row[:2], head, cell, wanted)


def check_eval(browser: Browser, folder: Path) -> None:
    """Checks that the tables of candidates and of metrics have the numbers and the order of eval.json."""
    evaluation = json.loads((folder / "eval.json").read_text())
    made = evaluation["recommendations"][0]
    rows = texts_of(browser, "All policies at each budget")
    assert [row[0] for row in rows] == [one["policy"] for one in made["order"] + made["over_budget"]], rows
    assert [row[0] for row in rows if row[5] == "chosen"] == [made["choice"]], rows
    assert all(row[5] in ("chosen", "significant", "not significant", "no interval known", "over budget") for row in rows)
    caption = browser.js("return [...document.querySelectorAll('caption')].map((c) => c.innerText)")
    assert [text for text in caption if text in ("budget 32", "budget 64")] == ["budget 32", "budget 64"], caption
    rows = texts_of(browser, "All metrics")
    assert len(rows) == len(evaluation["configurations"]), rows
    for row, one in zip(rows, evaluation["configurations"]):
        assert row[1] == one["budget"] and abs(float(row[4]) - one["kl"]) <= 0.005 * one["kl"], (row, one)


def check_fidelity(browser: Browser, folder: Path) -> None:
    fidelity = json.loads((folder / "fidelity.json").read_text())
    standard = fidelity["default_metric"]
    answer = browser.js("return document.querySelector('.answer').innerText")
    for budget, rho in fidelity["metrics"][standard]["within"].items():
        assert f"{rho:.2f} at {budget}" in answer, answer
    rows = texts_of(browser, "Within a budget")
    assert {row[0] for row in rows[:-1]} == set(fidelity["metrics"]) and rows[-1][0] == "KL of one text against another", rows
    text = browser.js("return document.querySelector('main').innerText")
    assert text.index("KL to the full cache, nats against memory") < text.index("Within a budget")
    assert "160, 64 of them prompt" in text and f"Where {standard} is wrong" in text, text


MANY = ("window,sink,lru,h2o,streaming_h2o,random,a2sf,tova,lfu,h2o_mean,roco,scissorhands,lazy_eviction,snapkv,nacl,"
        "knorm,keydiff,a2sf:keep=0.9,lagkv,expected_attention,r_kv,h2o:recent=25%,sink:sinks=8,lru:recent=25%")


def check_axes(browser: Browser, call: Any, source: Path, folder: Path) -> None:
    """Checks for every metric that labels are at their values. One run has many policies and budgets and a value of
    exactly 0. Another run has one policy and one budget."""
    tiny, texts = source / "engine/models/tiny", source / "tools/texts"
    trace = source / "traces/samples/tiny-story"
    call("replay", "--trace", trace, "--policy", MANY, "--budget", "5%,10%,20%,30%,40%,60%,90%", "--out", folder / "many")
    call("replay", "--trace", trace, "--policy", "sink", "--budget", "64", "--out", folder / "one")
    call("fidelity", "--model", tiny, "--text", texts / "carroll-alice.txt", "--max-tokens", "160", "--prompt-tokens", "64",
         "--policy", "window,sink,h2o", "--budget", "24,48", "--out", folder / "fidelity")
    for what in ("many", "one", "fidelity"):
        call("report", folder / what, "--out", folder / f"{what}.html")
        browser.open(folder / f"{what}.html")
        check_ticks_at_widths(browser)
        metrics = browser.js("return (kvlabPage.page?.data.metrics ?? []).map((m) => m.name)")
        for metric in metrics:
            browser.choose("metric", metric)
            check_ticks(browser)
        if what == "fidelity":
            check_fidelity(browser, folder / what)
        else:
            check_front(browser, json.loads((folder / what / "run.json").read_text())["recommendations"])
            check_orders(browser)
        if what == "many":
            values = [float(row["value"]) for row in rows_of(folder / what) if row["metric"] == "layer_error"
                      and row["layer"] == "all" and row["policy"] not in ("full", "oracle_topk")]
            assert min(values) == 0 < max(values) and len(browser.dots()) >= 70, "this run should have a value of 0"
            browser.choose("metric", "layer_error")
            assert [c["axes"][1]["type"] for c in browser.js(AXES)] == ["log", "log"], "both axes should be logarithmic"
        browser.check_quiet()


def check_front(browser: Browser, recommendations: list[dict[str, Any]]) -> None:
    """Compares the first table of a report, with a row per budget, with the command's output."""
    rows = browser.js("return [...document.querySelector('table.recommendations').tBodies[0].rows].map((r) => ({"
                      "text: [...r.cells].map((c) => c.textContent), choice: r.querySelector('strong').textContent}))")
    assert [row["text"][0] for row in rows] == [made["budget"] for made in recommendations], rows
    for row, made in zip(rows, recommendations):
        assert row["choice"] == made["choice"], (row, made)
        assert row["text"][4] == (made["runner_up"] or "–"), (row, made)
        if made["full_bytes"]:
            assert f"({100 * made['kv_bytes_mean'] / made['full_bytes']:.1f}% of full)" in row["text"][1], (row, made)
        difference = made["difference"]
        if difference and difference["low"] is not None:
            numbers = [float(n) for n in row["text"][5].replace("(", "").replace(")", "").replace("to ", "").split()]
            wanted = [difference["mean"], difference["low"], difference["high"]]
            assert all(abs(a - b) <= 0.06 * (wanted[2] - wanted[1]) for a, b in zip(numbers, wanted)), (row, made)
        for name in made["not_significantly_different"]:
            assert name in row["text"][6] or row["text"][6] == "no interval known", (row, made)
        assert made["text"] and (made["reason"] != "less memory" or "needs less memory" in row["text"][2]), (row, made)


def check_orders(browser: Browser) -> None:
    """Compares the rows of the policy table, for each metric and budget, with the order in the report's data."""
    data = browser.js("const {series, budgets, metrics, ranking, headline, recommendations} = kvlabPage.page.data;"
                      "return {series: series.map((s) => s.label), budgets: budgets.map((b) => b.text), recommendations,"
                      "metrics: metrics.map((m) => m.name), ranking, headline}")
    for metric in data["metrics"]:
        browser.js("kvlabPage.page.set('metric', arguments[0])", metric)
        for budget in range(len(data["budgets"])):
            rows = browser.js(
                "kvlabPage.page.set('budget', arguments[0], 'ranking'); return [...document.querySelector('#explore table')"
                ".tBodies[0].rows].map((r) => [r.dataset.series, r.cells[5]?.textContent])", budget)
            wanted = data["ranking"][0][metric][budget]
            shown = [int(row[0]) for row in rows]
            assert shown == [row[0] for row in wanted["rows"] if row[0] in shown] and shown, (metric, budget, rows)
            chosen = [int(row[0]) for row in rows if row[1] == "chosen"]
            assert chosen == [wanted["choice"]] * len(chosen), (metric, budget, rows)
            if metric == data["headline"] and data["recommendations"][0]["budgets"]:
                made = data["recommendations"][0]["budgets"][budget]
                names = [one["policy"] for one in made["order"] + made["over_budget"]]
                assert [data["series"][s] for s in shown] == names, (budget, names)
                assert [data["series"][s] for s in chosen] == [made["choice"]], (made["choice"], rows)
    browser.js("kvlabPage.page.set('metric', arguments[0])", data["headline"])


def check_first_screen(browser: Browser) -> None:
    """Checks that the first screen, also on a phone, shows the best policy, the difference, the memory, the confidence
    and the next command."""
    for width, height, row in ((1280, 800, "tr:last-child"), (390, 844, "tr")):
        browser.resize(width, height)
        browser.until("return kvlabPage.drawnAt === innerWidth")
        ends = browser.js(f"return ['.answer', '.next', 'table.recommendations tbody {row}'].map("
                          "(s) => document.querySelector(s).getBoundingClientRect().bottom + scrollY)")
        assert all(end <= height for end in ends), (width, ends)
        assert browser.js("return document.documentElement.scrollWidth") <= width
    browser.resize(1280)
    browser.until("return kvlabPage.drawnAt === innerWidth")
    browser.settle()


def check_sweep(browser: Browser, call: Any, source: Path, folder: Path) -> None:
    """Checks the page of a run of two texts: its labels and orders are right, several values of one parameter form the
    x axis, and the spread over texts is drawn."""
    call("replay", "--trace", source / "traces/samples/tiny-story", folder / "second", "--policy",
         "h2o,a2sf:keep=0.9,a2sf:keep=0.95,a2sf:keep=0.99", "--budget", "32,64", "--out", folder / "sweep")
    call("report", folder / "sweep", "--out", folder / "sweep.html")
    browser.open(folder / "sweep.html")
    check_ticks_at_widths(browser)
    check_front(browser, json.loads((folder / "sweep/run.json").read_text())["recommendations"])
    check_orders(browser)
    browser.choose("metric", "recall")
    rows = [row for row in rows_of(folder / "sweep") if (row["metric"], row["layer"]) == ("recall", "all")]
    found = {}
    for row in rows:
        found.setdefault((row["policy"], row["params"], row["budget"]), []).append(float(row["value"]))
    series = browser.js("return kvlabPage.page.data.series.map((s) => [s.policy, s.params])")

    def check(dots: list[dict[str, Any]]) -> None:
        for dot in dots:
            values = found[(*series[dot["series"]], dot["requested"])]
            assert len(values) == 2 and same(dot["y"], sum(values) / 2), (dot, values)
            assert same(dot["min"], min(values)) and same(dot["max"], max(values)), (dot, values)

    check(browser.dots())
    assert len(browser.js("return kvlabPage.charts[0].view.data('spreads')")) == len(browser.dots())
    browser.driver.find_element("css selector", "input[name=spread]").click()
    browser.settle()
    assert not browser.js("return kvlabPage.charts[0].view.data('spreads')")
    browser.choose("over", "0")
    dots = browser.dots()
    check(dots)
    assert sorted({dot["x"] for dot in dots}) == [0.9, 0.95, 0.99] and len(dots) == 6, dots
    check_ticks_at_widths(browser)
    browser.check_quiet()


def packed(values: list[float]) -> dict[str, Any]:
    return {"bytes": 4, "base64": base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()}


def large(page: str, metrics: int = 3) -> str:
    """A report with figures of 24 policies, 8 budgets, 30 layers and 9 heads."""
    opened = page.index('id="data">') + len('id="data">')
    closed = page.index("</script>", opened)
    data = json.loads(page[opened:closed])
    data.update(series=[{**data["series"][0], "label": f"policy{s}", "policy": f"policy{s}"} for s in range(24)],
                budgets=[{"text": str(16 << b), "tokens": 16 << b} for b in range(8)], layers=list(range(30)), heads=9,
                winner=0, budget=3, kept=None, metrics=data["metrics"][:metrics], headline=data["metrics"][0]["name"])
    cells, levels = 24 * 8, {"all": 1, "layer": 30, "head": 270}
    data["values"] = [{metric["name"]: {level: {"value": packed([1 / (1 + i % 997) for i in range(cells * places)]),
                                                "count": 100} for level, places in levels.items()}
                       for metric in data["metrics"]}]
    rows = [[s, s / 100, 0, 1, 0] for s in range(24)]
    data["ranking"] = [{metric["name"]: [{"choice": 0, "rows": rows}] * 8 for metric in data["metrics"]}]
    return page[:opened] + json.dumps(data).replace("<", "\\u003c") + page[closed:]


def check_large(browser: Browser, page: str, folder: Path) -> float:
    file = folder / "large.html"
    file.write_text(large(page))
    assert file.stat().st_size < 3_000_000, file.stat().st_size
    seconds = browser.open(file)
    browser.choose("layer", "29")
    browser.choose("head", "8")
    assert len(browser.js("return kvlabPage.charts[1].view.data('cells')")) == 270
    browser.check_quiet()
    return seconds


def take_pictures(page: Path, folder: Path) -> None:
    def take(name: str, width: int, section: str, height: int) -> None:
        browser.resize(width)
        time.sleep(0.5)
        browser.settle()
        top = browser.js("const h = [...document.querySelectorAll('h2')].find((h) => h.innerText === arguments[0]);"
                         "return h ? h.getBoundingClientRect().top + scrollY - 20 : 0", section)
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        (folder / name).write_bytes(base64.b64decode(taken["data"]))

    browser = Browser()
    try:
        browser.open(page.resolve())
        take("report.png", 1280, "", 1260)  # this height shows the first screen and the first figure
        take("report-kept.png", 1280, "Which tokens were kept", 980)
        take("report-narrow.png", 400, "", 1500)
    finally:
        browser.driver.quit()


def main() -> None:
    kvlab, source = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    if sys.argv[3:4] == ["--images"]:
        return take_pictures(Path(sys.argv[4]), source / "docs/images")
    if not (Path(CHROME).exists() and Path(DRIVER).exists()):
        sys.exit(print("skipped: there is no chromium with its driver (Debian: chromium chromium-driver)"))
    if not os.environ.get("KVLAB_VEGA") and not Path("/usr/share/javascript/vega").exists():
        sys.exit(print("skipped: there is no Vega (Debian: libjs-vega)"))
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / "report.html"

        def call(*words: object) -> None:
            subprocess.run([str(word) for word in (kvlab, *words)], check=True, stdout=subprocess.DEVNULL)

        call("replay", "--trace", source / "traces/samples/tiny-story", "--policy", "window,sink,lru,h2o",
             "--budget", "64,128", "--out", run)
        call("report", run, "--model", source / "engine/models/tiny", "--out", page)
        browser = Browser()
        try:
            seconds = browser.open(page)
            check_front(browser, json.loads((run / "run.json").read_text())["recommendations"])
            check_orders(browser)
            check_replay(browser, run)
            check_first_screen(browser)
            check_controls(browser, run)
            check_heads(browser, run)
            check_axis(browser)
            check_legend(browser)
            check_tables(browser)
            check_frozen(browser)
            check_hand(browser)
            check_kept(browser, run)
            check_looks(browser)
            browser.check_quiet()
            opened_large = check_large(browser, page.read_text(), Path(folder))
            check_hostile(browser, page)
            browser.check_quiet()
            check_other_pages(browser, call, source, Path(folder))
            check_plan(browser, call, Path(folder))
            check_refetch(browser, call, source, Path(folder))
            check_without_vega(browser, call, Path(folder))
            check_sweep(browser, call, source, Path(folder))
            check_axes(browser, call, source, Path(folder))
        finally:
            browser.driver.quit()
        print(f"opened in {seconds:.2f} s, the large one in {opened_large:.2f} s")


if __name__ == "__main__":
    main()
