"""Where the clients of an agent that exists already find the model (envs/endpoint/clients.py), in real processes beside
a server that stands for the outside: no request may reach it."""

import asyncio
import importlib.util
import json
import socketserver
import threading
from pathlib import Path

import pytest

from tests.envs.scripted import Player

ENDPOINT = "envs/openai_agent.py"
KINDS = '''
import asyncio, json, os, urllib.request
import openai
from openai import AsyncOpenAI, AzureOpenAI, OpenAI

import neighbour

asked = [{"role": "user", "content": "Hello."}]
client, aclient = OpenAI(max_retries=0), AsyncOpenAI(max_retries=0)
azure = AzureOpenAI(api_version="2024-10-21", max_retries=0)
with_key = OpenAI(api_key=os.environ["OPENAI_API_KEY"], max_retries=0).with_options(timeout=20.0)
with_address = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], max_retries=0)
openai.api_key = os.environ["OPENAI_API_KEY"]
KEY, URL = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]

class Agent:
    client = OpenAI(max_retries=0)

    def __init__(self):
        mine = OpenAI(max_retries=0)
        self.closure = lambda: chat(mine)

agent = Agent()

def chat(client):
    return client.chat.completions.create(model="policy", messages=asked).choices[0].message.content

async def achat():
    answer = await aclient.chat.completions.create(model="policy", messages=asked)
    return answer.choices[0].message.content

def over_http():
    body = json.dumps({"model": "policy", "messages": asked}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{URL}/chat/completions", body, headers))
    return json.load(answer)["choices"][0]["message"]["content"]

def anthropics():
    answer = neighbour.anthropic_client().messages.create(model="policy", max_tokens=9, messages=asked)
    return answer.content[0].text

WAYS = {
    "module": lambda: chat(client), "async": lambda: asyncio.run(achat()), "azure": lambda: chat(azure),
    "key": lambda: chat(with_key), "address": lambda: chat(with_address), "openai": lambda: chat(openai),
    "class": lambda: chat(Agent.client), "closure": agent.closure, "http": over_http,
    "neighbour": lambda: chat(neighbour.KEPT["client"]), "made now": lambda: chat(OpenAI()),
    "responses": lambda: client.responses.create(model="policy", input="Hello.").output_text,
    "azure responses": lambda: azure.responses.create(model="policy", input="Hello.").output_text,
    "anthropic": anthropics,
}

def solve(row):
    text = WAYS[row["way"]]()
    return {"score": 1.0, "text": text, "kept": os.environ.get("OUTSIDE_OPENAI_API_KEY", "none")}
'''
NEIGHBOUR = '''
from openai import OpenAI
KEPT = {"client": OpenAI(max_retries=0)}
try:
    import anthropic
    KEPT["anthropic"] = anthropic.Anthropic(max_retries=0)
except ModuleNotFoundError:
    pass
def anthropic_client():
    return KEPT["anthropic"]
'''
WAYS = ["module", "async", "azure", "key", "address", "openai", "class", "closure", "http", "neighbour", "made now",
        "responses", "azure responses"]
if importlib.util.find_spec("anthropic"):
    WAYS.append("anthropic")


class Outside(socketserver.ThreadingTCPServer):
    """Counts who connects."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.num_connections = 0
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def process_request(self, request, client_address):
        self.num_connections += 1
        super().process_request(request, client_address)


@pytest.fixture
def outside(monkeypatch):
    """The user's variables lead there."""
    with Outside() as server:
        for name, value in {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "sk-real",
                            "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "sk-real-too",
                            "AZURE_OPENAI_ENDPOINT": server.url, "AZURE_OPENAI_API_KEY": "sk-real-three",
                            "OPENAI_API_TYPE": "openai"}.items():  # or `openai.chat` refuses to choose
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


def own_texts(ended: dict) -> dict[str, str]:
    """What the agent returned beside its score, or what went wrong."""
    extra = ended.get("extra", ended)
    return {name: value for name, value in extra.items() if isinstance(value, str)}


def folder_of(tmp_path: Path, agent: str) -> str:
    (tmp_path / "agent.py").write_text(agent)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    return str(tmp_path / "agent.py")


def test_clients_of_a_module_reach_their_episode(outside, monkeypatch, tmp_path):
    """Each of many episodes that run at once gets the replies of its own model, whatever kind its client is of."""
    monkeypatch.setenv("AGENT", folder_of(tmp_path, KINDS))
    scripts = [({"way": way, "prompt": []}, [f"{way} {turn}"]) for turn in range(2) for way in WAYS]
    with Player(ENDPOINT) as player:
        ended = player.play_all(scripts)
    texts = [own_texts(message) for message, _ in ended]
    assert texts == [{"text": replies[0], "kept": "sk-real"} for _, replies in scripts]
    assert outside.num_connections == 0


def test_a_file_with_a_client_needs_no_key(monkeypatch, tmp_path):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AGENT", folder_of(tmp_path, f"{IMPORTS}client = OpenAI()\n{SOLVE}"))
    with Player(ENDPOINT) as player:
        ended, said = player.play({"prompt": []}, ["yes"])
    assert ended["score"] == 1.0 and said == ["x"]


IMPORTS = "import os, sys\nimport openai\nfrom openai import AsyncOpenAI, AzureOpenAI, OpenAI\n"
CALL = "client.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'x'}])"
SOLVE = f"def solve(row):\n    {CALL}\n    return 1.0\n"


