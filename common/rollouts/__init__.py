"""From prompts to scored responses: episodes, scoring, steps in flight, turns, validation, what is recorded."""
