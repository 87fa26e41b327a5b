"""Fixtures: an embedding server."""

from __future__ import annotations

import pytest

from tests.support.embeddings import EmbeddingServer


@pytest.fixture
def embedding_server() -> EmbeddingServer:
    return EmbeddingServer()
