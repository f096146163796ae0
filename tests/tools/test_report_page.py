"""The page of a run, in a real browser: it opens, draws, filters, tells a token's numbers, and shows text as text."""

import json
import time
from pathlib import Path

import pytest
import tyro

import tools.report
from common.tracking.logger import LogConfig
from tests.tools.browser import CHROMIUM, Browser
from tests.tools.test_report import write_run
from tests.tracking.log_worker import PROMPTS, RESPONSES, record

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def make_run(folder: Path, lr: float = 1e-5, scale: float = 1.0) -> Path:
    """Curves of six steps, rollouts of steps 1 and 5, some flags."""
    write_run(folder, scale)
    flags = {"model": "models/<b>tiny</b>", "optim": {"lr": lr, "betas": [0.9, 0.99]}, "log": {"to": ["wandb"]}}
    (folder / "config.json").write_text(json.dumps(flags))
    for step in (1, 5):
        record(folder, [0, 1, 2, 3], [2, 0, 1], LogConfig(), step)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "first"), make_run(folder / "second", lr=2e-5, scale=0.5)


@pytest.fixture(scope="module")
def report(runs) -> Path:
    tools.report.main(tyro.cli(tools.report.Args, args=[str(runs[0])]))
    return runs[0] / "report.html"


@pytest.fixture(scope="module")
def browser():
    with Browser() as page:
        yield page


# --------------------------------------------------------------------------- without a browser

def test_one_file_with_everything_in_it(report):
    text = report.read_text()
    assert "uPlot" in text and "{{style}}" not in text and "{{script}}" not in text
    for outside in ("<link", "src=", "@import", "url("):
        assert outside not in text.replace(json.dumps(RESPONSES[3]).replace("<", "\\u003c")[1:-1], "")
    assert text.count("</script>") == 2                                 # the data block's and the script's


