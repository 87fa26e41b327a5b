"""Built-in embeddings: the vector of a text is the mean of the static vectors of its tokens. No model runs.

`static.npz` has the vectors of WordLlama 0.4.0.post1 (`l2_supercat_256`, MIT license, see `LICENSE.wordllama`), which
`scripts/embedding-data` has reduced from float16 to int8. This halves the file and changes no ranking in the tests. The file is
part of this package, because WordLlama has wheels for few platforms only, and depends on twenty packages.

On one core, a text of 60 characters takes about 15 us, and loading the file 40 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tasks import MAX_INLINE_BYTES, by_size
from .base import BUILTIN, Embedder, NoEmbedding
from .tokenizer import Tokenizer
from .vector import Vector

DIMENSION = 256
_COST = 64  # a character costs as much time as this many bytes of JSON
_FIRST_BYTE = 3  # the id of the token of byte 0, after the three special tokens


class StaticEmbedder(Embedder):
    """The built-in embeddings. The first call of `embed` loads the data."""

    model = BUILTIN
    space = "static1"
    dimension = DIMENSION

    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        # Loading the data takes as long as embedding a large text, so it also runs in a thread.
        size = sum(map(len, texts)) * _COST if _table.cache_info().currsize else MAX_INLINE_BYTES + 1
        return await by_size(size, _embed, texts)


class _Table(NamedTuple):
    tokenizer: Tokenizer
    vectors: NDArray[np.int8]
    scales: NDArray[np.float32]


@cache
def _table() -> _Table:
    with (files(__package__) / "static.npz").open("rb") as file, np.load(file, allow_pickle=False) as data:
        vocabulary = data["vocabulary"].tobytes().decode().split("\n")
        return _Table(Tokenizer(vocabulary, _FIRST_BYTE), data["vectors"], data["scales"].astype(np.float32))


def count_tokens(text: str) -> int:
    """Return the number of tokens in a text, without special tokens."""
    return len(_table().tokenizer.encode(text))


def _embed(texts: Sequence[str]) -> list[Vector]:
    return [_vector(_table(), text) for text in texts]


def _vector(table: _Table, text: str) -> Vector:
    ids = table.tokenizer.encode(text)
    # The sum has the same direction as the mean.
    total: Vector = table.scales[ids] @ table.vectors[ids].astype(np.float32)
    length = np.linalg.norm(total)
    if not length:
        raise NoEmbedding("the text is blank")
    return total / length
