"""Names of attributes and metrics in OpenTelemetry's semantic conventions. All other modules use these constants.

- `GenAI`, `GenAIMetric`: https://github.com/open-telemetry/semantic-conventions-genai. It has no release, so the names are from
  its main branch in October 2026. Their status is Development, so they may change.
- `Own`: attributes of this server that no convention covers.
- All other names: semantic conventions 1.44.0. The names in `Messaging` may change too.
"""

from __future__ import annotations

SCOPE = "responses_mw"
SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
"""URL of the generative AI schema, which is based on the schema of semantic conventions 1.44.0."""

ERROR_TYPE = "error.type"
CANCELLED = "cancelled"
"""The value of `error.type` of a tool call that was cancelled, which is no failure of the tool."""
EXCEPTION_EVENT, EXCEPTION_MESSAGE, EXCEPTION_TYPE = "gen_ai.client.operation.exception", "exception.message", "exception.type"
SERVER_ADDRESS, SERVER_PORT = "server.address", "server.port"


class GenAI:
    CONVERSATION_ID = "gen_ai.conversation.id"
    INPUT_MESSAGES = "gen_ai.input.messages"
    OPERATION = "gen_ai.operation.name"
    OUTPUT_MESSAGES = "gen_ai.output.messages"
    OUTPUT_TYPE = "gen_ai.output.type"
    PROVIDER = "gen_ai.provider.name"
    MODALITY = "gen_ai.token.modality"
    # the request
    MODEL = "gen_ai.request.model"
    PREVIOUS_RESPONSE_ID = "gen_ai.request.previous_response.id"
    REASONING_LEVEL = "gen_ai.request.reasoning.level"
    STOP_SEQUENCES = "gen_ai.request.stop_sequences"
    STREAM = "gen_ai.request.stream"
    # the response
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
    # tools
    TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
    TOOL_CALL_ID = "gen_ai.tool.call.id"
    TOOL_NAME = "gen_ai.tool.name"
    TOOL_RESULT = "gen_ai.tool.call.result"
    TOOL_TYPE = "gen_ai.tool.type"


REQUEST_ATTRIBUTES = {
    name: f"gen_ai.request.{name}"
    for name in ("frequency_penalty", "max_tokens", "presence_penalty", "seed", "temperature", "top_k", "top_p")
} | {
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "reasoning_effort": GenAI.REASONING_LEVEL,
}
"""Maps the members of a chat or response request to attributes of the conventions."""


class GenAIMetric:
    TOOL_DURATION = "gen_ai.execute_tool.duration"
    DURATION = "gen_ai.client.inference.duration"
    OPERATION_DURATION = "gen_ai.client.operation.duration"
    TIME_TO_FIRST_CHUNK = "gen_ai.client.inference.time_to_first_chunk"
    CACHED_TOKENS = "gen_ai.client.inference.usage.cache_read.input_tokens"
    INPUT_TOKENS = "gen_ai.client.inference.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.client.inference.usage.output_tokens"
    REASONING_TOKENS = "gen_ai.client.inference.usage.reasoning.output_tokens"


class HTTP:
    CLIENT_ADDRESS = "client.address"
    METHOD = "http.request.method"
    USER_AGENT = "user_agent.original"
    PATH = "url.path"
    PROTOCOL_VERSION = "network.protocol.version"
    ROUTE = "http.route"
    SCHEME = "url.scheme"
    SERVER_ACTIVE = "http.server.active_requests"
    SERVER_DURATION = "http.server.request.duration"
    STATUS = "http.response.status_code"


class DB:
    DURATION = "db.client.operation.duration"
    BATCH_SIZE = "db.operation.batch.size"
    NAMESPACE = "db.namespace"
    OPERATION = "db.operation.name"
    PROCEDURE = "db.stored_procedure.name"
    SYSTEM = "db.system.name"


class Messaging:
    DESTINATION = "messaging.destination.name"
    MESSAGE_ID = "messaging.message.id"
    OPERATION = "messaging.operation.name"
    OPERATION_TYPE = "messaging.operation.type"
    SYSTEM = "messaging.system"


class Own:
    ATTEMPT = "responses_mw.ingestion.attempt"
    CACHE_RESULT = "responses_mw.cache.result"
    CAUSE = "responses_mw.cause"
    CHUNKS = "responses_mw.ingestion.chunks"
    KEY = "responses_mw.key"
    MCP_SERVER = "responses_mw.mcp.server"
    OUTCOME = "responses_mw.outcome"
    OWNER = "responses_mw.owner"
    REQUEST_ID = "responses_mw.request.id"
    RESPONSE_ID = "responses_mw.response.id"  # the id of the response that a turn or a tool call belongs to
    TOOL_KIND = "responses_mw.tool.kind"
    TOOL_SERVER = "responses_mw.tool.server"
    UPSTREAM = "responses_mw.upstream.name"
    VECTOR_STORE = "responses_mw.vector_store.id"
    UPSTREAM_REQUEST_ID = "responses_mw.upstream.request.id"
