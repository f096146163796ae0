"""Look at runs: a page with curves and rollouts that needs neither server nor network, or a picture of the curves.

    python -m tools.report runs/quickstart                                   # writes runs/quickstart/report.html
    python -m tools.report runs/a runs/b runs/c                              # any number of runs, in runs/a/report.html
    python -m tools.report runs/a runs/b --watch                             # a page that follows the runs
    python -m tools.report runs/a runs/b --out curves.png                    # a picture
"""

import base64
import contextlib
import hashlib
import http.server
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.tracking.health import HealthCheck
from tools.flags import exit_with_error
from tools.runs import (
    CLOCK,
    NOW,
    finite,
    has_steps,
    read_flags,
    read_metrics,
    read_now,
    read_rollouts,
    series,
    thinned,
    to_json,
    version,
)

PAGE = Path(__file__).parent / "page"
MAX_WARNINGS = 200
END_OF_PNG = struct.pack(">I4sI", 0, b"IEND", zlib.crc32(b"IEND"))


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, any number: their curves are drawn over each other, and each has its rollouts in the page."""
    out: str = ""
    """File to write: .html is the page, .png the picture; default: report.html in the first run's folder."""
    max_mb: float = 50.0
    """Most MB of rollouts in the page; beyond it every second recorded step is left out, until the rest fits."""
    watch: Annotated[bool, tyro.conf.arg(aliases=["--serve"])] = False
    """Write no file: serve the page to this machine's browsers, and show what the runs do now (phase, tokens a second,
    time left), their new steps and rollouts. From another machine it is reached through
    `ssh -L 8000:localhost:8000`."""
    port: int = 8000
    """Port of --watch."""


def draw(runs: list[str], out: Path) -> None:
    """Four panels with all runs in them: reward, validation, policy, and the seconds of the first run's phases."""
    os.environ["MPLBACKEND"] = "Agg"                        # a notebook names its own there, which may be missing here
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    (reward, validation), (policy, seconds) = axes
    all_rows = {run: read_metrics(run) for run in runs}
    for run, rows in all_rows.items():
        label = Path(run).name if len(runs) > 1 else None
        (line,) = reward.plot(*series(rows, "critic/rewards/mean"), label=label)
        colour = line.get_color()
        for name in sorted({key for row in rows for key in row if key.startswith("val-core/")}):
            style = "--" if name.endswith("greedy") else ":" if "/acc/best@" in name else "-"
            text = name.removeprefix("val-core/") if run == runs[0] else None    # the colours are the first panel's
            validation.plot(*series(rows, name), style, marker="o", color=colour, label=text)
        policy.plot(*series(rows, "actor/entropy"), color=colour, label="entropy (nats)" if run == runs[0] else None)
        policy.plot(
            *series(rows, "training/rollout_probs_diff_mean"), ":", color=colour,
            label="mean |p_engine - p_trainer|" if run == runs[0] else None,
        )
    first = [row for row in all_rows[runs[0]] if "timing_s/step" in row]
    names = {key for row in first for key in row if key.startswith("timing_s/") and key != "timing_s/step"}
    meanwhile = {"timing_s/gen"} if "timing_s/wait" in names else set()     # of samplers
    phases = sorted(key for key in names - meanwhile if key.count("/") == 1)  # agent_loop/...: of single episodes
    if first and phases:
        steps, values = [row["step"] for row in first], [[row.get(key, 0.0) for row in first] for key in phases]
        seconds.stackplot(steps, values, labels=[key.removeprefix("timing_s/") for key in phases])
    # not all validations are shares: dpo.py's margins, and scores of a task's own, have any sign and size
    are_shares = not any(value < 0 or value > 1 for line in validation.lines for value in line.get_ydata())
    for axis, title in ((reward, "training reward, mean of the step's responses"),
                        (validation, "validation accuracy" if are_shares else "validation"),
                        (policy, "policy"), (seconds, f"seconds of a step by phase ({Path(runs[0]).name})")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    if are_shares:
        validation.set_ylim(0, 1)
    policy.set_yscale("log")
    with replacing(out) as partial:
        figure.savefig(partial, dpi=110)
    plt.close(figure)


def write_page(runs: list[str], out: Path, max_mb: float) -> None:
    """One self-contained file."""
    text = page(page_data(runs, max_mb) | {"version": ""}, connect="'none'")
    with replacing(out) as partial:
        partial.write_bytes(text.encode("utf-8", errors="backslashreplace"))    # a folder's name may be no UTF-8


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new file beside `out`, which takes its place at the end. A link there is never followed, as the folder may be
    somebody else's. Raises ValueError if what is there is not as this tool wrote it."""
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder) / out.name
        yield partial
        partial.write_bytes(marked(partial.read_bytes()))
        check_replaceable(out)
        os.replace(partial, out)


def marked(content: bytes) -> bytes:
    """A page or picture with its own checksum: in a comment at the end, or in a PNG's last chunk of text."""
    text = b"plainrl %08x" % zlib.crc32(content)
    if not content.endswith(END_OF_PNG):
        return content + b"<!-- " + text + b" -->\n"
    chunk = b"tEXtSource\0" + text
    return content.removesuffix(END_OF_PNG) + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(
        ">I", zlib.crc32(chunk)) + END_OF_PNG


