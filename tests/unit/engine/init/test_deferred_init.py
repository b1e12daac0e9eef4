"""Initialization: what is recorded on meta gives the values of the ordinary constructor."""

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.nn.init import orthogonal_, trunc_normal_
from torch.overrides import TorchFunctionMode

from lightning_par.engine.init.deferred_init import ConstructionRecord, record_construction
from lightning_par.engine.rng import seed_of

T, D, V, LAYERS = 24, 48, 97, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D, bias=False)
        self.scale = nn.Parameter(torch.randn(D, 5) * 0.3 + 2)
        self.gate = nn.Parameter(torch.zeros(D))
        self.bound = nn.Parameter(torch.empty(D, 7).uniform_(-0.5, 0.5))
        self.legacy = nn.Parameter(torch.Tensor(D, 11))
        trunc_normal_(self.legacy, std=0.1, a=-0.15, b=0.15)
        with torch.no_grad():
            self.qkv.weight[2 * D :].mul_(0.25)
            self.qkv.bias.data[:3] = 9.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D, padding_idx=4)
        self.position = nn.Parameter(torch.randn(T, D))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.basis = nn.Linear(D, D, bias=False)
        self.head = nn.Linear(D, V, bias=False)
        inv = 1 / 10000 ** (torch.arange(0, D, 2).float() / D)
        self.register_buffer("inv_freq", inv)
        self.apply(self._init)
        orthogonal_(self.basis.weight, gain=2)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS))
        self.head.weight = self.embed.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.weight.data[4].zero_()


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, ConstructionRecord]:
    with record_construction() as record:
        model = make()
    return model, record


def values(model: nn.Module, record: ConstructionRecord, seed: int = 3) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n: record.initialize(p, name=n, seed=seed, device="cpu") for n, p in named}


def one(make: Callable[[], nn.Module], name: str = "w") -> Tensor:
    model, record = build(make)
    return values(model, record)[name]


def holder(make: Callable[[nn.Module], None]) -> Callable[[], nn.Module]:
    """Return a constructor of a module that `make` fills in."""

    def build_holder() -> nn.Module:
        module = nn.Module()
        make(module)
        return module

    return build_holder


def assert_same_statistics(given: Tensor, wanted: Tensor, name: str) -> None:
    """Six standard errors; `given` and `wanted` are samples of the same size."""
    assert given.shape == wanted.shape, name
    assert given.dtype == wanted.dtype, name
    n, spread = given.numel(), wanted.std(correction=0).item()
    assert abs(given.mean() - wanted.mean()) <= 6 * spread * math.sqrt(2 / n) + 1e-7, name
    assert abs(given.std(correction=0) - spread) <= 6 * spread / math.sqrt(n) + 1e-7, name


def test_statistics_equal_the_ordinary_constructor() -> None:
    model, record = build(Net)
    torch.manual_seed(0)
    ordinary = dict(Net().named_parameters())
    given = values(model, record)
    assert given.keys() == ordinary.keys()
    for name, value in given.items():
        assert_same_statistics(value, ordinary[name].detach(), name)


def test_slices_and_structure_are_kept() -> None:
    model, record = build(Net)
    given = values(model, record)
    bound = 1 / math.sqrt(D)
    weight, bias = given["blocks.1.qkv.weight"], given["blocks.1.qkv.bias"]
    assert weight[2 * D :].abs().max() <= bound / 4
    assert bound * 0.9 < weight[: 2 * D].abs().max() <= bound
    assert (bias[:3] == 9).all()
    assert bias[3:].abs().max() <= bound
    assert (given["embed.weight"][4] == 0).all()
    assert given["blocks.0.legacy"].abs().max() <= 0.15
    eye = given["basis.weight"] @ given["basis.weight"].T
    torch.testing.assert_close(eye, 4 * torch.eye(D), atol=1e-5, rtol=0)


def test_parameters_are_meta_and_buffers_are_real_and_equal() -> None:
    model, _ = build(Net)
    assert all(p.is_meta and isinstance(p, nn.Parameter) for p in model.parameters())
    assert torch.equal(model.get_buffer("inv_freq"), Net().get_buffer("inv_freq"))


def test_functions_of_init_are_recorded_inside_modes_of_the_constructor() -> None:
    def make(module: nn.Module) -> None:
        module.cut = nn.Parameter(torch.zeros(9, 7))
        trunc_normal_(module.cut, std=0.02)
        module.basis = nn.Parameter(torch.zeros(9, 7))
        orthogonal_(module.basis)

    def make_inside(module: nn.Module) -> None:
        with torch.device("cpu"), torch.device("cpu"):
            make(module)

    plain, inside = (values(*build(holder(m))) for m in (make, make_inside))
    assert all(value.any() for value in plain.values())
    assert all(torch.equal(inside[name], value) for name, value in plain.items())


