"""A server of tools over standard input and output, for test_envs.py. It lists one tool a page."""

import base64
import io

from mcp.server import MCPServer
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextResourceContents,
)
from PIL import Image


class Pages(MCPServer):
    async def _handle_list_tools(self, ctx, params):
        tools = await self.list_tools()
        place = int(params.cursor) if params and params.cursor else 0
        is_last = place == len(tools) - 1
        return ListToolsResult(tools=tools[place : place + 1], next_cursor=None if is_last else str(place + 1))


server = Pages("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Never works."""
    raise ValueError("out of order")


@server.tool()
def see() -> ImageContent:
    """A red picture."""
    file = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(file, "PNG")
    return ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png")


@server.tool()
def read() -> list[ContentBlock]:
    """Files and what else is no text."""
    uri = "file:///notes"
    return [
        EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, text="Buy milk.")),
        ResourceLink(type="resource_link", name="notes", uri=uri),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri=uri, blob="AAAA", mime_type="font/ttf")),
        AudioContent(type="audio", data="AAAA", mime_type="audio/wav"),
    ]


@server.tool()
def table() -> CallToolResult:
    """A result without content."""
    return CallToolResult(content=[], structured_content={"rows": [1, 2]})


if __name__ == "__main__":
    server.run()
