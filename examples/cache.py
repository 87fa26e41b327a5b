"""Ask the same question twice. The second answer comes from the cache, without a call of the model."""

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "demo")
client = OpenAI()

for attempt in ("first", "second"):
    answer = client.responses.with_raw_response.create(
        model=MODEL,
        input="What is 6 times 7?",
        extra_headers={"X-Responses-Cache": "exact; ttl=60"},  # or extra_body={"cache": {"mode": "exact", "ttl": 60}}
    )
    response = answer.parse()
    print(f"{attempt}: {response.output_text} [{answer.headers['x-responses-cache']}] {response.id}")