@pytest.mark.sweep
@pytest.mark.parametrize("line", [
    "client = OpenAI(base_url='THERE/v1', api_key='own')",
    "client = AsyncOpenAI(base_url='THERE/v1')",
    "client = AzureOpenAI(azure_endpoint='THERE', api_key='own', api_version='2024-10-21')",
    "client = OpenAI().with_options(base_url='THERE/v1')",
    "os.environ['OPENAI_BASE_URL'] = 'THERE/v1'; client = OpenAI()",
    "os.environ.update(OPENAI_API_KEY='own'); client = OpenAI()",
    f"client = OpenAI(base_url='THERE/v1'); {CALL}",
])
def test_clients_of_other_servers_are_refused_before_they_ask(outside, monkeypatch, tmp_path, line):
    monkeypatch.setenv("AGENT", folder_of(tmp_path, f"{IMPORTS}{line.replace('THERE', outside.url)}\n{SOLVE}"))
    with pytest.raises(ValueError, match=r"not the model that is trained|another server") as caught:
        Player(ENDPOINT)
    assert str(caught.value).startswith(f"--rollout.episode {ENDPOINT}: AGENT") and str(caught.value).count("\n") == 0
    assert outside.num_connections == 0


@pytest.mark.sweep
@pytest.mark.parametrize(("line", "said"), [
    ("client = OpenAI(base_url='THERE/v1')", "AGENT_OUTSIDE=127.0.0.1 allows it"),
    ("openai.base_url = 'THERE/v1/'; client = openai", "AGENT_OUTSIDE=127.0.0.1 allows it"),
    ("client = OpenAI(api_key='sk-own', max_retries=0)", "not this episode's"),
])
def test_an_episode_asks_no_other_server(outside, monkeypatch, tmp_path, line, said):
    """The same while the agent runs."""
    solve = f"def solve(row):\n    {line.replace('THERE', outside.url)}\n    {CALL}\n    return 1.0\n"
    monkeypatch.setenv("AGENT", folder_of(tmp_path, IMPORTS + solve))
    with Player(ENDPOINT) as player:
        ended, _ = player.play({"prompt": []}, ["yes"])
    assert said in ended["text"] and outside.num_connections == 0


@pytest.mark.sweep
def test_a_judge_of_the_agents_own(monkeypatch, tmp_path):
    """AGENT_OUTSIDE and the variables' former values lead to it; beside it the model is asked."""
    monkeypatch.setenv("AGENT", folder_of(tmp_path, IMPORTS + f'''
judge = OpenAI(base_url=os.environ["OUTSIDE_OPENAI_BASE_URL"], api_key=os.environ["OUTSIDE_OPENAI_API_KEY"])
client = OpenAI()
def solve(row):
    {CALL}
    return {{"score": 0.5, "said": judge.models.list().data[0].id, "key": judge.api_key}}
'''))

    async def serve(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = json.dumps({"object": "list", "data": [{"id": "gpt-judge", "object": "model"}]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()
        writer.close()

    async def play():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            monkeypatch.setenv("OPENAI_BASE_URL", f"http://{host}:{port}/v1")
            monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
            monkeypatch.setenv("AGENT_OUTSIDE", f"example.org {host}:{port}")
            with await asyncio.to_thread(Player, ENDPOINT) as player:
                return await asyncio.to_thread(player.play, {"prompt": []}, ["yes"])

    asked: list[str] = []
    ended, said = asyncio.run(play())
    assert (ended["score"], own_texts(ended)) == (0.5, {"said": "gpt-judge", "key": "sk-real"}) and said == ["x"]
    assert len(asked) == 1 and "Bearer sk-real" in asked[0]


def test_an_agent_that_raises_on_a_reply_that_was_cut_off_is_told_of_the_flag(monkeypatch, tmp_path):
    """As openai-agents does: by default such an episode is dropped, and nothing punishes long replies."""
    monkeypatch.setenv("AGENT", folder_of(tmp_path, f"""{IMPORTS}
client = OpenAI()
def solve(row):
    if {CALL}.choices[0].finish_reason == "length" or row.get("broken"):
        raise RuntimeError("incomplete")
    return 1.0
"""))
    with Player(ENDPOINT) as player:
        cut, broken, good = player.play_all([({"prompt": []}, ["Well ..."]), ({"prompt": [], "broken": 1}, ["yes"]),
                                             ({"prompt": []}, ["yes"])])
    assert "RuntimeError: incomplete\n1 of the model's answers" in cut[0]["text"]
    assert "--reward.on-error zero" in cut[0]["text"]
    assert "RuntimeError: incomplete" in broken[0]["text"] and "--reward.on-error" not in broken[0]["text"]
    assert good[0]["extra"]["endpoint/truncated"] == 0.0


@pytest.mark.sweep
def test_variables_that_the_file_sets_for_itself_stay(outside, monkeypatch, tmp_path):
    """And the endpoint's are the episode's alone: another environment of the same run reads the user's."""
    agent = "import os\nos.environ['AGENTS_OWN'] = 'x'\ndef solve(row): ...\n"
    other = "import os\nasync def episode(chat, row):\n    return {'score': 1.0, 'said': ' '.join(" \
            "[os.environ['OPENAI_API_KEY'], os.environ.get('AGENTS_OWN', '')])}\n"
    (tmp_path / "other.py").write_text(other)
    monkeypatch.setenv("AGENT", folder_of(tmp_path, agent))
    monkeypatch.chdir(Path(__file__).parents[2])
    with Player(f"agent={ENDPOINT},other={tmp_path / 'other.py'}") as player:
        player.processes.start(0, {"row": {}, "messages": [], "tokens_left": 9, "environment": "other"})
        ((_, ended),) = player.processes.events(10.0)
    assert own_texts(ended) == {"said": "sk-real x"}
