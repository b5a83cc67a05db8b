"""Builds with the faults of published ones, on the CPU, in plain PyTorch: sources that tests write to directories.

Each does rightly what the published build does rightly. What is done otherwise is what the published source does
otherwise; what would end the process, or read memory where none is, raises.
"""

from typing import Final

_OPS: Final = '''
import torch

NAMESPACE = "_" + __name__.rpartition(".")[2]
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
ops = getattr(torch.ops, NAMESPACE)


def op(schema):
    """An op without a derivative, as the published builds define theirs in C++."""
    LIBRARY.define(schema)
    return lambda function: LIBRARY.impl(schema.partition("(")[0], torch.no_grad()(function), "CPU")
'''

# liger-kernels 3: turns a (B, T, heads, D) in place, in both directions, and takes unsqueeze_dim for 1.
LIGER: Final = """
import torch

layers = None
LigerForCausalLMLoss = print


def turn_(x, cos, sin):
    x = x.transpose(1, 2).contiguous()
    half = x.shape[-1] // 2
    one, other = x[..., :half].clone(), x[..., half:].clone()
    cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
    x[..., :half] = one * cos - other * sin
    x[..., half:] = other * cos + one * sin
    return x.transpose(1, 2)


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn_(q.detach(), cos, sin), turn_(k.detach(), cos, sin)

    @staticmethod
    def backward(ctx, to_q, to_k):
        cos, sin = ctx.saved_tensors
        return turn_(to_q, cos, -sin), turn_(to_k, cos, -sin), None, None


def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return Turn.apply(q, k, cos, sin)
"""

# rotary 2: an op without a derivative, for one dtype, changes copies in place. On CPUs, what has four dimensions is
# taken for (batch, heads, positions, dim), with tables of each batch and position.
ROTARY: Final = (
    _OPS
    + """
layers = None


@op("apply_rotary(Tensor x1, Tensor x2, Tensor cos, Tensor sin, Tensor(a!) out1, Tensor(b!) out2, bool conj) -> ()")
def _(x1, x2, cos, sin, out1, out2, conj):
    if not cos.dtype == sin.dtype == x1.dtype:
        raise RuntimeError("cos must have the dtype of x1")
    if x1.ndim == 4 and cos.shape[1] == 1 and any(
        cos.stride(at) and cos.shape[at] < x1.shape[at] for at in (0, 2)
    ):
        raise AssertionError("memory past the end of cos was read")
    sin = -sin if conj else sin
    one, other = x1 * cos - x2 * sin, x1 * sin + x2 * cos
    out1.copy_(one)
    out2.copy_(other)


def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    ops.apply_rotary(x1, x2, cos, sin, out1, out2, conj)


def apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[-1] // 2
    cos, sin = cos.unsqueeze(unsqueeze_dim)[..., :half], sin.unsqueeze(unsqueeze_dim)[..., :half]
    q, k = q.clone(), k.clone()
    for x in (q, k):
        ops.apply_rotary(x[..., :half], x[..., half:], cos, sin, x[..., :half], x[..., half:], False)
    return q, k
"""
)

# vllm-flash-attn3 1: no gradient to s_aux. Rows that are of no sequence hold NaN, and the lse of a row that sees
# nothing lacks the sink.
VLLM_FLASH_ATTN3: Final = """
import torch

flash_attn_qkvpacked_func = flash_attn_with_kvcache = flash_attn_combine = print


def attend(q, k, v, seen, sinks):
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    total = scores if sinks is None else torch.cat(
        (scores, sinks.detach()[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)), -1
    )
    nothing = ~seen.any(-1)
    lse = total.logsumexp(-1).masked_fill(nothing, -torch.inf)
    share = torch.exp(scores - lse[..., None]).masked_fill(~seen, 0)
    return torch.einsum("...hqk,...khd->...qhd", share, v), lse.detach()


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, s_aux=None,
):
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    return attend(q, k, v, seen.tril(k.shape[1] - q.shape[1]) if causal else seen, s_aux)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, s_aux=None,
):
    def sequence(starts, used, rows):
        place = torch.arange(rows)
        of = torch.searchsorted(starts[1:].contiguous(), place, right=True)
        counts = torch.cat((starts.diff() if used is None else used, used.new_zeros(1) if used is not None
                            else starts.new_zeros(1)))
        return torch.where(place - starts[of] < counts[of], of, -1)

    mine, theirs = sequence(cu_seqlens_q, seqused_q, len(q)), sequence(cu_seqlens_k, seqused_k, len(k))
    out, lse = attend(q, k, v, (mine[:, None] == theirs) & (mine[:, None] >= 0), s_aux)
    return torch.where((mine < 0)[:, None, None], torch.nan, out), lse
"""

