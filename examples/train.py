"""Train a small Llama from scratch on a text: ``python examples/train.py TEXT FOLDER``.

Tokens are characters. Decoder layers and the loss are fused: on an H100 they run in bf16 under autocast,
elsewhere PyTorch runs the same programs. FOLDER becomes an ordinary Hugging Face checkpoint, which
generate.py reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coda_agent import fused


def small_llama(vocabulary: int, width: int, layers: int) -> Any:
    """A small random Llama, whose widths are multiples of 8, as the kernels require."""
    config = LlamaConfig(
        vocab_size=-(-vocabulary // 8) * 8,
        hidden_size=width,
        intermediate_size=8 * (width // 3),
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train the model; return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    for name, usual in {"steps": 500, "batch": 32, "length": 256, "width": 512, "layers": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args(arguments)

    text = given.text.read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([number[character] for character in text])

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_llama(len(characters), given.width, given.layers).to(device).train()
    print(fused.patch(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(given.steps):
        starts = torch.randint(len(ids) - given.length, (given.batch,))
        batch = torch.stack([ids[start : start + given.length] for start in starts.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step + 1 == given.steps:
            print(f"step {step}: loss {losses[-1]:.3f}")

    model.save_pretrained(given.folder)
    (given.folder / "characters.json").write_text(json.dumps(characters), encoding="utf-8")
    return losses


if __name__ == "__main__":
    main()
