"""Uploaded files (`library`, `storage`), vector stores (`vector_stores`, `ingestion`) and the search in them (`retrieval`)."""

from .library import FileLibrary

__all__ = ["FileLibrary"]
