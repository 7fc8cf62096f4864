"""What verifying one kernel says: ``Accepted | Checked | Rejected``, told apart by ``status``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rejected(_Record):
    """A candidate that failed a gate: the reason for the author, and the evidence."""

    status: Literal["rejected"] = "rejected"
    gate: str
    code: str
    message: str
    line: int | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
