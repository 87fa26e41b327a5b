"""OpenAI's Responses API in front of a Chat Completions deployment."""
