"""The layouts on which faults are planted."""

from typing import Any

_ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}

TP: dict[str, Any] = {**_ONES, "tensor_parallel_size": 2}
TP_WHOLE: dict[str, Any] = {**TP, "sequence_parallel": False}
DDP: dict[str, Any] = {**_ONES, "zero_stage": 0}
ZERO1: dict[str, Any] = {**_ONES, "zero_stage": 1}
ZERO3: dict[str, Any] = {**_ONES, "zero_stage": 3}
PP: dict[str, Any] = {**_ONES, "pipeline_parallel_size": 2}
CP: dict[str, Any] = {**_ONES, "context_parallel_size": 2}
EP: dict[str, Any] = {**_ONES, "expert_parallel_size": 2, "zero_stage": 1}
OFFLOAD: dict[str, Any] = {**_ONES, "zero_stage": 2, "offload_options": {}}
TP_DP: dict[str, Any] = {**_ONES, "tensor_parallel_size": 2, "zero_stage": 1}
LATER = {"when": "later"}
