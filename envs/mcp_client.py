"""Tools of an MCP server (Model Context Protocol), which runs as a process beside each episode.

    MCP_SERVER="python my_server.py"
    --rollout.episode envs/mcp_client.py --rollout.tool-parser hermes

The environment variable MCP_SERVER is a command that talks MCP on standard input and output, or the URL of a server.
The command gets PATH, HOME and TMPDIR, and none of the trainer's other variables: `env KEY=... python my_server.py`.
The last reply is scored by the reward function of the row's data_source, or by --reward.function.
"""

import os
import shlex
from collections.abc import Callable

import mcp

SERVER = os.environ.get("MCP_SERVER", "")
if not SERVER:
    raise ValueError("--rollout.episode envs/mcp_client.py: the environment variable MCP_SERVER names no server")


async def episode(chat, row):
    """Returns the last reply, without calls: its text is scored."""
    command, *arguments = shlex.split(SERVER)
    is_url = command.startswith(("http://", "https://"))
    process = mcp.StdioServerParameters(command=command, args=arguments, env={"TMPDIR": os.environ["TMPDIR"]})
    server = command if is_url else process
    async with mcp.Client(server) as client:
        chat.tools = [tool_of(client, tool) for tool in (await client.list_tools()).tools]
        text = await chat.reply()
        while chat.tool_calls:
            results = await chat.call_tools()
            text = await chat.reply(*results)
    return text or ""


def tool_of(client: mcp.Client, tool: mcp.Tool) -> Callable:
    """A tool of the server as a function. Its schema is the server's."""

    async def call(**arguments) -> str | list:
        result = await client.call_tool(tool.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        if not any(part.type == "image" for part in result.content):
            return text
        return [part.text if part.type == "text" else {"type": "image", "data": part.data}
                for part in result.content if part.type in ("text", "image")]

    call.__name__ = tool.name
    call.schema = {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }
    return call
