"""Create several responses over one WebSocket. With `store=False`, a response can be continued only on its own connection."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

previous = None
with client.responses.connect() as connection:
    for text in ("My favourite fruit is a plum.", "What is my favourite fruit?", "What is 2 + 3?"):
        connection.response.create(model=MODEL, input=text, previous_response_id=previous, store=False)
        for event in connection:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.completed":
                previous = event.response.id
                break
            elif event.type in ("error", "response.failed", "response.incomplete"):
                raise SystemExit(event.to_json())
        print()
