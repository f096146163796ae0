"""A remote sandbox: SandboxFusion's interface, answered by the real sandbox."""

import http.server
import json
import socket
import sys
import threading
from typing import ClassVar

import pytest

from rewards import code
from rewards.sandbox import sandbox
from rewards.sandbox.sandbox import Limits, run
from tests.rewards.jail_tools import needs_isolation
from tests.rewards.test_code import ADD, ASSERT, CALL, SUMS

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the jail is Linux's"),
              pytest.mark.usefixtures("nothing_is_left")]


class SandboxFusion(http.server.BaseHTTPRequestHandler):
    """POST /run_code of SandboxFusion (sandbox/server/sandbox_api.py there), answered by the real sandbox."""
    seen: ClassVar[list[dict]] = []
    busy = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if SandboxFusion.busy:
            SandboxFusion.busy -= 1
            self.send_error(503)
            return
        assert self.path == "/run_code"
        assert body["language"] == "python"
        if body["code"] == "broken":
            failed = {"status": "Error", "execution_time": None, "return_code": None, "stdout": None, "stderr": None}
            answer = {"status": "SandboxError", "message": "no pods", "compile_result": None, "run_result": failed}
        else:
            result = run(body["code"], body["stdin"],
                         Limits(timeout_s=body["run_timeout"], memory_mb=body["memory_limit_MB"], threads=8),
                         forks=True)
            status = "TimeLimitExceeded" if result.exit_code is None else "Finished"
            answer = {"status": "Success" if result.exit_code == 0 else "Failed", "message": "", "compile_result": None,
                      "run_result": {"status": status, "execution_time": 0.1, "return_code": result.exit_code,
                                     "stdout": result.stdout, "stderr": result.stderr}, "files": {}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.HTTPServer(("127.0.0.1", 0), SandboxFusion) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/run_code"
        httpd.shutdown()
        thread.join()


@pytest.mark.sweep
@needs_isolation
def test_a_remote_sandbox_gives_the_same_scores(server):
    for response, truth in ((ADD, SUMS), ("print(3)", SUMS), ("```python\ndef f(a, b): return [*a, b]\n```", CALL),
                            ("```python\nwhile True: pass\n```", SUMS), ("1 +", SUMS),
                            ("```python\ndef f(x): return 2\n```", ASSERT)):
        here, there = (code.compute_score("apps", response, truth, timeout_s=1.0 if "while" in response else 20.0,
                                          total_s=60.0, memory_mb=300, sandbox_fusion_url=url)
                       for url in (None, server))
        assert here == there
    assert SandboxFusion.seen[0]["memory_limit_MB"] == 300
    assert set(SandboxFusion.seen[0]) == {"code", "stdin", "language", "compile_timeout", "run_timeout",
                                          "memory_limit_MB", "files", "fetch_files"}


@needs_isolation
def test_a_remote_sandbox_that_fails_is_an_error_and_never_a_score(server):
    SandboxFusion.busy = 2
    assert sandbox.run_remote(server, "print(7)").stdout == "7\n"            # the third attempt
    SandboxFusion.busy = 3
    with pytest.raises(RuntimeError, match=r"503.*attempt 3 of 3"):
        sandbox.run_remote(server, "print(7)")
    assert SandboxFusion.busy == 0
    with pytest.raises(RuntimeError, match="SandboxError: no pods"):
        sandbox.run_remote(server, "broken")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RuntimeError, match=r"sandbox server .*refused"):
        sandbox.run_remote(f"http://127.0.0.1:{port}/run_code", "print(7)")
