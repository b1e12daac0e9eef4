"""Adam on the host: every kernel takes the step of torch.optim, for every combination of dtypes."""

import itertools
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.cpp_build import build_library, find_compiler
from lightning_par.engine.offload.cpu_kernels import choose_kernel, kernel_source
from lightning_par.errors import ConfigurationError, OffloadError

ROOT = Path(__file__).resolve().parents[4]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHORT = (F32, BF16, F16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def rule(**changes: Any) -> AdamRule:
    values = {
        "lr": 3e-2,
        "betas": (0.8, 0.97),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "decoupled": True,
    }
    return AdamRule(**{**values, **changes})


def gradients(n: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=generator, dtype=F64).to(dtype) for _ in range(steps)]


def by_torch(
    start: Tensor, grads: list[Tensor], scale: float, largest: float, given: AdamRule
) -> tuple[Tensor, dict[str, Tensor]]:
    """What torch.optim does, in float64, with gradients that are scaled and clamped by hand."""
    parameter = torch.nn.Parameter(start.double().clone())
    kind = torch.optim.AdamW if given.decoupled else torch.optim.Adam
    options = {"lr": given.lr, "betas": given.betas, "eps": given.eps}
    optimizer = kind(
        [parameter], weight_decay=given.weight_decay, maximize=given.maximize, **options
    )
    for grad in grads:
        parameter.grad = (grad.double() * scale).clamp(-largest, largest)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def by_kernel(
    kernel: Any,
    start: Tensor,
    grads: list[Tensor],
    scale: float,
    largest: float,
    given: AdamRule,
    moments: torch.dtype,
    out: torch.dtype,
) -> AdamTensors:
    tensors = None
    for step, grad in enumerate(grads, 1):
        before = tensors
        tensors = AdamTensors(
            master=start.clone() if before is None else before.master,
            mean=torch.zeros(len(start), dtype=moments) if before is None else before.mean,
            square=torch.zeros(len(start), dtype=moments) if before is None else before.square,
            grad=grad,
            out=torch.empty(len(start), dtype=out),
        )
        kernel(given, tensors, step=step, scale=scale, largest=largest)
    assert tensors is not None
    return tensors


RULES = {
    "decoupled": {},
    "L2": {"decoupled": False},
    "no decay": {"weight_decay": 0.0},
    "climbing": {"maximize": True, "decoupled": False},
}


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize(("grad", "out"), [*itertools.product(SHORT, SHORT), (F64, F64)])
def test_kernel_takes_the_step_of_torch(
    name: str, kind: str, grad: torch.dtype, out: torch.dtype, cache: Path
) -> None:
    """Five steps of 67 entries: vectors and a tail. float32 rounds by 6e-8 a few times a step."""
    wide = F64 if grad is F64 else F32
    given, scale, largest = rule(**RULES[kind]), 0.25, 0.4
    start = torch.linspace(-2, 3, 67, dtype=wide)
    grads = gradients(67, 5, grad)
    wanted, states = by_torch(start, grads, scale, largest, given)
    got = by_kernel(choose_kernel(name, cache), start, grads, scale, largest, given, wide, out)
    close = {"rtol": 1e-12, "atol": 1e-13} if wide is F64 else {"rtol": 3e-6, "atol": 1e-6}
    torch.testing.assert_close(got.master, wanted.to(wide), **close)
    torch.testing.assert_close(got.mean, states["exp_avg"].to(wide), **close)
    torch.testing.assert_close(got.square, states["exp_avg_sq"].to(wide), **close)
    assert torch.equal(got.out, got.master.to(out))


