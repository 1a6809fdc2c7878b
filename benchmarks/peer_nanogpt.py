"""The peer of shakespeare_char.yaml: nanoGPT's published CPU setting, in PyTorch.

The model and loop that nanoGPT's README describes for CPUs (GPT-2 blocks, 4 layers, 4 heads, width 128, context 64,
batch 12, 2,000 steps, no dropout, AdamW at 1e-3 with a cosine to 1e-4, evaluation on 20 batches of each split every 250
steps), written anew for this comparison. Prints the wall time and the loss over the whole validation text.

    python benchmarks/peer_nanogpt.py --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, STEPS, WARMUP = 4, 4, 128, 64, 12, 2000, 100
PEAK, FLOOR, EVAL_EVERY, EVAL_BATCHES = 1e-3, 1e-4, 250, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seq, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the tiny Shakespeare text")
    parser.add_argument("--compile", action="store_true", help="run under torch.compile")
    arguments = parser.parse_args()
    text = arguments.data.read_text()
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([alphabet[character] for character in text])
    train, validation = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    torch.manual_seed(0)
    start_s = time.perf_counter()
    model = GPT(len(alphabet))
    loss_of = torch.compile(model.loss) if arguments.compile else model.loss
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=PEAK, betas=(0.9, 0.99)
    )

    def batch(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(source) - CONTEXT, (BATCH,))
        windows = torch.stack([source[start : start + CONTEXT + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]

    for step in range(STEPS + 1):
        if step % EVAL_EVERY == 0:
            with torch.no_grad():
                losses = [[float(loss_of(*batch(part))) for _ in range(EVAL_BATCHES)] for part in (train, validation)]
            print(f"step {step}: train {np.mean(losses[0]):.4f} validation {np.mean(losses[1]):.4f}", flush=True)
        progress = (step - WARMUP) / (STEPS - WARMUP)
        rate = (
            PEAK * step / WARMUP if step < WARMUP else FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(*batch(train))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wall_s = time.perf_counter() - start_s
    count = (len(validation) - 1) // CONTEXT
    inputs = validation[: count * CONTEXT].view(count, CONTEXT)
    targets = validation[1 : count * CONTEXT + 1].view(count, CONTEXT)
    with torch.no_grad():
        whole = float(model.loss(inputs, targets))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"wall_s": round(wall_s, 1), "validation_loss": round(whole, 4), "parameters": parameters}))


if __name__ == "__main__":
    main()
