"""What a logged number is of those that the parts of a batch log."""

import pytest
import torch

from lightning_par.strategies.step.step_traces import (
    combine_logs,
    compare_parts,
    LogCall,
    MEAN_OF_SAMPLES,
    NOT_OF_PARTS,
    SAME_KIND,
    SUM_OF_PARTS,
)

LABELS, SAMPLES = torch.tensor([2.0, 6.0], dtype=torch.float64), [1, 1]


def call(value: float, *, is_plain: bool = False) -> LogCall:
    return LogCall(name="a", value=value, metric=None, options={}, is_plain=is_plain)


def kind_of(whole: float, *parts: float, is_plain: bool = False) -> int:
    logs = [[call(value, is_plain=is_plain)] for value in (whole, *parts)]
    return compare_parts(logs, LABELS, 2e-5, SAMPLES)["a"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((3.5, 2.0, 4.0), SAME_KIND),
        ((3.0, 2.0, 4.0), MEAN_OF_SAMPLES),
        ((6.0, 2.0, 4.0), SUM_OF_PARTS),
        ((8.0, 2.0, 4.0), NOT_OF_PARTS),
        ((5.0, 5.0, 5.0), SAME_KIND),
        ((1e-9, 8e-8, 9e-8), SAME_KIND),  # of numbers of size 1, that is rounding
    ],
)
def test_a_number_is_a_mean_of_labels_or_samples_or_a_sum(values, kind) -> None:
    assert kind_of(*values) == kind


def test_a_plain_number_that_ties_is_a_mean_of_samples() -> None:
    assert kind_of(5.0, 5.0, 5.0, is_plain=True) == MEAN_OF_SAMPLES
    assert kind_of(3.5, 2.0, 4.0, is_plain=True) == SAME_KIND


def summed(value: float) -> LogCall:
    options = {"reduce_fx": "sum"}
    return LogCall(name="a", value=value, metric=None, options=options, is_plain=True)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((1.0, 1.0, 1.0), MEAN_OF_SAMPLES),  # one for each batch
        ((3.0, 2.0, 4.0), MEAN_OF_SAMPLES),
        ((6.0, 2.0, 4.0), SAME_KIND),
        ((0.0, 0.0, 0.0), SAME_KIND),  # may be a count of samples of which there was none
        ((8.0, 2.0, 4.0), NOT_OF_PARTS),
    ],
)
def test_a_sum_over_batches_is_none_over_their_parts(values, kind) -> None:
    logs = [[summed(value)] for value in values]
    assert compare_parts(logs, LABELS, 2e-5, SAMPLES)["a"] == kind
    (combined,) = combine_logs(logs[1:], LABELS, (), {"a"} if kind else (), SAMPLES)
    assert kind == NOT_OF_PARTS or float(combined.value) == values[0]


def test_means_of_samples_are_combined_by_samples() -> None:
    calls = [[call(2.0)], [call(4.0)]]
    assert float(combine_logs(calls, LABELS)[0].value) == 3.5
    assert float(combine_logs(calls, LABELS, (), {"a"}, [3, 1])[0].value) == 2.5
