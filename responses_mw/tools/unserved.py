"""Hosted tools that a request offers, but that this server does not serve: omit them, or refuse the request.

Some clients declare hosted tools in every request. A tool in the setting `tools.omitted` is therefore not offered to the model,
unless the `tool_choice` names it. All other unserved tools are errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from ..protocol import checks
from ..protocol.tool_kinds.registry import CODE_INTERPRETER, FILE_SEARCH, UNSERVED, WEB_SEARCH
from ..protocol.types import Tool
from ..settings.groups import SearchSettings, ToolSettings

logger = logging.getLogger(__name__)

_DATE = re.compile(r"_\d{4}_\d{2}_\d{2}\Z")
"""A date at the end of a type, such as `web_search_2025_08_26`. The setting contains the type without the date."""
_NO_SEARCH = "this server has no web search; its operator can configure one (setting 'search.provider')."
_NO_STORES = "this server has no vector stores: they need Redis, the setting 'files.enabled' and the extra 'files'."
_NO_SANDBOX = "no sandbox is configured (setting tools.sandbox_url)."


class UnservedTools:
    """The types of tools that this server does not serve, with the reasons."""

    def __init__(
        self, settings: ToolSettings, search: SearchSettings, *, has_stores: bool = False, forwards: bool = False
    ) -> None:
        """If `forwards` is true, the upstream serves the types that this server could serve."""
        self._omitted = frozenset(settings.omitted)
        self._reasons = {type_: f"tools of type '{type_}' are not supported." for type_ in UNSERVED.types}
        if search.provider == "none" and not forwards:
            self._reasons |= dict.fromkeys(WEB_SEARCH.types, _NO_SEARCH)
        if not (has_stores or forwards):
            self._reasons |= dict.fromkeys(FILE_SEARCH.types, _NO_STORES)
        if settings.sandbox_url is None and not forwards:
            self._reasons |= dict.fromkeys(CODE_INTERPRETER.types, _NO_SANDBOX)
        self._logged: set[str] = set()

    def types(self, tools: Sequence[Tool]) -> list[str]:
        """Return the types of the `tools` that are not supported."""
        return [tool["type"] for tool in tools if not self.serves(tool)]

    def serves(self, tool: Tool) -> bool:
        """Return whether the server, the upstream or the client executes `tool`."""
        return tool["type"] not in self._reasons

    def check(self, tools: Sequence[Tool], choice: Any) -> None:
        """Raise `BadRequest` if an unserved tool may not be omitted. Log each type that is omitted, once."""
        for index, tool in enumerate(tools):
            if not self.serves(tool) and _DATE.sub("", tool["type"]) not in self._omitted:
                checks.unsupported(f"tools[{index}].type", self._reasons[tool["type"]])
        types = self.types(tools)
        if not types:
            return
        self._check_choice(choice, tools)
        for type_ in set(types) - self._logged:
            self._logged.add(type_)
            logger.warning("requests offer a tool that the model does not get (tools.omitted): %s", self._reasons[type_])

    def _check_choice(self, choice: Any, tools: Sequence[Tool]) -> None:
        if isinstance(choice, str):
            named = self.types(tools) if choice == "required" and not any(map(self.serves, tools)) else []
        else:
            named = self.types(choice.get("tools", [choice]))
        if named:
            checks.unsupported("tool_choice", self._reasons[named[0]])
