"""Headless Chromium for tests, driven over a pipe with its DevTools protocol: no driver, no port, no network.

    python -m tests.tools.browser runs/quickstart/report.html "#tab=rollouts&step=5" docs/page.png ".response.on span"

takes a picture of a page, here with the mouse on a token."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """`with Browser() as page: page.open(file); page.evaluate("document.title")`."""

    def __init__(self, width: int = 1500, height: int = 1000):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.out = os.pipe()
        self.back, from_browser = os.pipe()
        # the browser reads on 3 and writes on 4; the shell puts our pipes there
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"', "browser", CHROMIUM, "--headless",
             "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}",
             "--hide-scrollbars", "--no-first-run", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.unread, self.session, self.events = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def read(self) -> dict:
        while b"\0" not in self.unread:
            chunk = os.read(self.back, 1 << 16)
            assert chunk, "the browser is gone"
            self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\0")
        return json.loads(line)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, file: Path, hash: str = "") -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{file.resolve().as_uri()}{hash}")
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """Of all such elements, hidden ones too."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.textContent)")

    def choose(self, selector: str, value: str) -> None:
        """Pick an entry of a list."""
        self.evaluate(f"""(() => {{ const list = document.querySelector({json.dumps(selector)});
            list.value = {json.dumps(value)}; list.dispatchEvent(new Event("input"));
            list.dispatchEvent(new Event("change")); }})()""")

    def type(self, selector: str, text: str) -> None:
        """Type into a field as a person does."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def point(self, selector: str, click: bool = False) -> None:
        """Move the mouse to the middle of the first such element."""
        box = self.evaluate(f"""(() => {{ const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}}); const box = element.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2]; }})()""")
        where = {"x": box[0], "y": box[1]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """What the page threw, the console's errors, and every address it asked for besides files."""
        self.evaluate("0")
        found = []
        for event in self.events:
            kind, params = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"] + str(params["exceptionDetails"].get("exception")))
            elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif kind == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "about:")):
                found.append(params["request"]["url"])
        return found

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.out)
        os.close(self.back)
        self.folder.cleanup()


if __name__ == "__main__":
    file, address, picture, *selectors = sys.argv[1:]
    with Browser(height=900) as browser:
        browser.open(Path(file), address)
        time.sleep(2)                                                   # until all is drawn
        for selector in selectors:
            browser.point(selector)
        time.sleep(0.5)
        browser.screenshot(Path(picture))
    Image.open(picture).quantize(256).save(picture, optimize=True)      # a third of the size