def test_tied_parameters_stay_one() -> None:
    model, record = build(Net)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert record.knows(model.get_parameter("head.weight"))


def test_a_parameter_that_the_model_has_already_stays_real_where_it_is_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4)})
    with record_construction(model.parameters()):
        model["head"] = nn.Linear(4, 8, bias=False)
        model["head"].weight = model["embed"].weight
    assert model["head"].weight is model["embed"].weight
    assert not model["head"].weight.is_meta


def test_one_parameter_used_by_two_modules_stays_one() -> None:
    def fill(module: nn.Module) -> None:
        weight = nn.Parameter(torch.randn(3, 5))
        module.a, module.b = nn.Module(), nn.Module()
        module.a.w, module.b.w = weight, weight
        nn.init.constant_(weight, 7)

    model, record = build(holder(fill))
    assert model.get_parameter("a.w") is model.get_parameter("b.w")
    assert (values(model, record)["a.w"] == 7).all()


def test_part_of_a_model_equals_the_whole_bit_for_bit() -> None:
    whole = values(*build(Net))
    model, record = build(Net)
    for name in ("head.weight", "blocks.2.scale", "blocks.1.legacy", "basis.weight"):
        canonical = name.replace("head", "embed")
        part = record.initialize(model.get_parameter(name), name=canonical, seed=3, device="cpu")
        assert torch.equal(part, whole[canonical]), name


def test_values_depend_on_name_and_seed_only() -> None:
    model, record = build(Net)
    first = values(model, record)
    for name in ("qkv.weight", "scale", "bound", "legacy"):
        assert not torch.equal(first[f"blocks.0.{name}"], first[f"blocks.1.{name}"])
    assert not torch.equal(values(model, record, seed=4)["position"], first["position"])
    torch.manual_seed(99)
    again = values(*build(Net))
    assert all(torch.equal(first[n], again[n]) for n in first)


FRESH = """
import torch
from tests.unit.engine.init.test_deferred_init import Net, build, values
torch.manual_seed({seed})
print(sum(v.double().sum().item() * i for i, v in enumerate(values(*build(Net)).values(), 1)))
"""


