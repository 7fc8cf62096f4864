"""The prices of models, according to the package genai-prices."""

from __future__ import annotations

from coda_agent.agent.providers import Usage


def price(model: str, usage: Usage) -> float | None:
    """The US dollars that ``usage`` costs, according to the package genai-prices. None if the package does
    not know the model."""
    import genai_prices

    counted = genai_prices.Usage(
        input_tokens=usage.given,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_tokens=usage.output_tokens,
    )
    try:
        return float(genai_prices.calc_price(counted, model_ref=model, provider_id="anthropic").total_price)
    except LookupError:
        return None


def is_priced(model: str | None) -> bool:
    """Whether dollars can be reserved for a model. An alias of a model has no known price."""
    return bool(model) and price(str(model), Usage()) is not None
