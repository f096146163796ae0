"""A server of tools over standard input and output, for test_envs.py."""

import base64
import io

from mcp.server import MCPServer
from mcp.types import ImageContent
from PIL import Image

server = MCPServer("numbers")


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


if __name__ == "__main__":
    server.run()
