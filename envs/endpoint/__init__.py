"""A server with the forms of OpenAI's and Anthropic's APIs, whose model is an episode's: see server.py."""
