"""Start a background response, lose the connection, resume the stream, and cancel another response."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

text, seen, response_id = "", -1, ""
stream = client.responses.create(model=MODEL, input="Count to 30.", background=True, stream=True)
for event in stream:
    seen = event.sequence_number
    if event.type == "response.created":
        response_id = event.response.id
    elif event.type == "response.output_text.delta":
        text += event.delta
        if len(text) > 20:
            break  # the connection is lost; the response continues
stream.close()
print(f"lost the stream after event {seen}: {text}")

# Any replica can resume it after the last event that the client has seen.
for event in client.responses.retrieve(response_id, stream=True, starting_after=seen):
    if event.type == "response.output_text.delta":
        text += event.delta
print("resumed:", text)
assert text == client.responses.retrieve(response_id).output_text

long = client.responses.create(model=MODEL, input="Count to 9999.", background=True)
print(long.status, "->", client.responses.cancel(long.id).status)