def awkward() -> Tensor:
    """Numbers around every border of the short dtypes: ties, small ones, too large ones."""
    bits = torch.arange(0, 2**16, 7, dtype=torch.int32)
    every = (bits << 16).view(F32)
    ties = ((bits << 16) + 0x8000).view(F32)
    halves = torch.arange(-32768, 32768, 3, dtype=torch.int16).view(F16).float()
    small = torch.linspace(-1.3e-7, 1.3e-7, 999)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65519.9, 65520.0, 3.4e38])
    found = torch.cat([every, ties, halves, halves * 1.0002441, small, special])
    return found[: len(found) // 2 * 2]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_native_conversions_are_those_of_torch(dtype: torch.dtype, cache: Path) -> None:
    """A rate of 0 writes the master as it is; a rate of 1 shows the gradient as it was read."""
    kernel, values = choose_kernel("native", cache), awkward()
    still = rule(lr=0.0, weight_decay=0.0)
    for wide in (values, values[1:-3]):  # another alignment and another tail
        grad = wide.to(dtype)
        got = by_kernel(kernel, wide, [torch.zeros_like(grad)], 1.0, math.inf, still, F32, dtype)
        known = wide.isfinite()
        assert torch.equal(got.out[known], wide.to(dtype)[known])
        assert bool(got.out[wide.isnan()].isnan().all())
        reading = rule(betas=(0.0, 0.0))  # then the mean is the gradient
        zeros = torch.zeros(len(grad))
        read = by_kernel(kernel, zeros, [grad], 1.0, math.inf, reading, F32, F32).mean
        torch.testing.assert_close(read, grad.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_nan_and_infinite_gradients_stay_what_they_are(name: str, cache: Path) -> None:
    kernel = choose_kernel(name, cache)
    grad = torch.tensor([1.0, math.nan, math.inf, -math.inf] * 9, dtype=BF16)
    start = torch.ones(36)
    got = by_kernel(kernel, start, [grad], 1.0, 0.5, rule(), F32, BF16)
    assert got.out.isnan().tolist() == [False, True, False, False] * 9
    assert got.mean[2::4].unique().tolist() == pytest.approx([0.1])  # clamped to 0.5
    unbounded = by_kernel(kernel, start, [grad], 1.0, math.inf, rule(), F32, BF16)
    assert unbounded.out.isnan().tolist() == [False, True, True, True] * 9


@pytest.mark.parametrize("grad", SHORT)
def test_result_does_not_depend_on_how_the_work_is_divided(grad: torch.dtype, cache: Path) -> None:
    kernel, given = choose_kernel("native", cache), rule()
    for moments in (F32, BF16):
        whole, parts = (
            AdamTensors(
                master=torch.linspace(-1, 1, 1001),
                mean=torch.zeros(1001, dtype=moments),
                square=torch.zeros(1001, dtype=moments),
                grad=gradients(1001, 1, grad)[0],
                out=torch.empty(1001, dtype=grad),
            )
            for _ in range(2)
        )
        kernel(given, whole, step=1)
        for low, high in ((0, 1), (1, 18), (18, 530), (530, 1001)):
            kernel(given, parts.part(low, high), step=1)
        for one in ("master", "mean", "square", "out"):
            assert torch.equal(getattr(whole, one), getattr(parts, one)), one


def test_parameter_may_be_written_over_its_gradient(cache: Path) -> None:
    kernel = choose_kernel("native", cache)
    grad = gradients(1001, 1, BF16)[0]
    results = []
    for out in (torch.empty(1001, dtype=BF16), grad):
        tensors = AdamTensors(
            master=torch.linspace(-1, 1, 1001),
            mean=torch.zeros(1001),
            square=torch.zeros(1001),
            grad=grad,
            out=out,
        )
        kernel(rule(), tensors, step=1)
        results.append((tensors.master, tensors.out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_moments_in_bfloat16_keep_their_expectation(cache: Path) -> None:
    """After 300 steps of gradient 1 the mean square is 1 - 0.999^300 = 0.259, which rounding to the
    nearest would never reach: at 0.25, a step adds 3e-4 to a number whose last digit is 1e-3.
    """
    given, n = rule(lr=0.0, betas=(0.9, 0.999)), 4096
    grads = [torch.ones(n, dtype=BF16)] * 300
    got = {
        name: by_kernel(
            choose_kernel(name, cache), torch.zeros(n), grads, 1.0, math.inf, given, BF16, BF16
        )
        for name in ("native", "torch")
    }
    wanted = 1 - 0.999**300
    # The error of one entry is about the root of 300 roundings of 1e-3 / 2: 0.009; of the mean
    # of 4096 entries 1.4e-4.
    assert float(got["native"].square.float().mean()) == pytest.approx(wanted, abs=1e-3)
    assert float(got["native"].mean.float().mean()) == pytest.approx(1.0, abs=2e-3)
    for kind in ("mean", "square"):
        same = getattr(got["native"], kind) == getattr(got["torch"], kind)
        assert float(same.float().mean()) > 0.99  # a tie of the last bit may fall elsewhere


def test_dtypes_that_do_not_go_together_are_refused(cache: Path) -> None:
    n = torch.zeros(4)
    tensors = AdamTensors(master=n, mean=n.half(), square=n.half(), grad=n.double(), out=n)
    with pytest.raises(
        OffloadError, match=r"gradients of torch.float64 with moments of torch.float16"
    ):
        choose_kernel("native", cache)(rule(), tensors, step=1)


def test_library_is_compiled_once(cache: Path) -> None:
    first = build_library(kernel_source(), cache)
    before = first.stat().st_mtime_ns
    assert build_library(kernel_source(), cache) == first
    assert first.stat().st_mtime_ns == before
    assert not list(cache.glob("*.part"))


def test_code_that_others_may_have_written_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    library = build_library(kernel_source(), folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    library.write_bytes(b"of a stranger")
    library.chmod(0o777)
    assert build_library(kernel_source(), folder) == library
    assert library.read_bytes() != b"of a stranger"
    assert library.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(OffloadError, match=f"If the folder is yours, use `chmod 700 {folder}`"):
        build_library(kernel_source(), folder)
    folder.chmod(0o700)
    if os.geteuid() == 0:  # only root may give files away
        os.chown(folder, 12345, -1)
        with pytest.raises(OffloadError, match="belongs to another user"):
            build_library(kernel_source(), folder)


def test_unknown_kernel_is_refused(cache: Path) -> None:
    says = r"cpu_kernel='fast' must be 'native', 'torch' or 'auto'\."
    with pytest.raises(ConfigurationError, match=says):
        choose_kernel("fast", cache)


def test_missing_compiler_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OffloadError, match=r"none of nocc is on the PATH.*cpu_kernel='torch'"):
        find_compiler(["nocc"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("exit 3", r"failed with status 3: it printed nothing\."),
        ('case "$*" in *-dM*) exit 0;; esac; echo broken >&2; exit 1', r"status 1: broken\."),
    ],
)
def test_compiler_that_fails_is_an_error(body: str, says: str, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{body}\n")
    compiler.chmod(0o755)
    with pytest.raises(OffloadError, match=says):
        build_library(kernel_source(), tmp_path / "cache", str(compiler))
    assert not list(tmp_path.glob("cache/*"))


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"no file can be written to the folder .*file/cache"):
        build_library(kernel_source(), tmp_path / "file" / "cache")


def test_auto_falls_back_with_a_message_and_native_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_kernel("auto", tmp_path / "cache").name == "torch"
    assert "falls back to the slower 'torch'" in caplog.text
    with pytest.raises(OffloadError, match="no C\\+\\+ compiler"):
        choose_kernel("native", tmp_path / "cache")


def test_damaged_library_is_named(tmp_path: Path) -> None:
    build_library(kernel_source(), tmp_path).write_bytes(b"no library")
    with pytest.raises(OffloadError, match=r"adam-\w+\.so cannot be loaded.*Remove this file"):
        choose_kernel("native", tmp_path)


def test_source_is_shipped_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["lightning_par"]
    shipped = {file for pattern in patterns for file in (ROOT / "lightning_par").glob(pattern)}
    assert kernel_source() in shipped
