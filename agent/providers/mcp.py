"""The provider for runs that an MCP client authors through ``coda-agent mcp``."""

from __future__ import annotations

from dataclasses import dataclass

from coda_agent.agent.providers import ProviderError, Question, Turn, Usage
from coda_agent.agent.providers.spec import ProviderSpec

NAME = "mcp"


@dataclass
class Submission:
    """A provider with one answer, which the client submitted before the loop asks for a turn. ``answer`` is
    "" if the client submitted no answer. ``taken``: whether the loop has read the answer."""

    answer: str = ""
    author: str = NAME
    taken: bool = False

    def next_turn(self, question: Question) -> Turn:
        """Return the answer. Its cost counts as zero, because only the client knows the cost. Raises
        ProviderError if there is no answer."""
        if not self.answer:
            raise ProviderError("the author of this run is an MCP client", "let it verify another source")
        self.taken = True
        return Turn(self.answer, Usage(), self.author, "end_turn")


SPEC = ProviderSpec(name=NAME, make=Submission, offered=False, counted=False)
