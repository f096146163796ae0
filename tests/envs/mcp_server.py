"""A server of tools over standard input and output, for test_envs.py."""

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Never works."""
    raise ValueError("out of order")


if __name__ == "__main__":
    server.run()
