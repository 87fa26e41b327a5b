"""The operations of the Responses and Conversations APIs, each a thin endpoint: read, check, do, reply."""

from .table import Routes

__all__ = ["Routes"]
