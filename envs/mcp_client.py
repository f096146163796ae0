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

try:
    from mcp import Client, StdioServerParameters, Tool, stdio_client, types
except ImportError as error:                                # mcp 1 has no Client
    raise ValueError(f"--rollout.episode envs/mcp_client.py: mcp 2 is not installed ({error}); run `pip install "
                     f"mcp==2.3.0`") from None

SERVER = os.environ.get("MCP_SERVER", "")
if not SERVER:
    raise ValueError("--rollout.episode envs/mcp_client.py: the environment variable MCP_SERVER names no server")


async def episode(chat, row):
    """Returns the last reply, without calls: its text is scored."""
    command, *arguments = shlex.split(SERVER)
    is_url = command.startswith(("http://", "https://"))
    process = StdioServerParameters(command=command, args=arguments, env={"TMPDIR": os.environ["TMPDIR"]})
    server = command if is_url else stdio_client(process)  # mcp before 2.3 takes no bare process
    async with Client(server) as client:
        chat.tools = [tool_of(client, tool) for tool in await tools_of(client)]
        text = await chat.reply()
        while chat.tool_calls:
            results = await chat.call_tools()
            text = await chat.reply(*results)
    return text or ""


async def tools_of(client: Client) -> list[Tool]:
    """All tools of the server, which may list them in several pages."""
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def tool_of(client: Client, tool: Tool) -> Callable:
    """A tool of the server as a function. Its schema is the server's."""

    async def call(**arguments) -> str | list | dict:
        result = await client.call_tool(tool.name, arguments)
        parts = [shown(part) for part in result.content]
        texts = [part for part in parts if isinstance(part, str)]
        if result.is_error:
            raise RuntimeError("\n".join(texts))
        if not parts and result.structured_content is not None:
            return result.structured_content
        return "\n".join(texts) if len(texts) == len(parts) else parts

    call.__name__ = tool.name
    call.schema = {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
    }
    return call


def shown(part: types.ContentBlock) -> str | dict:
    """What the model sees of a part of a result: a text or a picture. It is told what it cannot see."""
    match part:
        case types.TextContent():
            return part.text
        case types.ImageContent():
            return {"type": "image", "data": part.data}
        case types.ResourceLink():
            return f"{part.title or part.name}: {part.uri}"
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource(resource=resource):
            return f"[a file that cannot be shown, {resource.mime_type}: {resource.uri}]"
    return f"[{part.type} that cannot be shown]"
