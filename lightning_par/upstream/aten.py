"""Operators of ATen that have no public name, resolved when this module is imported.

===========================  ==================================================================
`flash_cpu`, `flash_cuda`,   forward of fused attention, which also returns the logsumexp of the
`efficient_cuda`,            scores; `F.scaled_dot_product_attention` keeps it to itself
`cudnn_cuda`
`flash_cpu_backward`, ...    their backwards, from the logsumexp of any block of the keys
`foreach_norm`               norm of each of many tensors in a few kernels;
                             `torch.nn.utils.get_total_norm` gives that of all together only
`foreach_copy_`,             copy many tensors, or multiply them by a number, in a few kernels;
`foreach_mul_`               `torch.nn.utils.clip_grads_with_norm_` takes no DTensors of two meshes,
                             and copies a norm that is on the CPU to the device
`fused_adam_`,               one kernel for the whole update; `torch.optim.Adam(fused=True)` calls
`fused_adamw_`               it on whole parameters that own a gradient, not on slices of a buffer
`unscale_and_check_`         multiply gradients and set a flag if one is not finite, in one kernel;
                             `GradScaler.unscale_`, which is public, takes an optimizer
===========================  ==================================================================
"""

import torch

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
    flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    cudnn_cuda = torch.ops.aten._scaled_dot_product_cudnn_attention
    cudnn_cuda_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention
    efficient_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    foreach_norm = torch._foreach_norm
    foreach_copy_ = torch._foreach_copy_
    foreach_mul_ = torch._foreach_mul_
    fused_adam_ = torch._fused_adam_
    fused_adamw_ = torch._fused_adamw_
    unscale_and_check_ = torch._amp_foreach_non_finite_check_and_unscale_

__all__ = [
    "cudnn_cuda",
    "cudnn_cuda_backward",
    "efficient_cuda",
    "efficient_cuda_backward",
    "flash_cpu",
    "flash_cpu_backward",
    "flash_cuda",
    "flash_cuda_backward",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fused_adam_",
    "fused_adamw_",
    "unscale_and_check_",
]
