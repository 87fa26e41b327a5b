"""Store a conversation on the server. Each response appends its input and output to the conversation."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

conversation = client.conversations.create(
    items=[{"type": "message", "role": "user", "content": "My name is Ada."}],
    metadata={"topic": "introductions"},
)
response = client.responses.create(model=MODEL, input="What is my name?", conversation=conversation.id)
print("answer:", response.output_text)

items = client.conversations.items.list(conversation.id, order="asc").data
for item in items:
    print(f"{item.id[:4]}... {item.type}")

# Items can also be added and deleted explicitly.
client.conversations.items.create(conversation.id, items=[{"type": "message", "role": "user", "content": "My city is London."}])
client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
response = client.responses.create(model=MODEL, input="What is my city?", conversation=conversation.id)
print("answer:", response.output_text)

client.conversations.delete(conversation.id)  # its responses can still be retrieved
