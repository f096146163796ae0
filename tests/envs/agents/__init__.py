"""Agents that know nothing of the trainer, for envs/openai_agent.py."""