def test_curves_are_aligned_by_step(runs, tmp_path):
    """Runs that logged other steps and metrics: one value a step of either, null where there is none."""
    for name, rows in (("a", [{"step": 1, "x": 1.0}, {"step": 3, "x": float("nan"), "y": 2.0}]),
                       ("b", [{"step": 2, "x": 5.0}, {"step": 3, "x": 6.0}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tools.report.page_data([str(tmp_path / "a"), str(tmp_path / "b")], max_mb=1)
    assert data["steps"] == [1, 2, 3]
    assert [run["metrics"] for run in data["runs"]] == [
        {"x": [1.0, None, None], "y": [None, None, 2.0]}, {"x": [None, 5.0, 6.0]}]
    assert data["rollouts"] == [] and data["runs"][0]["flags"] == {}


def test_rollouts_of_the_page_by_hand(runs):
    prompts, rollouts, left_out = tools.report.read_rollouts(runs[0], max_mb=1)
    assert prompts == PROMPTS and left_out == ""
    assert [(r["step"], r["index"], r["prompt"]) for r in rollouts] == [
        (step, i, i // 2) for step in (1, 5) for i in range(4)]
    assert rollouts[1]["rollout_logp"] == [round(-(t + 1) / 2, 4) for t in range(rollouts[1]["response_length"])]
    assert rollouts[2]["reward_parts"] == {"acc": 0.5, "pred": "<i>2"} and rollouts[3]["ratio"] is None


def test_the_size_of_the_page_is_bounded(runs):
    one = len(json.dumps(tools.report.rollouts_of(runs[0] / "rollouts/step_000005.parquet")))
    _, rollouts, left_out = tools.report.read_rollouts(runs[0], max_mb=1.5 * one / 1e6)
    assert {r["step"] for r in rollouts} == {5}
    assert left_out == "; 1 of 2 recorded steps left out (--max-mb)"


def test_a_broken_run_is_named_in_warnings(tmp_path):
    write_run(tmp_path / "a")
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward/constant_group_frac": 1.0}) + "\n")
    (warning,) = tools.report.page_data([str(tmp_path / "a")], max_mb=1)["warnings"]
    assert warning.startswith("warning, step 7: in every group all rewards are equal")


def test_flags_as_they_are_typed():
    flags = {"total_steps": 3, "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}, "val_data": []}
    assert tools.report.flat_flags(flags) == {
        "--total-steps": "3", "--optim.lr": "1e-05", "--optim.betas": "0.9 0.95", "--val-data": ""}


def test_what_cannot_be_shown_is_refused(runs, tmp_path):
    first, second = map(str, runs)
    with pytest.raises(ValueError, match=r"page \(.html\) shows one run, and with --compare RUN2 a second"):
        tools.report.main(tools.report.Args((first, second)))
    with pytest.raises(ValueError, match=r"a picture \(.png\) shows any number, without --compare"):
        tools.report.main(tools.report.Args((first,), compare=second, out=str(tmp_path / "a.png")))


# --------------------------------------------------------------------------- with one

PAINTED = """[...document.querySelectorAll('#charts canvas')].map(canvas => {
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4)
        count += data[i] === RED && data[i + 1] === GREEN && data[i + 2] === BLUE && data[i + 3] === 255;
    return count;
})"""


def painted(browser, red: int, green: int, blue: int) -> list[int]:
    """Pixels of exactly this colour, by chart."""
    script = PAINTED.replace("RED", str(red)).replace("GREEN", str(green)).replace("BLUE", str(blue))
    for _ in range(100):
        if any(counts := browser.evaluate(script)):
            break
        time.sleep(0.02)                                                # uPlot draws after the page is loaded
    return counts


@needs_browser
def test_it_opens_and_draws_curves(browser, report):
    browser.open(report)
    assert browser.texts(".chart h2") == [
        "Reward", "Validation", "Entropy, nats", "Engine against trainer, difference of probabilities",
        "Seconds by phase"]
    counts = painted(browser, 0x2F, 0x6F, 0xDE)                         # the first series' blue
    assert len(counts) == 5 and min(counts) > 100, counts
    assert browser.evaluate("document.title") == "first"
    assert browser.complaints() == []


@needs_browser
def test_step_reward_and_text_filter_the_table(browser, report):
    browser.open(report, "#tab=rollouts")

    def shown() -> list[str]:
        steps, rewards = (browser.texts(f"#list tbody td:nth-child({column})") for column in (1, 3))
        return [" ".join(pair) for pair in zip(steps, rewards)]

    assert shown() == ["1 1.25", "1 0", "1 0.5", "1 -0.5", "5 1.25", "5 0", "5 0.5", "5 -0.5"]
    browser.type("#min", "0.1")
    assert shown() == ["1 1.25", "1 0.5", "5 1.25", "5 0.5"]
    browser.type("#q", "how MANY")                                      # a prompt's
    assert shown() == ["1 0.5", "5 0.5"]
    assert browser.texts("#count") == ["2 of 8 responses"]
    browser.choose("#step", "5")
    assert shown() == ["5 0.5"]
    assert "step=5" in browser.evaluate("location.hash")
    browser.open(report, "#tab=rollouts&step=5&max=0&sort=reward")      # the address holds the view
    assert shown() == ["5 -0.5", "5 0"]
    browser.open(report, "#tab=rollouts&q=NAÏVE")                       # a response's
    assert shown() == ["1 0.5", "5 0.5"]
    assert browser.complaints() == []


@needs_browser
def test_a_group_side_by_side_with_coloured_tokens_and_their_numbers(browser, report):
    browser.open(report, "#tab=rollouts&show=1-1&paint=entropy")
    assert browser.texts(".response .tokens") == [RESPONSES[0], RESPONSES[1].replace("\n", "⏎\n")]
    first, last = (f".response.on .tokens span:{which}-child" for which in ("first", "last"))
    colour = "getComputedStyle(document.querySelector({})).backgroundColor"
    assert browser.evaluate(colour.format(json.dumps(first))) == "rgba(142, 91, 208, 0)"           # entropy 0
    assert browser.evaluate(colour.format(json.dumps(last))) == "rgba(142, 91, 208, 0.75)"         # the most
    assert browser.evaluate("document.getElementById('tip').hidden")
    browser.point(".response.on .tokens span:nth-child(2)")
    assert not browser.evaluate("document.getElementById('tip').hidden")
    assert dict(zip(browser.texts("#tip td:first-child"), browser.texts("#tip td + td"))) == {
        "advantage": "1", "entropy": "1", "log-prob, engine": "-1", "log-prob, trainer": "-1.01", "ratio": "1.1",
        "clipped": "true"}
    browser.choose("#paint select", "log-prob, trainer - engine")
    # token 0 of response 1: -1 + 0.5; the largest of the group is its last one: -(1 + t / 100) + (t + 1) / 2
    t = len(browser.texts(".response.on .tokens span")) - 1
    found = browser.evaluate(colour.format(json.dumps(first)))
    assert found.startswith("rgba(230, 120, 30, ")                      # below the middle
    assert float(found[19:-1]) == pytest.approx(0.75 * 0.5 / ((t + 1) / 2 - 1 - t / 100), abs=0.002)
    browser.open(report, "#tab=rollouts&show=1-3")
    assert browser.texts(".response.on h3")[0].startswith("#3  reward -0.5  adv. \u2013")   # not trained: a dash
    assert browser.texts("#scale") == ["-22"]                           # its neighbour's advantage is 2: -2 to 2
    assert browser.complaints() == []


@needs_browser
def test_text_is_text(browser, report):
    """A response with markup and the end of a script, a prompt with both: shown as they are, nothing runs, nothing is
    fetched."""
    browser.open(report, "#tab=rollouts&show=1-3")
    for place, text in ((".response.on .tokens", RESPONSES[3]), ("#detail .prompt", PROMPTS[1]),
                        ("tbody tr.on td.text", RESPONSES[3])):
        assert browser.texts(place) == [text]
    assert browser.evaluate("document.querySelectorAll('img, #detail b, #detail i:not(#scale i), script').length") == 2
    browser.point(".response.on .tokens span")
    assert browser.texts("#tip")[0].startswith('"<"  token 0')
    browser.evaluate("const x = document.createElement('div'); document.body.append(x); "
                     "x.innerHTML = '<img src=x onerror=\"window.ran = 1\">'")
    time.sleep(0.2)
    assert browser.evaluate("window.ran === undefined")                 # even markup would not run: the page forbids it
    browser.events.clear()


@needs_browser
def test_two_runs_over_each_other(browser, runs, tmp_path):
    out = tmp_path / "both.html"
    tools.report.main(tools.report.Args((str(runs[0]),), compare=str(runs[1]), out=str(out)))
    browser.open(out)
    assert browser.texts(".chart:first-child .u-legend th") == ["step", "mean · first", "mean · second"]
    both = painted(browser, 0x2F, 0x6F, 0xDE)[0]
    tools.report.main(tools.report.Args((str(runs[0]),), out=str(out)))
    browser.open(out)
    assert both > 1.2 * painted(browser, 0x2F, 0x6F, 0xDE)[0]
    tools.report.main(tools.report.Args((str(runs[0]),), compare=str(runs[1]), out=str(out)))
    browser.open(out, "#tab=flags")
    assert browser.texts("#flags tr.differs td") == ["--optim.lr", "1e-05", "2e-05"]
    assert browser.texts("#flags td:first-child") == ["--optim.lr", "--model", "--optim.betas", "--log.to"]
    assert browser.texts("#flags tr:nth-child(3) td + td") == 2 * ["models/<b>tiny</b>"]
    assert browser.complaints() == []
