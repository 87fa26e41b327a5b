"""The objects that the inspector's pages use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp

from ..cache import Cache
from ..jobs import JobService
from ..settings import Settings
from ..settings.groups import UISettings
from ..state import State

if TYPE_CHECKING:
    from ..files.retrieval import Retrieval  # needs numpy


class CreateOnBehalf(Protocol):
    """Creates responses on behalf of owners (see `asgi.on_behalf.OnBehalf`)."""

    @property
    def key_names(self) -> Sequence[str]: ...

    @property
    def has_tenants(self) -> bool: ...

    def create(self, body: bytes, request_id: str, *, key: str = "", tenant: str = "", credential: str = "") -> ASGIApp: ...


@dataclass(frozen=True, slots=True)
class InspectorContext:
    """The objects that the inspector's pages use.

    keys       names of the API keys by owner
    jobs       cancels and deletes responses; None for a worker, whose pages have no actions
    api        creates responses for the page *Try it*; None for a worker
    cache      the response cache; None if it is off
    retrieval  searches vector stores; None if numpy is not installed
    """

    state: State
    settings: Settings
    keys: Mapping[str, str] = field(default_factory=dict)
    jobs: JobService | None = None
    api: CreateOnBehalf | None = None
    cache: Cache | None = None
    retrieval: Retrieval | None = None

    @property
    def ui(self) -> UISettings:
        return self.settings.ui

    @property
    def shows_content(self) -> bool:
        return self.ui.mode == "content"

    def owner_named(self, text: str) -> str:
        """Return the owner of the API key with the name `text`, or `text` itself if there is no such key."""
        return next((owner for owner, name in self.keys.items() if name == text), text)

    @property
    def can_act(self) -> bool:
        return self.ui.actions and self.jobs is not None
