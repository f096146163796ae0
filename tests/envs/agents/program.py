"""A program of its own, which streams from /v1/responses. AGENT="python tests/envs/agents/program.py" """

import json
import os
import sys

from openai import OpenAI

row = json.loads(os.environ["ROW"])
client = OpenAI()
with client.responses.stream(model="policy", input=row["prompt"], max_output_tokens=24) as stream:
    for event in stream:
        if event.type in ("response.completed", "response.incomplete"):
            first = event.response
second = client.responses.create(model="policy", input="Again, shorter.", previous_response_id=first.id,
                                 max_output_tokens=24)
print("a program may print what it likes")
print("and complain", file=sys.stderr)
print(json.dumps({"score": -len(second.output_text) / 100, "acc": 0.0}))
