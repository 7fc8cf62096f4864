"""Optional packages, and the extra of pyproject.toml that installs each package."""

from __future__ import annotations

EXTRAS = {  # maps an imported module to the extra that installs it
    "anthropic": "author",
    "anyio": "author",
    "genai_prices": "author",
    "httpx2": "author",
    "mcp": "author",
    "mcp_types": "author",
    "flashinfer": "compare",
    "liger_kernel": "compare",
    "matplotlib": "draw",
    "ray": "ray",
    "torchao": "compare",
}


def remedy(missing: ModuleNotFoundError) -> str | None:
    """The command that installs a missing optional package. None for a module that is not optional, because
    its absence is a bug."""
    extra = EXTRAS.get((missing.name or "").partition(".")[0])
    return extra and f"pip install 'coda-agent[{extra}]'"
