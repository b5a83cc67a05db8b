"""Fused models of transformers against the originals: logits, gradients, state dicts and saved checkpoints.

    python bench/fusion.py [--device cuda]

Needs transformers. Models are made of configurations, with random weights, in float32. `fuse` is by
configuration alone: RMSNorm and MLP where the MLP is dense, queries, keys and values everywhere. A saved fused model is
read by `from_pretrained` in a fresh process that knows nothing of fusion.
"""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kernel_loader import KernelConfig, fuse, parity, unfuse

ATTENTION = {(("Attention", "model.layers.*.self_attn"),): "qkv_packed:PackedQKV"}
MLP = {
    (
        ("RMSNorm", "model.layers.*.post_attention_layernorm"),
        ("MLP", "model.layers.*.mlp"),
    ): "rmsnorm_mlp:RMSNormMLP"
}
# Layer 1 of the mixture is dense.
DENSE_MLP = {
    (
        ("RMSNorm", re.compile(r"model\.layers\.1\.post_attention_layernorm")),
        ("MLP", re.compile(r"model\.layers\.1\.mlp")),
    ): "rmsnorm_mlp:RMSNormMLP"
}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2}

READ = """
import sys, torch, transformers
model = getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2])
torch.save(model.state_dict(), sys.argv[3])
assert "kernel_loader" not in sys.modules
"""


def models() -> Iterator[tuple[str, nn.Module, KernelConfig]]:
    """Names, models and configurations."""
    yield "Llama", LlamaForCausalLM(LlamaConfig(**SIZES)), KernelConfig(MLP | ATTENTION)
    moe = Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=64, mlp_only_layers=[1])
    yield "Qwen3-MoE", Qwen3MoeForCausalLM(moe), KernelConfig(DENSE_MLP | ATTENTION)
    yield "GPT-OSS", GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4)), KernelConfig(ATTENTION)


def main() -> None:
    """A row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the models compute (default: %(default)s)")
    device = torch.device(parser.parse_args().device)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float32 on {device}\n")
    print("| model | fused modules | logits: largest, mean difference | gradients | state dict | saved | undone |")
    print("|---|---|---|---|---|---|---|")
    for name, model, config in models():
        print(f"| {name} | {' | '.join(row(model.eval().to(device), config))} |", flush=True)


def row(model: nn.Module, config: KernelConfig) -> list[str]:
    """What became of one model."""
    ids = torch.arange(24, device=next(model.parameters()).device)[None] % 512
    original = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse(model, config)
    sites = sum(len(found) for found in config.sanitize(original))
    output = parity(original, model, {"input_ids": ids}).output
    cells = [str(sites), f"{output.largest:.1e}, {output.mean:.1e} of {output.scale:.2f}"]
    cells.append(f"{gradients(original, model, ids):.1e}")
    cells.append(same(before, model.state_dict()))
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        arguments = [type(model).__name__, directory, f"{directory}/read.pt"]
        subprocess.run([sys.executable, "-c", READ, *arguments], check=True, capture_output=True)
        cells.append(same(before, torch.load(f"{directory}/read.pt")))
    unfuse(model)
    exact = torch.equal(model(ids).logits, original(ids).logits)
    cells.append(f"{same(before, model.state_dict())}, logits {'equal' if exact else 'differ'}")
    return cells


def gradients(original: nn.Module, fused: nn.Module, ids: Tensor) -> float:
    """The largest difference of gradients, as a share of the largest; those of packed weights side by side."""
    found = []
    for model in (original, fused):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        # In the original layout: gradients take the way of the weights.
        with torch.no_grad():
            plain = copy.deepcopy(model)
            for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(torch.zeros_like(mine) if theirs.grad is None else theirs.grad)
        found.append(plain.state_dict())
    one, other = found
    largest = max(tensor.abs().max().item() for tensor in one.values())
    return max((one[name] - other[name]).abs().max().item() for name in one) / largest


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Whether two state dicts are alike."""
    if list(one) != list(other):
        return "other keys" if set(one) != set(other) else "same bits" if equal(one, other) else "other bits"
    return "same keys, order, bits" if equal(one, other) else "other bits"


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all tensors are bit for bit alike."""
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


if __name__ == "__main__":
    main()