def test_same_values_in_a_fresh_process() -> None:
    command = [sys.executable, "-c", FRESH.format(seed=1)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    here = sum(v.double().sum().item() * i for i, v in enumerate(values(*build(Net)).values(), 1))
    assert float(ran.stdout) == here


def test_generator_of_torch_is_left_alone() -> None:
    model, record = build(Net)
    before = torch.get_rng_state()
    values(model, record)
    assert torch.equal(torch.get_rng_state(), before)


MEMORY = """
import resource, torch
from torch import nn
from lightning_par.engine.init.deferred_init import record_construction
with record_construction():
    nn.Linear(3, 5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with record_construction() as record:
    model = nn.Sequential(nn.Embedding(20000, 1000), *(nn.Linear(2000, 2000) for _ in range(20)))
    model.apply(lambda m: nn.init.trunc_normal_(m.weight, std=.02) if hasattr(m, "weight") else 0)
    model.table = nn.Parameter(torch.empty(500, 1000).normal_())
count = sum(p.numel() for p in model.parameters())
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_building_100_million_parameters_takes_under_20_megabytes() -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    count, kilobytes = map(int, run.stdout.split())
    assert count > 100e6
    assert kilobytes < 20e3


def test_record_holds_no_values_of_drawn_parameters() -> None:
    _, record = build(Net)
    tape = record._tape
    held = sum(t.untyped_storage().nbytes() for t in tape._constants.values())
    assert held <= LAYERS * D * 11 * 4  # torch.Tensor(...) alone is not seen by the dispatcher


def test_default_dtype_and_conversion() -> None:
    def fill(module: nn.Module) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        module.a = nn.Linear(3, 5)
        module.w = nn.Parameter(torch.randn(3, 5))
        torch.set_default_dtype(before)

    model, record = build(holder(fill))
    double = values(model, record)
    assert {v.dtype for v in double.values()} == {torch.float64}
    model.to(torch.bfloat16)
    half = values(model, record)
    for name, value in half.items():
        assert torch.equal(value, double[name].to(torch.bfloat16)), name
    asked = record.initialize(
        model.get_parameter("w"), name="w", seed=3, device="cpu", dtype=torch.float64
    )
    assert torch.equal(asked, double["w"])


def test_conversion_inside_the_context() -> None:
    def fill(module: nn.Module) -> None:
        module.a = nn.Linear(3, 5).to(torch.float64)
        nn.init.constant_(module.a.bias, 1 / 3)

    model, record = build(holder(fill))
    given = values(model, record)
    assert (given["a.bias"] == torch.tensor(1 / 3, dtype=torch.float64)).all()
    weight = given["a.weight"]
    assert torch.equal(weight, weight.float().double())


def test_outer_meta_device_context_works() -> None:
    with torch.device("meta"):
        model, record = build(lambda: nn.Linear(3, 5))
        given = values(model, record)
    assert torch.equal(given["weight"], values(*build(lambda: nn.Linear(3, 5)))["weight"])


def test_copies_of_a_layer_start_equal() -> None:
    def fill(module: nn.Module) -> None:
        layer = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True)
        module.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        module.other = nn.Linear(6, 10)

    model, record = build(holder(fill))
    given = values(model, record)
    first, second = (given[f"stack.layers.{i}.linear1.weight"] for i in (0, 1))
    assert torch.equal(first, second)
    assert first.std() > 0.1
    record.remember(model)
    model.to(torch.bfloat16)
    assert torch.equal(values(model, record)["stack.layers.0.linear1.weight"], first.bfloat16())


def test_parameter_computed_from_another_reads_the_same_draw() -> None:
    normed = lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))  # noqa: E731
    given = values(*build(normed))
    size = given["parametrizations.weight.original0"]
    direction = given["parametrizations.weight.original1"]
    assert torch.equal(size, direction.norm(dim=1, keepdim=True))


def test_initialization_by_its_own_statistics_is_replayed() -> None:
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.empty(30, 70))
        nn.init.uniform_(module.w)
        with torch.no_grad():
            module.w.div_(module.w.std())
            module.w.add_(torch.ones(70))

    given = one(holder(fill))
    assert given.std().item() == pytest.approx(1, abs=1e-3)
    assert given.min() >= 1


def test_values_not_from_torch_are_kept() -> None:
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0]]))
        module.v = nn.Parameter(torch.log(torch.arange(1, 8).float()))

    model, record = build(holder(fill))
    given = values(model, record)
    assert given["w"].tolist() == [[1, 2, 3]]
    assert torch.equal(given["v"], torch.log(torch.arange(1, 8).float()))


def test_explicit_generator_does_not_matter() -> None:
    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.empty(3, 5))
        module.w.data.normal_(generator=torch.Generator().manual_seed(5))

    assert torch.equal(one(holder(fill)), one(holder(fill)))


def test_other_threads_are_not_affected() -> None:
    made: list[nn.Module] = []
    with record_construction():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(3, 5)))
        thread.start()
        thread.join()
    assert not made[0].weight.is_meta
    assert F.linear(torch.ones(1, 3), made[0].weight).isfinite().all()


def test_seed_is_stable_and_has_63_bits() -> None:
    assert seed_of(1, "a") == 1515775267073163690
    assert 0 <= seed_of(1, "a") < 2**63
    assert len({seed_of(1, "a"), seed_of(1, "b"), seed_of(2, "a"), seed_of("1", "a")}) == 4


class FirstRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(7, 3)
        self.rows = nn.Parameter(table[:2])
        nn.init.constant_(self.rows, 5.0)
        self.columns = nn.Parameter(table.t()[:, 1:3])


def test_a_parameter_that_is_the_start_of_a_larger_tensor() -> None:
    model, record = build(FirstRows)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        "rows": (2, 3),
        "columns": (3, 2),
    }
    found = values(model, record)
    ordinary = FirstRows()
    assert torch.equal(found["rows"], ordinary.rows)
    assert torch.equal(found["columns"], ordinary.columns)


class Counted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_functions_see_little_more_than_the_constructor_calls() -> None:
    # The more they see, the longer a large model takes: Lightning has two of them on.
    with Counted() as plain:
        Net()
    with Counted() as counted, record_construction():
        Net()
    assert counted.calls < 2 * plain.calls


SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_transformers_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=True)
    make = getattr(transformers, heads[family])
    model, record = build(lambda: make(config))
    torch.manual_seed(0)
    ordinary = make(config)
    assert all(p.is_meta for p in model.parameters())
    for (name, buffer), (_, wanted) in zip(
        model.named_buffers(), ordinary.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, wanted), name
    wanted_values = dict(ordinary.named_parameters())
    given = values(model, record)
    assert given.keys() == wanted_values.keys()
    for name, value in given.items():
        assert_same_statistics(value, wanted_values[name].detach(), name)
