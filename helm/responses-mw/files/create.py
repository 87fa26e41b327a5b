"""The helm test: request a response from the model through the Service, then read, continue and delete it."""

import os
import sys

import httpx

URL, MODEL, KEY = (os.environ.get(name, "") for name in ("URL", "MODEL", "API_KEY"))


def answered(client: httpx.Client, method: str, path: str, body: dict | None = None) -> dict:
    answer = client.request(method, path, json=body)
    if answer.is_error:
        sys.exit(f"{method} {path}: {answer.status_code} {answer.text}")
    return answer.json()


def create(client: httpx.Client, model: str, **given: str) -> dict:
    response = answered(client, "POST", "/v1/responses", {"model": model, "max_output_tokens": 512, **given})
    if response["status"] not in ("completed", "incomplete"):
        sys.exit(f"{response['id']} is {response['status']}: {response.get('error')}")
    if not response["store"]:
        sys.exit(f"{response['id']} was answered but not stored: Redis is unavailable or full")
    return response


headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
with httpx.Client(base_url=URL, headers=headers, timeout=300, trust_env=False) as client:
    model = MODEL or answered(client, "GET", "/v1/models")["data"][0]["id"]
    first = create(client, model, input="Say hello.")
    read = answered(client, "GET", f"/v1/responses/{first['id']}")
    if read["output"] != first["output"]:
        sys.exit(f"{first['id']} has a different output in the answer than in the stored response")
    second = create(client, model, input="Say it again.", previous_response_id=first["id"])
    for response in (second, first):
        answered(client, "DELETE", f"/v1/responses/{response['id']}")
print(f"{model} answered, and its answer was stored, read, continued and deleted")
