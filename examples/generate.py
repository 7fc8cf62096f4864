"""Continue a text with the model that train.py trained: ``python examples/generate.py FOLDER PROMPT``.

The decoder layers are fused, with Hugging Face's own cache and ``generate``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from coda_agent import fused


def main(arguments: Sequence[str] | None = None) -> str:
    """Return the prompt with its continuation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    given = parser.parse_args(arguments)

    characters = json.loads((given.folder / "characters.json").read_text(encoding="utf-8"))
    unknown = sorted(set(given.prompt) - set(characters))
    if unknown or not given.prompt:
        parser.error(f"the prompt needs characters of the text it was trained on; unknown: {unknown}")
    number = {character: i for i, character in enumerate(characters)}
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model: Any = LlamaForCausalLM.from_pretrained(given.folder, dtype=dtype).eval()
    model.to(device)
    fused.patch(model)

    ids = torch.tensor([[number[character] for character in given.prompt]], device=model.device)
    # vocabulary entries without a character
    padding = [[i] for i in range(len(characters), model.config.vocab_size)]
    more = {"temperature": given.temperature, "bad_words_ids": padding or None}
    found = model.generate(ids, max_new_tokens=given.tokens, do_sample=True, **more)
    text = "".join(characters[i] for i in found[0].tolist())
    print(text)
    return text


if __name__ == "__main__":
    main()