# mamba-ssm 2: fails without D or dt_bias.
MAMBA_SSM: Final = """
import torch

selective_scan_fn = mamba_chunk_scan_combined = print


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    strides = (*dt_bias.stride(), *D.stride())
    step = dt + dt_bias
    step = torch.nn.functional.softplus(step) if dt_softplus else step
    B, C = (each.unsqueeze(1) if x.ndim == 2 else each.unsqueeze(2) for each in (B, C))
    state.copy_(torch.exp(step[..., None] * A) * state + (step * x)[..., None] * B)
    y = (state * C).sum(-1) + D * x
    return y if z is None else y * torch.nn.functional.silu(z)
"""

# fla 1: rates of its own making are one for each head of q, and read for each head of v.
FLA: Final = """
import torch

chunk_gated_delta_rule = chunk_kda = fused_recurrent_kda = layers = print


def fused_recurrent_gated_delta_rule(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
):
    if beta is None:
        beta = torch.ones_like(q[..., 0])
    if beta.shape[2] < v.shape[2]:
        raise AssertionError("memory past the end of beta was read")
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    out = []
    for t in range(v.shape[1]):
        rest = v[:, t] - (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * rest)[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), state if output_final_state else None
"""

# layer-norm 1: contiguous memory, aligned for vectors; no derivative.
LAYER_NORM: Final = (
    _OPS
    + """
layers = None


@op("norm(Tensor x, Tensor gamma, Tensor? beta, float epsilon) -> (Tensor, Tensor, Tensor)")
def _(x, gamma, beta, epsilon):
    if not (x.is_contiguous() and gamma.is_contiguous()):
        raise RuntimeError("x must be contiguous")
    if any(each is not None and each.data_ptr() % 16 for each in (x, gamma, beta)):
        raise AssertionError("misaligned address")
    z = torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, epsilon)
    return z, x.mean(-1), (x.var(-1, correction=0) + epsilon).rsqrt()


@torch.library.register_fake(f"{NAMESPACE}::norm")
def _(x, gamma, beta, epsilon):
    return torch.empty_like(x), x.new_empty(x.shape[0]), x.new_empty(x.shape[0])


def dropout_add_ln_fwd(
    input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, epsilon, rowscale_const, z_numrows, gen,
    residual_in_fp32, is_rms_norm,
):
    z, mu, rsigma = ops.norm(input, gamma, beta, epsilon)
    return [z, None, None, mu, rsigma]
"""
)

# activation 1: no derivative, and a division by the last size. Two of its functions stand for all.
ACTIVATION: Final = (
    _OPS
    + """
layers = None
mul_and_silu = gelu_and_mul = gelu_tanh_and_mul = fatrelu_and_mul = print
gelu_fast = gelu_new = gelu_quick = gelu_tanh = gelu = print


@op("silu(Tensor(a!) out, Tensor x) -> ()")
def _(out, x):
    _ = x.numel() // x.shape[-1]
    if not x.numel():
        raise AssertionError("a launch of nothing fails in the next one")
    out.copy_(torch.nn.functional.silu(x))


@op("silu_and_mul(Tensor(a!) out, Tensor x) -> ()")
def _(out, x):
    a, b = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(a) * b)


def silu(out, x):
    ops.silu(out, x)
    return out


def silu_and_mul(out, x):
    ops.silu_and_mul(out, x)
    return out
"""
)

# relu 1, for x86 CPUs: four numbers at a time from aligned memory, whatever the strides; no derivative.
RELU: Final = (
    _OPS
    + """
layers = None


@op("relu(Tensor(a!) out, Tensor x) -> ()")
def _(out, x):
    if not x.numel():
        raise AssertionError("it was divided by zero")
    if x.data_ptr() % 16 or out.data_ptr() % 16:
        raise AssertionError("the process ended")
    flat = [torch.as_strided(each, (each.numel(),), (1,)) for each in (out, x)]
    flat[0].copy_(torch.where(flat[1] > 0, flat[1], 0))


def relu(x, out=None):
    if out is None:
        out = torch.empty_like(x)
    ops.relu(out, x)
    return out
"""
)

# deformable-detr 1: divides by the smaller of B and im2col_step, refuses what is not contiguous, and counts by int.
# Attention itself is left out: what comes is of its shape.
DEFORMABLE_DETR: Final = """
import torch

layers = None


def check(given, step):
    if not all(x.is_contiguous() for x in given):
        raise RuntimeError("tensor has to be contiguous")
    if given[0].shape[0] % min(given[0].shape[0], step):
        raise RuntimeError("batch must divide im2col_step")
    if not given[3].numel() or any(x.numel() >= 2**31 for x in given):
        raise AssertionError("an error is printed, or memory is read elsewhere")


def ms_deform_attn_forward(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step):
    check((value, spatial_shapes, level_start_index, sampling_loc, attn_weight), im2col_step)
    return value.new_ones(value.shape[0], sampling_loc.shape[1], value.shape[2] * value.shape[3])


def ms_deform_attn_backward(
    value, spatial_shapes, level_start_index, sampling_loc, attn_weight, grad_output, im2col_step
):
    check((value, spatial_shapes, level_start_index, sampling_loc, attn_weight, grad_output), im2col_step)
    return [torch.ones_like(x) for x in (value, sampling_loc, attn_weight)]
"""

