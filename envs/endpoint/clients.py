"""Where an agent's clients find the episode's server, also those that its file makes as it is imported.

The file is imported once, before any episode has a server. What it makes then gets the address and the key of a
placeholder, where nothing can listen; in an episode's process whatever connects to the placeholder reaches the
episode's server. So it does not matter which library a client belongs to, or where the file keeps it.
"""

import importlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

LOOPBACK = "127.0.0.1"
KEPT = "OUTSIDE_"  # before the names of variables that the endpoint takes: their values from before
NO_PROXY = ("NO_PROXY", "no_proxy")
SECRETS = ("ANTHROPIC_AUTH_TOKEN", "AZURE_OPENAI_AD_TOKEN")  # clients would send these beside or instead of the key
PACKAGES = ("openai", "anthropic")


def variables_of(url: str, key: str) -> dict[str, str]:
    """The environment variables that clients read, for a server at `url`. Azure's are among them where they are set
    anyway: beside OpenAI's they make `openai.chat` ambiguous."""
    azure = {"AZURE_OPENAI_ENDPOINT": url, "AZURE_OPENAI_API_KEY": key}
    hosts = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK]))
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key,
    } | (azure if os.environ.keys() & {*azure, "AZURE_OPENAI_AD_TOKEN"} else {}) | dict.fromkeys(NO_PROXY, hosts)


def set_variables(url: str, key: str) -> dict[str, str]:
    """Set what clients read. The values from before, which an agent's own judge may need, are kept under names that
    begin with OUTSIDE_. Returns what was set."""
    variables = variables_of(url, key)
    for name in {*variables, *SECRETS} - {*NO_PROXY}:
        if name in os.environ:
            os.environ.setdefault(KEPT + name, os.environ[name])
    for name in SECRETS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    return variables


class Placeholder:
    """Stands for the episode's server where there is no episode yet."""

    def __init__(self, agent: str, outside: str):
        """`agent` names the agent in errors. `outside`: HOST or HOST:PORT of servers that its clients may ask beside
        the model that is trained, with spaces between them."""
        self.agent = agent
        self.outside = outside.split()
        self.socket = socket.socket()
        self.socket.bind((LOOPBACK, 0))  # it does not listen: connections are refused, and nobody else gets the port
        self.address = self.socket.getsockname()
        self.addresses = [self.address]
        self.key = secrets.token_urlsafe(32)
        self.is_watching = False
        for package in filter(find_spec, PACKAGES):
            client = importlib.import_module(f"{package}._base_client").BaseClient
            client.__init__ = self.checking(client.__init__)

    @contextmanager
    def imports(self) -> Iterator[None]:
        """The agent's file is imported in this block. Raises ValueError if the file sets the variables itself, for then
        its clients have found another server."""
        before = dict(os.environ)
        variables = set_variables(f"http://{LOOPBACK}:{self.address[1]}", self.key)
        self.is_watching = True
        try:
            yield
            changed = [name for name, value in variables.items() if os.environ.get(name) != value]
        finally:
            self.is_watching = False
            for name in (*variables, *SECRETS):  # another environment of the same run may read them
                os.environ.pop(name, None)
                os.environ.update({name: before[name]} if name in before else {})
        if changed:
            raise ValueError(f"{self.agent} sets the environment variable {', '.join(changed)} as it is imported, so "
                             f"that its clients ask another server than the model that is trained: leave it out "
                             f"(load_dotenv() keeps what is set, load_dotenv(override=True) does not)")

    def leads_to(self, url: str, key: str) -> None:
        """From here on, in the episode's process, clients reach the server at `url`, whenever they were made."""
        host, port = url.removeprefix("http://").split(":")
        there = (host, int(port))
        self.addresses.append(there)
        self.is_watching = True
        set_variables(url, key)

        def leading(connect: Callable) -> Callable:
            return lambda sock, address: connect(sock, there if address == self.address else address)

        socket.socket.connect = leading(socket.socket.connect)  # type: ignore[method-assign]
        socket.socket.connect_ex = leading(socket.socket.connect_ex)  # type: ignore[method-assign]

    def checking(self, make: Callable) -> Callable:
        """The constructor of OpenAI's or Anthropic's clients, which refuses one of another server before it sends
        anything."""
        def checked(client: Any, *arguments: Any, **options: Any) -> None:
            make(client, *arguments, **options)
            host, port = client.base_url.host, client.base_url.port
            is_known = (host, port) in self.addresses or host in self.outside or f"{host}:{port}" in self.outside
            if self.is_watching and not is_known:
                raise ValueError(f"{self.agent} makes a client of {client.base_url}, which is not the model that is "
                                 f"trained: leave its address out, then the environment says it; if it is a judge or "
                                 f"the like, the environment variable AGENT_OUTSIDE={host} allows it")

        return checked
