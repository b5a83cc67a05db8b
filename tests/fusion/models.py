"""A small model with the modules of Llama, and the configuration that fuses them."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_loader import KernelConfig, use_kernel_forward_from_hub

MLP = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
ATTENTION = (("Attention", "model.layers.*.self_attn"),)
CONFIG = KernelConfig({MLP: "rmsnorm_mlp:RMSNormMLP", ATTENTION: "qkv_packed:PackedQKV"})


@use_kernel_forward_from_hub("RMSNorm")
class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x)


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped queries, rotary embedding, and what attention modules have besides: a buffer, a scale, a helper."""

    scaling, cap = 0.5, None

    def __init__(self, width: int, heads: int = 4, groups: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=bias)
        self.o_proj = nn.Sequential(nn.Linear(heads * self.head_dim, width))
        self.sinks = nn.Parameter(torch.zeros(heads, 1, 1))
        self.register_parameter("absent", None)
        self.register_buffer("inv_freq", 0.1 ** torch.arange(0, self.head_dim, 2.0), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * self.inv_freq
        return self.turned(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.to(self.q_proj.weight.dtype)
        q, k, v = (self.split(proj(hidden_states)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
        scores = q @ k.mT * self.scaling + self.sinks
        scores = scores if self.cap is None else scores.clamp(max=self.cap)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return self.o_proj((weights @ v).transpose(-3, -2).flatten(-2)), weights


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.self_attn = Attention(width, bias=bias)
        self.mlp = GatedMLP(width, inner, bias)
        self.input_layernorm = Norm(width)
        self.post_attention_layernorm = Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, width: int, inner: int, count: int, bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width, inner, bias) for _ in range(count))
        self.norm = Norm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """Ids to logits, with the embedding tied to the head."""

    def __init__(self, width: int = 16, inner: int = 24, count: int = 2, *, bias: bool = False) -> None:
        super().__init__()
        self.model = Body(width, inner, count, bias)
        self.lm_head = nn.Linear(width, 16, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.model(ids))}


IDS = torch.arange(10).view(2, 5)


def llama(seed: int = 0, **options: Any) -> Llama:
    """With weights of a seed, for inference."""
    torch.manual_seed(seed)
    return Llama(**options).eval()


def logits(model: nn.Module) -> Tensor:
    return model(IDS)["logits"]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a failure may not change: modules, tensors and their values, flags and hooks."""
    return {
        "modules": [(name, id(m), type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)],
        "tensors": [
            (name, id(t), t.requires_grad, t.dtype, t.grad)
            for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        ],
        "values": [t.detach().clone() for t in (*model.parameters(), *model.buffers())],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [[{**v} for k, v in sorted(vars(m).items()) if k.endswith("_hooks")] for m in model.modules()],
        "keys": list(model.state_dict()),
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    values = zip(before.pop("values"), after.pop("values"), strict=True)
    assert after == before
    assert all(torch.equal(one, other) for one, other in values if not one.is_meta)
