"""The page of runs, in a real browser: it opens, draws, filters, tells a token's numbers, and shows text as text; long
responses are drawn where they are in sight, and a served page follows its run."""

import base64
import gzip
import inspect
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro
from PIL import Image

import tools.report
import tools.runs
from common.rollouts.record import SCHEMA, Recorder, write_step
from common.rollouts.record import write_validation as write_validation_file
from common.tracking import preferences
from common.tracking.logger import LogConfig
from common.tracking.now import EVERY_S, Now
from tests.conftest import NO_BROWSER, ROOT
from tests.tools.browser import CHROMIUM, Browser
from tests.tools.long_run import write_long_run, write_rollouts, write_validation
from tests.tools.test_report import write_run
from tests.tracking.log_worker import PROMPTS, RESPONSES, TURNS, episode, record, scored, tokenizer

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


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


def test_curves_keep_their_steps(tmp_path):
    """Runs that logged other steps and metrics: one value for each step of the run, null where there is none."""
    for name, rows in (("a", [{"step": 1, "x": 1.0}, {"step": 3, "x": float("nan"), "y": 2.0}]),
                       ("b", [{"step": 2, "x": 5.0}, {"step": 3, "x": 6.1234567}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tools.report.page_data([str(tmp_path / "a"), str(tmp_path / "b")], max_mb=1)
    assert [run["steps"] for run in data["runs"]] == [[1, 3], [2, 3]]
    assert [run["metrics"] for run in data["runs"]] == [{"x": [1.0, None], "y": [None, 2.0]}, {"x": [5.0, 6.12346]}]
    assert data["rollouts"] == [] and data["runs"][0]["flags"] == {}


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "a")
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "x": 0.')
    assert [row["step"] for row in tools.runs.read_metrics(run)] == [0, 1, 2, 3, 4, 5, 6]


def test_rollouts_of_the_page_by_hand(runs):
    rollouts, left_out = tools.runs.read_rollouts(runs[0], max_mb=1)
    assert left_out == "" and not any(r["validation"] for r in rollouts)
    assert [(r["step"], r["index"], r["prompt"]) for r in rollouts] == [
        (step, i, PROMPTS[i // 2]) for step in (1, 5) for i in range(4)]
    second, fourth = (json.loads(gzip.decompress(base64.b64decode(rollouts[i]["per_token"]))) for i in (1, 3))
    assert second["rollout_logp"] == [round(-(t + 1) / 2, 4) for t in range(rollouts[1]["response_length"])]
    assert "".join(second["token_texts"]) == RESPONSES[1]
    assert rollouts[2]["reward_parts"] == {"acc": 0.5, "pred": "<i>2"} and "ratio" not in fourth


def test_prompts_of_all_runs_are_matched_by_their_text(runs, tmp_path):
    """A validation's file has nothing per token."""
    run = make_run(tmp_path / "validated")
    write_validation(run, 3, num_prompts=2, num_samples=1)
    data = tools.report.page_data([str(runs[0]), str(run)], max_mb=1)
    assert data["prompts"][:2] == PROMPTS and len(data["prompts"]) == 4
    assert [(r["run"], r["step"], r["prompt"]) for r in data["rollouts"]][::2] == [
        (0, 1, 0), (0, 1, 1), (0, 5, 0), (0, 5, 1), (1, 1, 0), (1, 1, 1), (1, 5, 0), (1, 5, 1), (1, 3, 2)]
    last = data["rollouts"][-1]
    assert last["validation"] and last["per_token"] is None and last["advantage"] is None


def test_the_size_of_the_page_is_bounded(runs):
    file = runs[0] / "rollouts/step_000005.parquet"
    one = len(tools.runs.to_json(tools.runs.rollouts_of(file, 0, 1e9)[0]))
    rollouts, left_out = tools.runs.read_rollouts(runs[0], max_mb=1.5 * one / 1e6)
    assert {r["step"] for r in rollouts} == {5}
    assert left_out == "1 of 2 recorded steps left out (--max-mb)"


HOSTILE = "</script><script>window.ran=1</script><!-- <img src=x> \x1b[31m \u202eevil \0nul \x85\u2028 {{data}}"
SHOWN = "</script><script>window.ran=1</script><!-- <img src=x> ⟨001b⟩[31m ⟨202e⟩evil ⟨0000⟩nul ⟨0085⟩⟨2028⟩ {{data}}"


def response_row(i: int, **others) -> dict:
    """A row of a recorded step; all texts are hostile."""
    names = ("data_source", "prompt", "response", "ground_truth", "finish_reason")
    return dict.fromkeys(names, HOSTILE) | {
        "step": 1, "index": i, "group": i // 4, "reward": 1.0, "advantage": 0.5, "prompt_length": 3,
        "response_length": 2, "tokens": [1, 2], "token_texts": [HOSTILE, "\x1b"], "rollout_logp": [-0.5, math.nan],
        "trained": [True, True],
        "reward_parts": json.dumps({"s": "\ud800", "inner": {"x": math.nan, "y": [math.inf]}})} | others


def put_rollouts(run: Path, name: str, rows: list[dict], without: tuple[str, ...] = (), **others) -> Path:
    table = pa.Table.from_pylist(rows, schema=SCHEMA).drop_columns([*without])
    for column, value in others.items():
        table = table.append_column(column, pa.array([value] * len(rows)))
    (run / "rollouts").mkdir(exist_ok=True)
    pq.write_table(table, run / f"rollouts/{name}.parquet")
    return run / f"rollouts/{name}.parquet"


def test_rollouts_that_cannot_be_read_are_named(tmp_path):
    """Half a file, nothing, a folder, links to nothing and to themselves, no or other columns: the rest is shown."""
    run = Path(write_run(tmp_path / "run"))
    half = put_rollouts(run, "step_000001", [response_row(i) for i in range(8)])
    half.write_bytes(half.read_bytes()[:900])
    folder = run / "rollouts"
    (folder / "step_000002.parquet").write_bytes(b"")
    (folder / "step_000003.parquet").symlink_to("step_000003.parquet")
    put_rollouts(run, "step_000004", [response_row(0)], without=("response",))
    put_rollouts(run, "step_000005", [response_row(0, reward_parts="{half")])
    found, note = tools.runs.read_rollouts(run, max_mb=1)
    assert found == [] and len(note.split("; ")) == 5
    for part in ("1.parquet cannot be read: Parquet magic", "2.parquet cannot be read: Parquet file size is 0",
                 "3.parquet cannot be read: ", "4.parquet cannot be read: its column response is missing",
                 "5.parquet cannot be read: Expecting property name"):
        assert part in note
    put_rollouts(run, "step_000006", [response_row(0)], without=("mask", "messages", "end_reason"), new=b"bytes")
    (folder / "step_000007.parquet").mkdir()
    found, note = tools.runs.read_rollouts(run, max_mb=1)
    assert [r["response"] for r in found] == [HOSTILE] and note.endswith("and 1 further files left out in part or as a "
                                                                         "whole")
    tools.report.main(tools.report.Args((str(run),)))


def picture(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("1" if kind == "PNG" else "L", size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(("image", "rule"), [
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n", "is none of PNG, JPEG"),
    (picture((20, 20), "PCX"), "is none of PNG, JPEG"), (b"", "is none of PNG"), (b"GIF89a", "is none of PNG"),
    (picture((9000, 9000)), "of 9000 x 9000 pixels is larger"),
    (picture((20000, 20000)), "a picture in it is damaged: "),
    (picture((300, 300))[:60], "a picture in it is damaged: "),
])
def test_a_picture_that_training_would_not_read_is_not_read(image, rule, tmp_path):
    """EPS would start Ghostscript on the file."""
    run = Path(write_run(tmp_path / "run"))
    put_rollouts(run, "step_000001", [response_row(0, images=[image])])
    found, note = tools.runs.read_rollouts(run, max_mb=1)
    assert found == [] and note.startswith("step_000001.parquet cannot be read: ") and rule in note
    put_rollouts(run, "step_000001", [response_row(0, images=[picture((20, 20))])])
    tools.runs.rollouts_of.cache_clear()
    assert tools.runs.read_rollouts(run, max_mb=1)[0][0]["images"][0].startswith("data:image/jpeg;base64,")


def test_what_is_no_file_in_a_run_is_not_read(tmp_path):
    """Pipes and devices, which may have no end; two columns of the same name; a file that says it is enormous."""
    run = Path(write_run(tmp_path / "run"))
    put_rollouts(run, "step_000002", [response_row(0)], reward=2.0)
    os.mkfifo(run / "rollouts/step_000001.parquet")
    (run / "rollouts/step_000003.parquet").symlink_to("/dev/zero")
    found, note = tools.runs.read_rollouts(run, max_mb=1)
    assert found == [] and "000001.parquet cannot be read: it is a folder, a pipe or a device" in note
    assert "000002.parquet cannot be read: two of its columns have the same name" in note
    assert "000003.parquet cannot be read: it is a folder, a pipe or a device" in note
    for make in (os.mkfifo, lambda file: file.symlink_to("/dev/zero"), os.mkdir):
        make(run / "config.json")
        with pytest.raises(ValueError, match=r"config.json is a folder, a pipe or a device"):
            tools.report.main(tools.report.Args((str(run),)))
        (run / "config.json").rmdir() if (run / "config.json").is_dir() else (run / "config.json").unlink()


@pytest.mark.parametrize("name", ["report.html", "curves.png"])
def test_a_link_in_the_place_of_the_page_is_not_followed(name, tmp_path):
    run = Path(write_run(tmp_path / "run"))
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    (run / name).symlink_to(notes)
    out = "" if name == "report.html" else str(run / name)
    with pytest.raises(ValueError, match=rf"{name} is a link or no file, and is not replaced"):
        tools.report.main(tools.report.Args((str(run),), out=out))
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match="is a link or no file"):
        tools.report.main(tools.report.Args((str(run),), out=out))
    (run / name).unlink()
    with tools.report.replacing(run / name) as partial:     # a link that is made in the meantime is replaced
        partial.write_text("page")
        (run / name).symlink_to(notes)
    assert notes.read_text() == "mine" and not (run / name).is_symlink()
    assert (run / name).read_text().startswith("page<!-- plainrl ")
    assert not [file for file in run.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("name", ["report.html", "curves.png"])
def test_only_what_this_tool_wrote_is_replaced(name, tmp_path):
    """Its own page or picture is, until somebody changes it."""
    run = Path(write_run(tmp_path / "run"))
    file = run / name
    args = tools.report.Args((str(run),), out="" if name == "report.html" else str(file))
    tools.report.main(args)
    written = file.read_bytes()
    tools.report.main(args)
    assert file.read_bytes() == written
    Image.new("RGB", (4, 4)).save(tmp_path / "mine.png")
    mine = (tmp_path / "mine.png").read_bytes()
    others = [
        b"", b"mine", b"<html>mine</html>\n", b"<!-- plainrl 00000001 -->\n", mine, tools.report.END_OF_PNG,
        written + b"\n", written[:-1], written[1:], written.replace(b"plainrl", b"plainrL"),
        written[:500] + b"mine" + written[500:],
    ]
    assert len({*others}) == 11
    for content in others:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} would be replaced, and is not as this tool wrote it .* move it"):
            tools.report.main(args)
        assert file.read_bytes() == content
    if name == "curves.png":
        assert Image.open(io.BytesIO(written)).text["Source"] == f"plainrl {int(written[-24:-16], 16):08x}"
    else:
        assert written.count(b"</html>") == 1 and written.rstrip().endswith(b" -->")


def test_a_file_of_many_long_responses_is_read_in_part(tmp_path):
    """The page stays within --max-mb, and says how much it shows."""
    run, random = Path(write_run(tmp_path / "run")), torch.Generator().manual_seed(0)
    logps = [torch.rand(4000, generator=random).tolist() for _ in range(12)]
    put_rollouts(run, "step_000001", [response_row(i, rollout_logp=logps[i], response_length=4000) for i in range(12)])
    found, note = tools.runs.read_rollouts(run, max_mb=0.1)
    assert 1 < len(found) < 12 and note == f"step_000001.parquet: {12 - len(found)} of 12 responses left out (--max-mb)"
    assert len(tools.runs.to_json(found)) < 0.1e6
    assert len(tools.runs.read_rollouts(run, max_mb=1e-4)[0]) == 1


def test_curves_of_very_long_runs_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(tools.runs, "MAX_STEPS", 10)
    rows = [{"step": step, "x": step / 2, "timing_s/step": 2.0} for step in range(1, 96)]
    rows[40]["val-core/a/greedy"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (shown,) = tools.report.page_data([str(tmp_path)], max_mb=1)["runs"]
    assert shown["steps"] == [5, 15, 25, 35, 41, 45, 55, 65, 75, 85, 95]
    assert shown["clock"] == [2 * step for step in shown["steps"]] and "clock" not in shown["metrics"]
    assert shown["warnings"] == ["curves show 11 of 95 steps"]


@pytest.mark.parametrize(("line", "rule"), [
    ("", "in line 8: Expecting value"), ("[1]", "in line 8: it must be an object with a step"),
    ('{"x": 1}', "in line 8: it must be an object with a step"), ('{"step": "a"}', "in line 8: step is no number"),
    ('{"step": NaN}', "in line 8: step is no number"), ('{"step": 8, "x": null}', "in line 8: x is no number"),
    ('{"step": 8, "\x1b": "a"}'.replace("\x1b", "\\u001b"), r"in line 8: \\x1b is no number"),
    ('{"a":' * 9000, "in line 8: maximum recursion depth"), ("1" * 400, "in line 8: it must be an object"),
    ('{"step": 8, "x": 1' + "0" * 400 + "}", "in line 8: x is no number"), ("\0" * 50, "in line 8: Expecting value"),
])
def test_damaged_metrics_are_refused_with_their_line(line, rule, tmp_path):
    run = write_run(tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"metrics.jsonl is damaged {rule}"):
        tools.report.main(tools.report.Args((run,)))


@pytest.mark.parametrize(("options", "rule"), [
    ({"max_mb": float("nan")}, "--max-mb nan must be above 0"), ({"port": 99999}, "--port 99999 must be from 0"),
    ({"out": "/nowhere/x.html"}, "must be a file in a folder that is there"),
])
def test_options_are_checked(options, rule, tmp_path):
    with pytest.raises(ValueError, match=rule):
        tools.report.main(tools.report.Args((write_run(tmp_path / "run"),), **options))


@pytest.mark.parametrize("text", ["{half", "[1]", '{"a":' * 9000])
def test_damaged_flags_are_refused(text, tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "run/config.json").write_text(text)
    with pytest.raises(ValueError, match=r"run/config.json is damaged: "):
        tools.report.main(tools.report.Args((run,)))


def test_a_broken_run_is_named_in_warnings(tmp_path):
    write_run(tmp_path / "a")
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward/constant_group_frac": 1.0}) + "\n")
    (warning,) = tools.report.page_data([str(tmp_path / "a")], max_mb=1)["runs"][0]["warnings"]
    assert warning.startswith("warning, step 7: in every group all rewards are equal")


def test_flags_as_they_are_typed():
    flags = {"total_steps": 3, "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}, "val_data": [], "save": {"async_": True}}
    assert tools.runs.flat_flags(flags) == {
        "--save.async": "True", "--total-steps": "3", "--optim.lr": "1e-05", "--optim.betas": "0.9 0.95",
        "--val-data": ""}


def test_what_cannot_be_written_is_refused(runs):
    with pytest.raises(ValueError, match=r"--out a.pdf must end with .html"):
        tools.report.main(tools.report.Args((str(runs[0]),), out="a.pdf"))


def test_healthy_bands_are_those_of_the_documentation():
    """Each number of the page's bands stands in the column "healthy" of the metric's row."""
    script = (ROOT / "tools/page/page.js").read_text()
    block = script.split("HEALTHY_UNDER = {")[1].split("}")[0]
    limits = re.findall(r'"([^"]+)": ([\d.]+)', block)
    assert len(limits) >= 6
    tables = [file.read_text() for file in (ROOT / "README.md", ROOT / "docs/metrics.md") if file.is_file()]
    rows = [line.split(" | ") for text in tables for line in text.splitlines() if line.startswith("| `")]
    healthy = {name: row[-1] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    probe = healthy["sync/probe_prob_diff"]
    assert probe.startswith("as above")
    healthy["sync/probe_prob_diff"] = healthy["training/rollout_probs_diff_mean"]
    for name, limit in limits:
        assert f"under {limit}" in healthy[name], name


CHARTS = re.findall(r'^  \["([^"]+)", /(.+?)/(?:, /(.+)/)?\],$', (ROOT / "tools/page/page.js").read_text(), re.M)
PREFERENCES = ("Preference accuracy, share of pairs", "Preferences, rewards and margin")


@pytest.mark.parametrize(("script", "titles"), [
    ("sft", ["Loss"]), ("distill", ["Loss"]),
    ("dpo", ["Loss", *PREFERENCES]), ("rm", ["Loss", *PREFERENCES]), ("kto", ["Loss", *PREFERENCES, "KL of KTO, nats"]),
    ("online_dpo", ["Loss", *PREFERENCES, "Preference pairs of a step"]),
    ("grpo", []), ("ppo", []),
])
def test_losses_and_preferences_have_a_chart(script, titles):
    """Whatever of these names a script or its functions log is drawn, for one run; the loss for several runs too."""
    assert len(CHARTS) > 20
    text = (ROOT / f"{script}.py").read_text()
    logged = inspect.getsource(preferences.preference_metrics), inspect.getsource(preferences.label_metrics)
    for function, source in zip(("preference_metrics(", "label_metrics("), logged):
        if function in text:
            text += source
    names = set(re.findall(r'"((?:train|val|distillation)/loss|preference/\w+)"', text))
    drawn = [(title, {name for name in names if re.search(one, name)}) for title, one, _ in CHARTS]
    assert [title for title, shown in drawn if shown] == titles
    assert set().union(*(shown for _, shown in drawn)) == names
    for title, one, several in CHARTS:
        if title in titles:
            assert any(re.search(several or one, name) for name in names), title


def test_the_page_is_short():
    lines = {file.name: len(file.read_text().splitlines()) for file in (ROOT / "tools/page").glob("page.*")}
    assert len(lines) == 3 and sum(lines.values()) <= 900, lines


def test_a_served_run_is_read_again_when_it_grows(tmp_path):
    run = tmp_path / "run"
    write_run(run)
    server = tools.report.Server([str(run)], 1.0, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def ask(path: str, **headers: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers)) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""

    try:
        status, page = ask("/")
        assert status == 200 and b"connect-src 'self'" in page
        data = json.loads(ask("/data?")[1])
        assert data["runs"][0]["steps"][-1] == 6
        assert ask("/data?" + data["version"]) == (204, b"")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "actor/entropy": 0.1}\n')
        assert json.loads(ask("/data?" + data["version"])[1])["runs"][0]["steps"][-1] == 7
        assert ask("/metrics.jsonl")[0] == 404 and json.loads(ask("/now")[1]) == [{"state": "stopped"}]
        assert ask("/data?", Host="evil.example")[0] == 403             # a foreign name that points to this machine
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(ValueError, match=rf"--port {server.server_port}: Address already in use"):
            tools.report.Server([str(run)], 1.0, server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def test_what_a_run_does_now(tmp_path):
    """Step 7 of 100 began 2 s ago, after steps of 8, 9 and 10 s, and its update is at 12 of 40. The state is that of
    the process which holds the folder's lock; after its end nothing goes on counting."""
    run = tmp_path / "run"
    write_run(run)
    now = Now(run, is_main=True)
    now.step(6, total_steps=100)
    now.logged({"val-core/a/acc/greedy": 0.5})                          # before the first step
    for seconds in (8.0, 9.0, 10.0):
        now.logged({"timing_s/step": seconds, "perf/total_num_tokens": 20_000})
    now.state["step_start"] -= 2
    now.phase("update_actor")
    now.written -= EVERY_S
    now.progress(12, 40)
    now.progress(13, 40)                                                # within a second of the one before
    stopped = tools.runs.read_now(str(run))
    assert "left_s" not in stopped and stopped["state"] == "stopped"
    holds = f"from common.checkpoint.run_folder import lock\nlock({str(run)!r})\nprint('locked', flush=True)\ninput()"
    command = [sys.executable, "-c", holds]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        found = tools.runs.read_now(str(run))
        process.communicate(b"\n")
    assert (found["state"], found["phase"], found["done"], found["total"]) == ("running", "update_actor", 12, 40)
    assert (found["step"], found["total_steps"], found["step_s"]) == (7, 100, 9.0)
    assert found["tokens_per_s"] == 2000.0 and 94 * 9 - 60 < found["left_s"] <= 94 * 9 - 2 and 0 < found["phase_s"] < 60
    now.phase("gen")
    assert "done" not in tools.runs.read_now(str(run))
    (run / "finished").touch()
    assert tools.runs.read_now(str(run))["state"] == "finished"
    for content in ("", '{"step": 7, "to', "[1]", '{"step": "7", "step_s": NaN, "phase": 3}'):
        (run / "now.json").write_text(content)
        assert tools.runs.read_now(str(run)) == {"state": "finished"} | ({"step_s": None} if "NaN" in content else {})


def test_a_run_is_watched_before_its_first_step(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match=r"metrics.jsonl does not exist"):
        tools.report.page_data([str(run)], 1.0, is_watched=True)
    Now(run, is_main=True).phase("setup of the engine")
    (run / "metrics.jsonl").touch()
    assert tools.report.page_data([str(run)], 1.0, is_watched=True)["runs"][0]["steps"] == []
    with pytest.raises(ValueError, match="the run has not finished a step"):
        tools.report.page_data([str(run)], 1.0)


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


BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)                   # of the first and the second run, or metric


def wait_for(browser, expression: str) -> None:
    """Until it is true: responses are unpacked, and views drawn, a moment after they are asked for."""
    for _ in range(500):
        if browser.evaluate(f"Boolean({expression})"):
            return
        time.sleep(0.02)
    raise AssertionError(expression)


def open_rollouts(browser, report, address: str = "") -> None:
    browser.open(report, f"#tab=rollouts{address}")
    wait_for(browser, "document.querySelector('#detail h2, #detail p')")


def press(browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key)
    browser.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")


@needs_browser
def test_it_opens_with_validation_before_and_after_and_draws_curves(browser, report):
    browser.open(report)
    assert browser.texts("#headline th") == [
        "run", "validation greedy", "validation mean@4", "training reward", "steps", "time", "model"]
    assert browser.texts("#headline td") == [
        "first", "0.1 \u2192 0.75", "0.05 \u2192 0.6", "0.286 \u2192 0.714  means of 3", "6", "69 s",
        "models/<b>tiny</b>"]
    assert browser.texts(".chart h2") == [
        "Validation", "Training reward", "Entropy, nats", "Engine - trainer, probability of a tokenhealthy under 0.01",
        "Seconds by phase"]
    counts = painted(browser, *BLUE)
    assert len(counts) == 5 and min(counts) > 100, counts
    assert browser.evaluate("document.title") == "first"
    assert browser.complaints() == []


def write_pairs(folder: Path, scale: float = 1.0) -> str:
    """Four steps as dpo.py logs them: validation at 0 and 4."""
    folder.mkdir()
    rows = [{"step": 0, "val/loss": 0.7, "val-core/preference/margin": 0.0}]
    for step in range(1, 5):
        rows.append({
            "step": step, "train/loss": scale / step, "preference/accuracy": 0.5 + step / 10,
            "preference/margin": 0.5 * step, "preference/chosen_reward": -0.25 * step,
            "preference/rejected_reward": -0.75 * step, "timing_s/step": 2.0,
        })
    rows[-1] |= {"val/loss": 0.3, "val-core/preference/margin": 1.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@needs_browser
def test_losses_and_preferences_are_drawn(browser, tmp_path):
    """One run, then two. A validation is no curve to smooth; runs without these metrics have no such charts (above)."""
    runs = (write_pairs(tmp_path / "a"), write_pairs(tmp_path / "b", scale=0.5))
    tools.report.main(tools.report.Args(runs[:1]))
    browser.open(tmp_path / "a/report.html", "#smooth=0.9")
    assert browser.texts(".chart h2") == ["Validation", "Loss", *PREFERENCES, "Seconds by phase"]
    assert browser.texts(".chart:nth-child(2) .legend span") == ["train/loss", "val/loss"]
    assert browser.texts(".chart:nth-child(2) .legend b") == ["0.25", "0.3"]
    assert browser.texts(".chart:nth-child(4) .legend span") == ["chosen_reward", "margin", "rejected_reward"]
    assert min(painted(browser, *BLUE)) > 50
    train, val, smooth_train, smooth_val = browser.evaluate("plots[1].data.slice(1)")      # the smooth ones above
    assert train != smooth_train and val == smooth_val
    tools.report.main(tools.report.Args(runs))
    browser.open(tmp_path / "a/report.html")
    assert browser.texts(".chart:nth-child(1) .legend span") == [
        "train/loss \u00b7 a", "val/loss \u00b7 a", "train/loss \u00b7 b", "val/loss \u00b7 b"]
    assert browser.texts(".chart:nth-child(3) h2, .chart:nth-child(3) .legend span") == [
        "Preferences, rewards and margin", "a", "b"]
    assert browser.complaints() == []


@needs_browser
def test_legends_show_last_values_and_nothing_moves_under_the_mouse(browser, report):
    browser.open(report)
    boxes = "JSON.stringify([...document.querySelectorAll('.chart, .legend, .legend b')].map(x => " \
            "x.getBoundingClientRect().toJSON()))"
    before = browser.evaluate(f"scrollTo(0, 0), {boxes}")
    assert browser.texts(".chart:nth-child(2) .legend b, .chart:nth-child(5) .legend b") == ["0.8571", "8", "14", "5"]
    over = browser.evaluate("(() => { const b = document.querySelector('.u-over').getBoundingClientRect(); "
                            "return [b.left + b.width / 2, b.top + 50]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=over[0], y=over[1])
    wait_for(browser, "document.querySelector('.chart:nth-child(2) .legend b').textContent === '0.4286'")  # step 3
    assert browser.evaluate(boxes) == before
    for ticks, texts in (([10.4705, 10.471, 10.4715], ["10.4705", "10.471", "10.4715"]),
                         ([0, 0.25, 0.5], ["0", "0.25", "0.5"]),
                         ([-1000.5, None, -1000.4], ["-1000.5", "\u2013", "-1000.4"]),
                         ([3], ["3"]), ([1.1e-11, 1.2e-11], ["1.1e-11", "1.2e-11"])):
        assert browser.evaluate(f"(ticks => ticks.map(x => show(x, digitsOf(ticks))))({json.dumps(ticks)})") == texts


@needs_browser
def test_smoothing_time_and_theme(browser, report):
    browser.open(report)
    plain = painted(browser, *BLUE)
    browser.choose("#smooth", "0.9")
    browser.choose("#x", "time")
    wait_for(browser, "plots[0].data[0].at(-1) === 69")                  # seconds
    assert "smooth=0.9" in browser.evaluate("location.hash")
    assert painted(browser, *BLUE) != plain
    # weight 0.5 by hand: 1; (0.5 + 1.5) / 1.5 ... sums of weights 0.5, 0.75, 0.875
    assert browser.evaluate("smooth([1, null, 3, 5], 0.5)") == [
        1, None, pytest.approx(1.75 / 0.75), pytest.approx(3.375 / 0.875)]
    assert browser.evaluate("data.runs[0].clock") == [0, 9, 19, 30, 42, 55, 69]
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(background)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    wait_for(browser, f"{background} === 'rgb(20, 24, 31)'")
    browser.point("#theme", click=True)
    wait_for(browser, f"{background} === '{light}'")
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert browser.complaints() == []


@needs_browser
def test_long_runs_open_smoothed_with_every_line_in_sight(browser, tmp_path):
    """Three noisy runs of 2,000 steps: the last one does not hide the others; its slider shows the smoothing."""
    names = []
    for number in range(3):
        run = tmp_path / f"run{number}"
        run.mkdir()
        rows = [{"step": step, "critic/rewards/mean": math.sin(step * 7.3 + number) + number / 5, "timing_s/step": 1.0}
                for step in range(1, 2001)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(run))
    tools.report.main(tyro.cli(tools.report.Args, args=names))
    browser.open(Path(names[0]) / "report.html", "")
    assert browser.evaluate("document.getElementById('smooth').value") == "0.9"
    counts = [max(painted(browser, *colour)) for colour in (BLUE, ORANGE)]
    assert min(counts) > 300
    browser.evaluate("go({smooth: '0'})")
    wait_for(browser, "location.hash.includes('smooth=0')")


@needs_browser
def test_rollouts_open_where_tokens_are_coloured_and_flags_keep_their_words(browser, tmp_path):
    run = make_run(tmp_path / "run")
    write_validation(run, 0, num_prompts=2, num_samples=2)
    tools.report.main(tools.report.Args((str(run),)))
    open_rollouts(browser, run / "report.html")
    assert browser.texts("#detail h2")[0].startswith("step 1, group 0")        # not the validation before it
    assert browser.texts("#rows .row.on")[0].startswith("1")
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(run / "report.html", "#tab=flags")
        heights = browser.evaluate("[...document.querySelectorAll('#flags td')].map(cell => cell.offsetHeight)")
        assert len(heights) > 6 and max(heights) < 40                           # one line each
        open_rollouts(browser, run / "report.html")
        right = browser.evaluate("[...document.querySelectorAll('#rows .row:not(.group) > *')]"
                                 ".map(cell => cell.getBoundingClientRect().right)")
        assert 0 < max(right) <= 390                                            # a response's text is in sight, too
        assert browser.evaluate("document.querySelector('#rows .row .text').offsetWidth") > 80
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=1500, height=1000, deviceScaleFactor=1, mobile=False)


@needs_browser
def test_what_is_zero_throughout_is_named_and_not_drawn(browser, tmp_path):
    run = tmp_path / "run"
    write_run(run)
    rows = [json.loads(line) | {"actor/pg_clipfrac": 0.0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools.report.main(tools.report.Args((str(run),)))
    browser.open(run / "report.html")
    assert "Clipped tokens, share" not in "".join(browser.texts(".chart h2"))
    assert browser.texts("#flat") == ["zero throughout, not drawn: Clipped tokens, share"]
    browser.type("#m", "clipfrac")                                      # any metric can be asked for
    wait_for(browser, "document.querySelectorAll('.chart').length === 1")
    assert browser.texts(".chart h2") == ["actor/pg_clipfrachealthy under 0.2"]


@needs_browser
def test_step_reward_and_text_filter_the_list(browser, report):
    open_rollouts(browser, report)

    def shown() -> list[str]:
        press(browser, "Shift")                                         # a frame
        steps, rewards = (browser.texts(f"#rows .row:not(.group) span:nth-of-type({n})") for n in (1, 3))
        return [" ".join(pair) for pair in zip(steps, rewards)]

    assert shown() == ["1 1.25", "1 0", "1 0.5", "1 -0.5", "5 1.25", "5 0", "5 0.5", "5 -0.5"]
    assert browser.texts("#rows .group") == [
        "step 1 \u00b7 group 0 \u00b7 What is 2 + 3?2 \u00d7 reward 0.625",
        "step 1 \u00b7 group 1 \u00b7 How many apples </script> <b>& pears</b>?2 \u00d7 reward 0",
        "step 5 \u00b7 group 0 \u00b7 What is 2 + 3?2 \u00d7 reward 0.625",
        "step 5 \u00b7 group 1 \u00b7 How many apples </script> <b>& pears</b>?2 \u00d7 reward 0"]
    browser.type("#min", "0.1")
    assert shown() == ["1 1.25", "1 0.5", "5 1.25", "5 0.5"]
    browser.type("#q", "how MANY")                                      # a prompt's
    assert shown() == ["1 0.5", "5 0.5"]
    assert browser.texts("#count") == ["2 of 8 responses"]
    browser.choose("#step", "5")
    assert shown() == ["5 0.5"]
    assert "step=5" in browser.evaluate("location.hash")
    open_rollouts(browser, report, "&step=5&max=0&sort=reward&by=none")  # the address holds the view
    assert shown() == ["5 -0.5", "5 0"]
    open_rollouts(browser, report, "&q=NAÏVE")                          # a response's
    assert shown() == ["1 0.5", "5 0.5"]
    assert browser.complaints() == []


@needs_browser
def test_a_group_side_by_side_with_coloured_tokens_and_their_numbers(browser, report):
    open_rollouts(browser, report, "&show=0-1-1&paint=entropy")
    assert browser.texts(".response .tokens") == [RESPONSES[0], RESPONSES[1].replace("\n", "⏎\n")]
    first, last = ".response.on .tokens span:first-child", ".response.on .tokens div:last-child span:last-child"
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
    wait_for(browser, colour.format(json.dumps(first)) + ".startsWith('rgba(230, 120, 30, ')")     # below the middle
    # token 0 of response 1: -1 + 0.5; the largest of the group is its last one: -(1 + t / 100) + (t + 1) / 2
    t = len(browser.texts(".response.on .tokens span")) - 1
    found = browser.evaluate(colour.format(json.dumps(first)))
    assert float(found[19:-1]) == pytest.approx(0.75 * 0.5 / ((t + 1) / 2 - 1 - t / 100), abs=0.002)
    open_rollouts(browser, report, "&show=0-1-3")
    assert browser.texts(".response.on h3")[0].startswith("#3  reward -0.5  adv. \u2013")   # not trained: a dash
    assert browser.texts("#scale") == ["-22"]                           # its neighbour's advantage is 2: -2 to 2
    assert "1 trained on" in browser.texts("#detail p")[0]
    assert browser.complaints() == []


def make_episodes(folder: Path) -> Path:
    """A run whose files of step 1 and of validation 1 have an episode; its step 5 is as older versions wrote it."""
    write_run(folder)
    sample = episode(tokenizer())
    write_step(Recorder(LogConfig(), folder, tokenizer()), 1, scored(torch.zeros(1), [sample]), [], torch.tensor([1.0]))
    write_validation_file(Recorder(LogConfig(), folder, tokenizer()), 1, [sample])
    record(folder, [0, 1, 2, 3], [2, 0, 1], LogConfig(), 5)
    file = folder / "rollouts/step_000005.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["mask", "num_turns", "end_reason", "messages"]), file)
    return folder


@needs_browser
def test_an_episode_is_a_conversation(browser, tmp_path):
    run = make_episodes(tmp_path / "episodes")
    tools.report.main(tools.report.Args((str(run),)))
    open_rollouts(browser, run / "report.html", "&show=0-1-0&paint=surprise, -log-prob")
    card = ".response.on .tokens"
    assert browser.texts(f"{card} .writer") == ["model", "tool calculator", "model"]
    assert browser.texts(f"{card} > div:not(.writer)") == [text for _, text in TURNS]
    assert browser.texts(f"{card} .others") == [TURNS[1][1]]
    painted_tokens = f"[...document.querySelectorAll('{card} span')].filter(x => x.style.backgroundColor)"
    mask = episode(tokenizer()).response.mask
    assert browser.evaluate(f"{painted_tokens}.map(x => +x.dataset.token)") == [t for t in range(len(mask)) if mask[t]]
    assert len(browser.texts(f"{card} span.untrained")) == mask.count(False) > 3
    assert "2 turns, done" in browser.texts(".response.on h3")[0]
    browser.point(f"{card} .others span")
    assert browser.texts("#tip")[0].endswith("not the model's")          # and none of its numbers
    open_rollouts(browser, run / "report.html", "&show=0-v1-0")
    assert browser.texts(f"{card} .writer") == ["model", "tool calculator", "model"]
    assert browser.texts(f"{card} > div:not(.writer)") == [text for _, text in TURNS]
    open_rollouts(browser, run / "report.html", "&show=0-5-1")           # an older file, of single responses
    assert browser.texts(card) == ["2 + 3 = 5\u23ce\n#### 5"] and browser.texts(".writer") == []
    assert browser.complaints() == []


@needs_browser
def test_arrow_keys_and_the_same_prompt_over_time(browser, report):
    open_rollouts(browser, report)
    chosen = "document.querySelector('#rows .on span:nth-of-type(7)').textContent"
    assert browser.evaluate(chosen) == RESPONSES[0]
    press(browser, "ArrowDown")
    assert browser.evaluate(chosen) == RESPONSES[1].replace("\n", "\n")
    press(browser, "ArrowDown")                                         # over the next group's summary
    assert browser.evaluate(chosen) == RESPONSES[2]
    press(browser, "ArrowRight")
    assert browser.evaluate("state.show") == "0-5-0"
    press(browser, "ArrowUp")
    assert browser.evaluate("state.show") == "0-1-3"
    assert browser.texts("#times button") == ["step 1: 0", "step 5: 0"]
    browser.point("#times button:last-child", click=True)
    wait_for(browser, "document.querySelector('#detail h2').textContent.startsWith('step 5, group 1')")
    browser.choose("#by", "prompt")
    wait_for(browser, "document.querySelectorAll('#rows .group').length === 2")
    assert browser.texts("#rows .group span:last-child") == ["reward 0.625 \u2192 0.625", "reward 0 \u2192 0"]


@needs_browser
def test_text_is_text(browser, report):
    """A response with markup and the end of a script, a prompt with both: shown as they are, nothing runs, nothing is
    fetched."""
    open_rollouts(browser, report, "&show=0-1-3")
    for place, text in ((".response.on .tokens", RESPONSES[3]), ("#detail .prompt", PROMPTS[1]),
                        ("#rows .on .text", RESPONSES[3])):
        assert browser.texts(place) == [text]
    assert browser.evaluate("document.querySelectorAll('img, #detail b, #detail i:not(#scale i), script').length") == 1
    browser.point(".response.on .tokens span")
    assert browser.texts("#tip")[0].startswith('"<"  token 0')
    browser.evaluate("const x = document.createElement('div'); document.body.append(x); "
                     "x.innerHTML = '<img src=x onerror=\"window.ran = 1\">'")
    time.sleep(0.2)
    assert browser.evaluate("window.ran === undefined")                 # even markup would not run: the page forbids it
    assert "innerHTML" not in (ROOT / "tools/page/page.js").read_text()
    browser.events.clear()


@needs_browser
def test_control_characters_are_shown_and_extreme_numbers_drawn(browser, tmp_path):
    """Escapes, marks of writing direction, NUL: in sight, in every place; 1e308, steps twice and out of order."""
    run = Path(write_run(tmp_path / "run"))
    put_rollouts(run, "step_000001", [response_row(0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "critic/rewards/mean": 1e308, "actor/entropy": -1e308}\n{"step": 9, "actor/entropy": '
                   '1e308}\n{"step": 3, "actor/entropy": 1e400}\n{"step": 3, "critic/rewards/mean": NaN}\n')
    tools.report.main(tools.report.Args((str(run),)))
    open_rollouts(browser, run / "report.html", "&show=0-1-0")
    for place in ("#rows .on .text", "#detail .prompt", ".response.on .tokens span:first-child"):
        assert browser.texts(place)[0] == SHOWN
    assert browser.texts("#detail h2") == [f"step 1, group 0 of {SHOWN}, ground truth {SHOWN}"]
    assert browser.evaluate("window.ran === undefined && document.querySelectorAll('img, script').length === 1")
    browser.open(run / "report.html")
    assert browser.texts(".chart:nth-child(2) .legend b") == ["1.0e+308"] and browser.complaints() == []
    tools.report.main(tools.report.Args((str(run),), out=str(tmp_path / "curves.png")))


@needs_browser
def test_three_runs_over_each_other(browser, runs, tmp_path):
    out = tmp_path / "three.html"
    third = make_run(tmp_path / "third", lr=3e-5, scale=0.25)
    tools.report.main(tyro.cli(tools.report.Args, args=[*map(str, (*runs, third)), "--out", str(out)]))
    browser.open(out)
    assert browser.texts("#headline td:first-child") == ["first", "second", "third"]
    assert browser.texts(".chart:nth-child(2) .legend span") == ["first", "second", "third"]
    assert browser.texts(".chart:nth-child(2) .legend b") == ["0.8571", "0.4286", "0.2143"]
    assert painted(browser, *BLUE)[1] > 50 and painted(browser, *ORANGE)[1] > 50
    browser.point("#headline tr:nth-child(3) input", click=True)        # the second run is hidden
    wait_for(browser, "document.querySelectorAll('.chart:nth-child(2) .legend span').length === 2")
    assert painted(browser, *BLUE)[1] > 50 and max(painted(browser, *ORANGE)) == 0
    open_rollouts(browser, out, "&run=2")
    assert browser.texts("#count") == ["8 of 24 responses"]
    assert browser.texts("#detail h2")[0].startswith("third \u00b7 step 1, group 0")
    browser.choose("#by", "prompt")
    wait_for(browser, "document.querySelectorAll('#rows .group').length === 2")
    assert browser.texts("#rows .group span:last-child") == ["reward 0.625 \u2192 0.625", "reward 0 \u2192 0"]
    assert len(browser.texts("#times button")) == 6                     # the same prompt in three runs, two steps each
    browser.open(out, "#tab=flags")
    assert browser.texts("#flags tr.differs td") == ["--optim.lr", "1e-05", "2e-05", "3e-05"]
    assert browser.texts("#flags td:first-child") == ["--optim.lr", "--model", "--optim.betas", "--log.to"]
    assert browser.texts("#flags tr:nth-child(3) td + td") == 3 * ["models/<b>tiny</b>"]
    assert browser.complaints() == []


NODES = "document.querySelectorAll('*').length"


@needs_browser
def test_long_responses_are_drawn_where_they_are_in_sight(browser, tmp_path, capsys):
    """200 responses of 8,000 tokens and two validations. Times are printed, not judged."""
    run = write_long_run(tmp_path / "long", length=8000)
    tools.report.main(tools.report.Args((str(run),)))
    start = time.perf_counter()
    open_rollouts(browser, run / "report.html", "&kind=training")
    wait_for(browser, "document.querySelector('.response.on .tokens span')")
    opened = time.perf_counter() - start
    assert browser.texts("#count") == ["200 of 280 responses"]
    assert len(browser.texts(".response")) == 20 and len(browser.texts(".response .tokens")) == 1
    assert browser.evaluate("document.getElementById('detail').scrollHeight") > 5000
    assert browser.evaluate(NODES) < 4000                               # of 160,000 tokens of this group alone
    slowest, most, last = browser.evaluate("""(async () => {
        const frame = () => new Promise(requestAnimationFrame), detail = document.getElementById("detail");
        let slowest = 0, most = 0;
        for (let i = 0; i < 40; i++) {
            const start = performance.now();
            detail.scrollTop += 500;
            document.getElementById("list").scrollTop += 300;
            await frame();
            slowest = Math.max(slowest, performance.now() - start);
            most = Math.max(most, NODES);
        }
        detail.querySelector(".on .tokens").lastChild.scrollIntoView();
        await frame(); await frame(); await frame();
        const spans = [...detail.querySelectorAll(".on .tokens span")];
        return [slowest, most, spans.at(-1).dataset.token];
    })()""".replace("NODES", NODES))
    assert most < 4000 and last == "7999"
    browser.choose("#kind", "validation")
    wait_for(browser, "document.getElementById('count').textContent === '80 of 280 responses'")
    wait_for(browser, "document.querySelector('#detail h2').textContent.startsWith('validation, step 0, group 0')")
    assert browser.texts(".response.on .tokens") == ["answer 0 at step 0"]
    assert [text.split(":")[0] for text in browser.texts("#times button")] == [
        "validation, step 0", "step 5", "validation, step 5"]
    assert browser.complaints() == []
    with capsys.disabled():
        print(f"\n200 responses of 8,000 tokens: open {opened:.2f} s, slowest frame {slowest:.0f} ms, {most} elements")


@needs_browser
def test_a_watched_page_follows_its_run(browser, tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_run(run)
    server = tools.report.Server([str(run)], 1.0, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/#x=time")
        wait_for(browser, "document.getElementById('status')?.textContent === 'live'")
        assert browser.texts("#headline td:nth-child(5)") == ["6"]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 7, "val-core/sums/acc/greedy": 0.9, "timing_s/step": 1}) + "\n")
        write_rollouts(run, 7, num_groups=1, group_size=2, length=10)
        wait_for(browser, "document.querySelector('#headline td:nth-child(5)').textContent === '7'")
        assert browser.texts("#headline td:nth-child(2)") == ["0.1 \u2192 0.9"]
        assert browser.evaluate("data.rollouts.length") == 2 and browser.evaluate("state.x") == "time"
        assert browser.texts("#now li > *") == ["stopped", "newest rollouts: step 7"]
        Now(run, is_main=True).phase("gen")
        (run / ".lock").touch()
        monkeypatch.setattr(tools.runs, "is_held", lambda lock: True)   # by another process
        wait_for(browser, "document.querySelector('#now .running')")
        assert [text for text in browser.texts("#now li > *") if not text.startswith("gen for ")] == [
            "running", "newest rollouts: step 7"]
        browser.point("#now a", click=True)
        wait_for(browser, "state.tab === 'rollouts' && state.step === '7'")
    finally:
        server.shutdown()
        server.server_close()
        browser.open(Path("/dev/null"))
        browser.events.clear()
