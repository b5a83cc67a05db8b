"""Frozen FP8 layers that a model trains adapters on top of: a linear one, and the experts of a mixture.

Weights are quantised once, in blocks of 128 x 128; kernels multiply by them and pass the gradient on to the input. The
names make the layers replaceable: a mapping for "FP8Linear" or "FP8Experts" gives `kernelize` another forward.

    python examples/fp8_layers.py     # trains adapters of rank 8 on a frozen FP8 mixture of experts
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_loader import load_kernel, use_kernel_forward_from_hub
from kernel_loader.quantization import quantize_block_fp8

BLOCK = [128, 128]


@use_kernel_forward_from_hub("FP8Linear")
class FP8Linear(nn.Module):
    """y = x @ W.T + b, (..., K) -> (..., N), with a frozen W in block-FP8 and x quantised on the way in."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        codes, scale = quantize_block_fp8(linear.weight.detach(), BLOCK)
        self.register_buffer("weight", codes)  # (N, K) float8_e4m3fn
        self.register_buffer("weight_scale_inv", scale)  # (ceil(N / 128), ceil(K / 128)) float32
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """In the dtype of x; differentiable in x and the bias."""
        fp8 = load_kernel("finegrained_fp8")
        y = fp8.fp8_matmul(x, self.weight, self.weight_scale_inv, BLOCK, x.dtype)
        return y if self.bias is None else y + self.bias


@use_kernel_forward_from_hub("FP8Experts")
class FP8Experts(nn.Module):
    """Gated experts with frozen weights in block-FP8: gate_up_proj (E, 2I, H), down_proj (E, H, I).

    Ids of E and more are sentinels, slots of experts on another device: they cost nothing and add nothing.
    """

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        super().__init__()
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            codes, scale = quantize_block_fp8(weight.detach(), BLOCK)
            self.register_buffer(name, codes)
            self.register_buffer(f"{name}_scale_inv", scale)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), (T, k), (T, k) -> (T, H); differentiable in the hidden states and the routing weights."""
        return load_kernel("moe_experts").experts_forward(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up_proj_scale=self.gate_up_proj_scale_inv,
            down_proj_scale=self.down_proj_scale_inv,
            block_size=BLOCK,
        )


class Adapter(nn.Module):
    """A layer, plus a trainable correction of low rank to what it makes of its first input."""

    def __init__(self, layer: nn.Module, features: int, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """What the layer makes of its inputs, corrected."""
        return self.layer(x, *rest) + self.up(self.down(x))


class Mixture(nn.Module):
    """A router, FP8 experts, and an FP8 projection after them; adapters on both."""

    def __init__(self, hidden: int = 256, inner: int = 128, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        weights = (torch.randn(experts, 2 * inner, hidden) / 16, torch.randn(experts, hidden, inner) / 16)
        self.experts = Adapter(FP8Experts(*weights), hidden)
        self.projection = Adapter(FP8Linear(nn.Linear(hidden, hidden, bias=False)), hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        weights, index = self.router(x).softmax(-1).topk(self.top_k)
        return self.projection(x + self.experts(x, index, weights))


def main(steps: int = 60) -> tuple[float, float]:
    """Train the adapters towards outputs that the frozen weights do not give; the loss before and after."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mixture().to(device)
    x = torch.randn(64, 256, device=device)
    wanted = model(x).detach() + x @ (torch.randn(256, 8, device=device) @ torch.randn(8, 256, device=device)) / 64
    frozen = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(
        torch.equal(buffer.view(torch.uint8), frozen[name].view(torch.uint8)) for name, buffer in model.named_buffers()
    )
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps on {device}, FP8 weights untouched")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
