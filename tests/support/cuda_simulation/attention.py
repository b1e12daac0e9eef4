"""The attention kernels of CUDA that the package calls by name, as plain products."""

import math

import torch

__all__ = ["register"]


def register():
    """Puts them behind the CUDA dispatch key, for as long as the process lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
    }.items():
        library.impl(name, function, "CUDA")
    register.library = library  # it takes its kernels along when it dies


def _scores(query, key, bias, causal, scale):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * query.float() @ key.float().transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _repeated(query, *heads):
    """Keys and values of groups of queries, once for each query."""
    group = query.shape[1] // heads[0].shape[1]
    return [x.repeat_interleave(group, 1) for x in heads]


def _forward(query, key, value, bias, causal, scale):
    key, value = _repeated(query, key, value)
    scores = _scores(query, key, bias, causal, scale)
    logsum = scores.logsumexp(-1)
    out = (scores - logsum[..., None]).exp() @ value.float()
    return out.to(query.dtype), logsum


def _backward(grad, query, key, value, bias, out, logsum, causal, scale):
    heads = key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    all_keys, all_values = _repeated(query, key, value)
    weights = (_scores(query, all_keys, bias, causal, scale) - logsum[..., None]).exp()
    grad = grad.float()
    inner = (grad * out.float()).sum(-1, keepdim=True)
    of_scores = weights * (grad @ all_values.float().transpose(-1, -2) - inner) * factor
    of_query = of_scores @ all_keys.float()
    of_key = of_scores.transpose(-1, -2) @ query.float()
    of_value = weights.transpose(-1, -2) @ grad
    of_key, of_value = (x.unflatten(1, (heads, -1)).sum(2) for x in (of_key, of_value))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _efficient(query, key, value, bias, with_logsum, dropout=0.0, causal=False, *, scale=None):
    out, logsum = _forward(query, key, value, bias, causal, scale)
    logsum = torch.nn.functional.pad(logsum, (0, -query.shape[2] % 32), value=math.inf)
    state = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, logsum, state, state.clone()


def _efficient_backward(
    grad,
    query,
    key,
    value,
    bias,
    out,
    logsum,
    seed,
    offset,
    dropout,
    mask,
    causal=False,
    *,
    scale=None,
):
    logsum = logsum[..., : query.shape[2]]
    grads = _backward(grad, query, key, value, bias, out, logsum, causal, scale)
    return *grads, torch.empty(0, device=query.device)


def _flash(query, key, value, dropout=0.0, causal=False, with_mask=False, *, scale=None):
    out, logsum = _forward(query, key, value, None, causal, scale)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    none = torch.empty(0, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out, logsum, none, none.clone(), *lengths, state, state.clone(), none.clone()


def _flash_backward(
    grad, query, key, value, out, logsum, first_query, first_key, queries, keys, dropout, causal,
    seed, offset, *, scale=None,
):  # fmt: skip
    return _backward(grad, query, key, value, None, out, logsum, causal, scale)
