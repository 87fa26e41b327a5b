"""Continue a stored response, fork the chain, and list what the model was given."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

first = client.responses.create(model=MODEL, input="My favourite colour is teal.")
second = client.responses.create(
    model=MODEL,
    input="What is my favourite colour?",
    previous_response_id=first.id,
    instructions="Answer in one sentence.",  # not inherited: each request sets its own
)
print("chain:", second.output_text)

# Any stored response can be continued, any number of times. This fork has not seen the question above.
fork = client.responses.create(model=MODEL, input="My favourite number is 7.", previous_response_id=first.id)
answer = client.responses.create(model=MODEL, input="What is my favourite number?", previous_response_id=fork.id)
print("fork:", answer.output_text)

items = client.responses.input_items.list(second.id, order="asc")
print("the model was given", [item.type for item in items])

client.responses.delete(first.id)  # responses that continue it keep working
again = client.responses.create(model=MODEL, input="What is my favourite colour?", previous_response_id=second.id)
print("after the delete:", again.output_text)