def check_replaceable(out: Path) -> None:
    """Raises ValueError if there is a file that this tool did not write, or that was changed since."""
    if not out.is_file() or out.is_symlink():               # a link is replaced, not what it names
        return
    content = out.read_bytes()
    end = END_OF_PNG if content.endswith(END_OF_PNG) else b""
    without = content[: -len(marked(end))]                  # of the same length for all contents
    if marked(without + end) != content:
        raise ValueError(f"{out} would be replaced, and is not as this tool wrote it (or is of an earlier version): "
                         f"move it away, or name another file, --out FILE")


def page(data: dict[str, Any], connect: str) -> str:
    """All text of the runs is in a JSON block, whose `<` are escaped, and is shown as text. Of scripts the browser runs
    only the one whose hash the page names, and the page fetches from nowhere but `connect`."""
    script = f"{(PAGE / 'uplot/uPlot.iife.min.js').read_text()}\n{(PAGE / 'page.js').read_text()}"
    title = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": f"{(PAGE / 'uplot/uPlot.min.css').read_text()}\n{(PAGE / 'page.css').read_text()}",
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "connect": connect,
        "data": to_json(data).replace("<", "\\u003c"),
    }
    template = (PAGE / "page.html").read_text()
    # one pass over the template: what is filled in may itself have {{...}}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def page_data(runs: list[str], max_mb: float, is_watched: bool = False) -> dict[str, Any]:
    """What page.js draws. A run's metrics have one value for each of its steps, null where it was not logged. A page
    with a `version` asks its server for newer data. A run that is watched may not have finished a step."""
    shown, rollouts, prompts, now = [], [], {}, version(runs)
    last_names = [Path(run).resolve().name for run in runs]
    for number, (run, last_name) in enumerate(zip(runs, last_names)):
        has_begun = is_watched and (Path(run) / NOW).is_file() and not has_steps(run)
        rows, health = [] if has_begun else read_metrics(run), HealthCheck()
        warnings = [line for row in rows for line in health.look(int(row["step"]), row)]
        rows, fewer = thinned(rows)
        names = sorted({name for row in rows for name in row} - {"step", CLOCK})
        found, left_out = read_rollouts(Path(run), max_mb / len(runs))
        for row in found:
            prompt = prompts.setdefault((row["prompt"], row["images"]), len(prompts))
            rollouts.append(row | {"run": number, "prompt": prompt, "images": None})
        shown.append({
            "name": last_name if last_names.count(last_name) == 1 else run,
            "flags": read_flags(Path(run) / "config.json"),
            "steps": [row["step"] for row in rows],
            "metrics": {name: [finite(row.get(name)) for row in rows] for name in names},
            "clock": [finite(row[CLOCK]) for row in rows],
            "warnings": warnings[-MAX_WARNINGS:] + [fewer] * bool(fewer),
            "left_out": left_out,
        })
    texts, pictures = [text for text, _ in prompts], [list(images) for _, images in prompts]
    return {"runs": shown, "prompts": texts, "pictures": pictures, "rollouts": rollouts, "version": now}


class Server(http.server.ThreadingHTTPServer):
    """Listens on this machine only, and serves the page of `runs` after `serve_forever`."""

    def __init__(self, runs: list[str], max_mb: float, port: int):
        """Raises ValueError if a run has no metrics yet, or the port is taken."""
        self.runs, self.max_mb = runs, max_mb
        self.data()                                         # it is said now, and later requests are quick
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; choose another one, or 0 for any") from None

    def data(self) -> dict[str, Any]:
        return page_data(self.runs, self.max_mb, is_watched=True)


class Handler(http.server.BaseHTTPRequestHandler):
    """`/` is the page, `/data?VERSION` its data, or an answer without any (204) if VERSION is the newest; `/now` what
    each run does at this moment."""

    server: Server

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in ("localhost", "127.0.0.1"):
            self.send_error(403, "asked for under the name of another site (DNS rebinding)")
        elif self.path == "/":
            self.answer("text/html", page(self.server.data(), connect="'self'"))
        elif self.path == f"/data?{version(self.server.runs)}":
            self.send_response(204)
            self.end_headers()
        elif self.path.startswith("/data?"):
            self.answer("application/json", to_json(self.server.data()))
        elif self.path == "/now":
            self.answer("application/json", to_json([*map(read_now, self.server.runs)]))
        else:
            self.send_error(404)

    def answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        """Say nothing about requests."""


def main(args: Args) -> None:
    if not args.runs:
        raise ValueError("give at least one run folder")
    out = Path(args.out or Path(args.runs[0]) / "report.html")
    if out.suffix not in (".html", ".png"):
        raise ValueError(f"--out {out} must end with .html (the page) or .png (a picture of the curves)")
    if not args.max_mb > 0:
        raise ValueError(f"--max-mb {args.max_mb:g} must be above 0")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port {args.port} must be from 0 to 65535")
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise ValueError(f"{out} is a link or no file, and is not replaced: --out FILE names another one")
    if out.is_dir() or (args.out and not out.parent.is_dir()):
        raise ValueError(f"--out {out} must be a file in a folder that is there")
    if not args.watch:
        check_replaceable(out)
    if args.watch:
        server = Server(list(args.runs), args.max_mb, args.port)
        print(f"http://localhost:{server.server_port} until Ctrl-C", flush=True)
        server.serve_forever()
    elif out.suffix == ".png":
        draw(list(args.runs), out)
        print(f"curves {out}")
    else:
        write_page(list(args.runs), out, args.max_mb)
        print(f"report {out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ValueError as error:
        exit_with_error(error)
    except KeyboardInterrupt:
        pass                                                # the end of --watch
