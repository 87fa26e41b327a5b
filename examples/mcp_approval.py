"""Call a tool of an MCP server after approval. The server `weather` must be in `tools.mcp_servers` (see README.md)."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

# The label alone refers to a server that the operator configured. To use your own server, add a `server_url`.
tools = [{"type": "mcp", "server_label": "weather", "require_approval": "always"}]
response = client.responses.create(model=MODEL, input="How is the weather in Paris?", tools=tools)

while requests := [item for item in response.output if item.type == "mcp_approval_request"]:
    for request in requests:
        print(f"approve {request.name}({request.arguments}) on {request.server_label}")
    response = client.responses.create(
        model=MODEL,
        tools=tools,
        previous_response_id=response.id,
        input=[{"type": "mcp_approval_response", "approval_request_id": one.id, "approve": True} for one in requests],
    )

for item in response.output:
    if item.type == "mcp_call":
        print(f"{item.name} returned: {item.output}")
print("answer:", response.output_text)