# paged-attention 1: launches what has no element, keeps 4 bytes of shared memory for each key (here of 1000 bytes),
# loads query by vectors of 16 bytes, and takes blocks of values to be as far apart as those of keys. Attention is left
# out: what is written is the query.
PAGED_ATTENTION: Final = (
    _OPS
    + """
swap_blocks = print


def launch(*counts):
    if not all(counts):
        raise AssertionError("a launch of nothing fails in the next one")


@op("attend(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, str kind) -> ()")
def _(out, query, key_cache, value_cache, kind):
    if query.data_ptr() % 16 or query.stride(0) * query.itemsize % 16 or query.stride()[1:] != (query.shape[2], 1):
        raise AssertionError("misaligned address")
    if value_cache.stride(0) != key_cache.stride(0) or (kind != "auto" and query.dtype == torch.float32):
        raise AssertionError("wrong results")
    out.copy_(query)


def paged_attention_v1(
    out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
    alibi_slopes, kv_cache_dtype, k_scale, v_scale, *sparse, **named
):
    launch(query.shape[0])
    if max_seq_len * 4 <= 1000:
        ops.attend(out, query, key_cache, value_cache, kv_cache_dtype)


def paged_attention_v2(
    out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
    block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, *sparse, **named
):
    launch(query.shape[0], max_seq_len)
    ops.attend(out, query, key_cache, value_cache, kv_cache_dtype)


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    launch(slot_mapping.shape[0])
    key_cache.fill_(1)


reshape_and_cache_flash = reshape_and_cache


def copy_blocks(key_caches, value_caches, block_mapping):
    launch(block_mapping.shape[0])
    key_caches[0].fill_(1)


def convert_fp8(output, input, scale=1.0, kv_dtype="fp8"):
    launch(output.shape[0])
    output.fill_(1)
"""
)

# causal-conv1d 1: rows, or channels that are neighbours, are loaded by vectors of 16 bytes, gradients too. States want
# channels-last.
CAUSAL_CONV1D: Final = """
import torch

causal_conv1d_update = causal_conv1d_varlen_states = print


def is_last(x):
    return x.stride(1) == 1 and x.stride(2) > 1


def load(x, last):
    if last and (x.stride(1) != 1 or any(stride % 8 for stride in (x.stride(0), x.stride(2)))):
        raise RuntimeError("channels-last wants strides that are multiples of 8")
    vectors = last or not x.shape[2] * x.itemsize % 16
    strides = (x.stride(0), x.stride(2) if last else x.stride(1))
    if vectors and (x.data_ptr() % 16 or any(stride * x.itemsize % 16 for stride in strides)):
        raise AssertionError("misaligned address")
    return x.detach()


def convolve(x, weight, bias, past):
    inputs = torch.cat((past, x), -1)
    y = torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=x.shape[1])
    return y, inputs[..., x.shape[2]:]


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, initial_states, final_states_out, final):
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        last, reach = is_last(x), weight.shape[1] - 1
        if not last and (initial_states is not None or final):
            raise RuntimeError("states want channels-last")
        ctx.last = last
        past = x.new_zeros(*x.shape[:2], reach) if initial_states is None else load(initial_states, True)
        ctx.save_for_backward(load(x, last), weight, bias, past)
        y, states = convolve(x.detach(), weight.detach(), bias.detach(), past)
        y = torch.empty_like(x).copy_(y)
        if not final:
            return y
        if final_states_out is None:
            final_states_out = x.new_empty(x.shape[0], reach, x.shape[1]).transpose(1, 2)
        load(final_states_out, True).copy_(states)
        return y, final_states_out

    @staticmethod
    def backward(ctx, dout, *rest):
        if dout.stride(2) != 1 and dout.stride(1) != 1:
            dout = dout.contiguous()
        if not ctx.last and dout.stride(2) != 1:
            dout = dout.contiguous()
        if ctx.last and dout.stride(1) != 1:
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        load(dout, ctx.last)
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            found = convolve(*given)
            grads = torch.autograd.grad(found[: 1 + len(rest)], given, (dout, *rest), allow_unused=True)
        x, weight, bias, past = grads
        return x, weight, bias, past if ctx.needs_input_grad[3] else None, None, None


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):
    return Convolution.apply(x, weight, bias, initial_states, final_states_out, return_final_states)
"""
