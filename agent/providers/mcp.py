"""The provider for runs that an MCP client authors through ``coda-agent mcp``."""

from __future__ import annotations

from dataclasses import dataclass

from coda_agent.agent.providers import ProviderError, Question, Turn, Usage
from coda_agent.agent.providers.spec import ProviderSpec

NAME = "mcp"


@dataclass
class Submission:
    """One answer that arrives before the loop asks for it; or none. ``taken``: whether the loop has asked."""

    answer: str = ""
    author: str = NAME
    taken: bool = False
    name: str = NAME

    def next_turn(self, question: Question) -> Turn:
        """Return the answer. Only the client knows its cost, which counts as zero. Raises ProviderError
        without an answer."""
        if not self.answer:
            raise ProviderError("the author of this run is an MCP client", "let it verify another source")
        self.taken = True
        return Turn(self.answer, Usage(), self.author, "end_turn")


SPEC = ProviderSpec(name=NAME, make=Submission, offered=False, counted=False)
