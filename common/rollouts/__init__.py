"""From prompts to scored responses: episodes, scoring, steps in flight, validation, what is recorded."""
