r"""Published layers in a model of transformers, on an NVIDIA GPU: outputs, gradients and speed against the original.

The published builds are found through KERNEL_LOADER_LOCAL, so that no Hub is needed:

    KERNEL_LOADER_LOCAL=kernels-community/liger-kernels=DIRECTORY:kernels-community/finegrained-fp8=DIRECTORY \
        python bench/gpu/layers.py [RESULT.md]

A Llama of the size of Llama 3.2 1B with random weights, in bfloat16. Errors are ||a - b|| / ||b||, against the same
model in float32; gradients over all parameters together. Times are medians of CUDA events, after the first call.
"""

import contextlib
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from device import machine, median_ms
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import kernel_loader
from kernel_loader import LayerRepository, Mode

LIGER = "kernels-community/liger-kernels"
CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
BATCH, TOKENS = 4, 1024


@kernel_loader.use_kernel_forward_from_hub("act_quant")
def act_quant(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks of the last dimension as e4m3 codes, and their float32 scales."""
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1) / 448
    return (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


@kernel_loader.use_kernelized_func(act_quant)
class Quantiser(nn.Module):
    """Calls the function, so that kernelize sees it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise in blocks of 128."""
        return act_quant(x, 128)


def name_layers() -> None:
    """Give the classes of transformers the names that mappings know."""
    kernel_loader.replace_kernel_forward_from_hub(modeling_llama.LlamaRMSNorm, "RMSNorm")
    kernel_loader.replace_kernel_forward_from_hub(modeling_llama.LlamaMLP, "SwiGLUMLP")
    rotary = kernel_loader.use_kernel_forward_from_hub("rotary_pos_emb")(modeling_llama.apply_rotary_pos_emb)
    modeling_llama.apply_rotary_pos_emb = rotary
    kernel_loader.use_kernelized_func(rotary)(modeling_llama.LlamaAttention)


def mapping() -> contextlib.AbstractContextManager[None]:
    """What ships, and liger's rotary embedding, as no compiled build of the usual one is here."""
    rotary = LayerRepository(LIGER, layer_name="liger_rotary_pos_emb_layer", version=3)
    quantise = LayerRepository("finegrained_fp8", layer_name="fp8_act_quant")
    return kernel_loader.use_kernel_mapping({"rotary_pos_emb": {"cuda": rotary}, "act_quant": {"cuda": quantise}})


def main() -> None:
    """Measure, print, and write where the command line says."""
    torch.manual_seed(0)
    name_layers()
    config = transformers.LlamaConfig(**CONFIG)
    exact = transformers.LlamaForCausalLM(config).cuda().float()
    model = copy.deepcopy(exact).bfloat16()
    ids = torch.randint(0, CONFIG["vocab_size"], (BATCH, TOKENS), device="cuda")
    lines = [
        "# Published layers in a Llama of transformers, against the original forward",
        "",
        machine(f"transformers {transformers.__version__}"),
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters, {BATCH} x {TOKENS} tokens, bf16.",
        "",
        "| what | layers with a kernel | error of the original | with kernels | original | with kernels | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    wanted = {"forward": logits(exact, ids), "forward and backward": gradients(exact, ids)}
    del exact
    for what, mode, run in (
        ("forward", Mode.INFERENCE, logits),
        ("forward and backward", Mode.TRAINING, gradients),
    ):
        model.train(mode is Mode.TRAINING)
        before, slow = run(model, ids), median_ms(lambda run=run: run(model, ids))
        begin = time.perf_counter()
        with mapping():
            kernel_loader.kernelize(model, mode=mode, strict=True)
        seconds = time.perf_counter() - begin
        report = kernel_loader.kernelize_report(model)
        print(f"kernelized in {seconds:.2f} s\n{report}", flush=True)
        begin = time.perf_counter()
        after = run(model, ids)
        first = time.perf_counter() - begin
        fast = median_ms(lambda run=run: run(model, ids))
        used = ", ".join(f"{row.total} {row.layer}" for row in report.layers if row.used)
        kernel_loader.unkernelize(model)
        assert torch.equal(run(model, ids), before) or mode is Mode.TRAINING
        errors = [f"{relative(found, wanted[what]):.2e}" for found in (before, after)]
        lines.append(
            f"| {what} | {used} | {errors[0]} | {errors[1]} | {slow:.1f} ms | {fast:.1f} ms | {slow / fast:.2f}x |"
        )
        print(lines[-1], f"first call {first:.1f} s", flush=True)
    lines += [compiled(model.eval(), ids, wanted["forward"]), "", *quantise(), *capabilities()]
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def compiled(model: nn.Module, ids: Tensor, wanted: Tensor) -> str:
    """The forward pass inside torch.compile, without kernels and with those that say they work there."""
    program = torch.compile(model)
    before, slow = logits(program, ids), median_ms(lambda: logits(program, ids))
    with mapping():
        kernel_loader.kernelize(program, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, strict=True)
    after, fast = logits(program, ids), median_ms(lambda: logits(program, ids))
    used = ", ".join(f"{row.total} {row.layer}" for row in kernel_loader.kernelize_report(model).layers if row.used)
    kernel_loader.unkernelize(program)
    errors = f"{relative(before, wanted):.2e} | {relative(after, wanted):.2e}"
    return f"| forward, torch.compile | {used} | {errors} | {slow:.1f} ms | {fast:.1f} ms | {slow / fast:.2f}x |"


def capabilities() -> Iterator[str]:
    """Ranges of capability against the device that is here."""
    major, minor = torch.cuda.get_device_capability()
    here = major * 10 + minor
    norm = modeling_llama.LlamaRMSNorm(64).cuda()
    liger = LayerRepository(LIGER, layer_name="LigerRMSNorm", version=3)
    for low, high in ((here, here), (here - 20, here - 1), (here + 1, here + 20)):
        device = kernel_loader.Device("cuda", kernel_loader.CUDAProperties(low, high))
        with kernel_loader.use_kernel_mapping({"RMSNorm": {device: liger}}, inherit_mapping=False):
            (row,) = kernel_loader.kernelize_report(kernel_loader.kernelize(norm, mode=Mode.INFERENCE)).layers
        assert row.used == (low <= here <= high), row
        yield f"A mapping for capability {low} to {high}, on a device of {here}: {row.code}."


def quantise() -> Iterator[str]:
    """The published FP8 quantiser as a function of the model's, against PyTorch."""
    quantiser, x = Quantiser(), torch.randn(4096, 7168, device="cuda", dtype=torch.bfloat16)
    codes, scale = quantiser(x)
    slow = median_ms(lambda: quantiser(x))
    with mapping():
        kernel_loader.kernelize(quantiser, mode=Mode.INFERENCE, device="cuda", strict=True)
    kernel_codes, kernel_scale = quantiser(x)
    fast = median_ms(lambda: quantiser(x))
    same = (codes.float() == kernel_codes.float()).float().mean().item()
    yield (
        f"act_quant of 4096 x 7168 by finegrained-fp8: {same:.4%} of the codes are equal, scales differ by "
        f"{relative(kernel_scale, scale):.1e}; {slow:.3f} ms in PyTorch, {fast:.3f} ms by the kernel."
    )


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The forward pass."""
    with torch.no_grad():
        found: Tensor = model(ids).logits.float()
    return found


def gradients(model: nn.Module, ids: Tensor) -> Tensor:
    """Gradients of all parameters after one step, as one vector."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return ((found - wanted).norm() / wanted.norm()).item()


if __name__ == "__main__":
    main()
