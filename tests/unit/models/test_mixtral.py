"""Mixtral in one process: routing, balance, products per expert, numbers against transformers."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.activations.checkpointing import recompute
from lightning_par.errors import ConfigurationError
from lightning_par.models import from_hugging_face_mixtral, Mixtral, MixtralConfig
from lightning_par.models.mixtral.grouped_linear import GroupedLinear, RowCounts, supports_grouped
from lightning_par.models.mixtral.moe import Experts, MoELayer, Router
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes

SIZES = {"model_dim": 12, "num_heads": 3, "ff_dim": 20, "num_experts": 5, "num_layers": 2}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(torch.float32)


def mixture(**options) -> MoELayer:
    return MoELayer(MixtralConfig(**{**SIZES, **options}))


def expert(made: MoELayer, index: int, x: Tensor) -> Tensor:
    """What one expert says to every token."""
    gate, up, down = (getattr(made.experts, n).weight[index] for n in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_adds_up_the_answers_of_the_k_likeliest_experts(k):
    made, x = mixture(experts_per_token=k), torch.randn(3, 7, 12, requires_grad=True)
    out, _ = made(x)
    probabilities = made.router.gate(x).softmax(-1)
    weights, chosen = probabilities.topk(k)
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = torch.zeros_like(x)
    for e in range(5):
        weight = (weights * (chosen == e)).sum(-1, keepdim=True)
        wanted = wanted + weight * expert(made, e, x)
    torch.testing.assert_close(out, wanted)
    parameters = [x, *made.parameters()]
    got = torch.autograd.grad(out.square().sum(), parameters, retain_graph=True)
    want = torch.autograd.grad(wanted.square().sum(), parameters)
    torch.testing.assert_close(got, want)


def test_switch_drops_the_later_tokens_of_a_full_expert():
    made = mixture(routing="switch", experts_per_token=1, capacity_factor=1.0)
    x = torch.randn(3, 10, 12)
    made.router.train()
    out, _ = made(x)
    probability, chosen = made.router.gate(x).softmax(-1).max(-1)
    dropped = 0
    for b in range(3):
        room = dict.fromkeys(range(5), 2)  # 1.0 * 10 / 5
        for t in range(10):
            e = int(chosen[b, t])
            room[e] -= 1
            fits = room[e] >= 0
            dropped += not fits
            wanted = probability[b, t] * expert(made, e, x[b, t]) if fits else torch.zeros(12)
            torch.testing.assert_close(out[b, t], wanted)
    assert dropped > 0
    assert made.router.record.dropped == dropped
    assert torch.equal(made.router.record.load, torch.bincount(chosen.flatten(), minlength=5) + 0.0)


def test_every_expert_chooses_its_likeliest_tokens():
    made = mixture(routing="expert_choice", balance="none")
    x = torch.randn(3, 10, 12)
    out, _ = made(x)
    probabilities = made.router.gate(x).softmax(-1)
    wanted = torch.zeros_like(x)
    for b in range(3):
        for e in range(5):
            weight, tokens = probabilities[b, :, e].topk(5)  # 1.25 * 2 * 10 / 5
            wanted[b, tokens] += weight[:, None] * expert(made, e, x[b, tokens])
    torch.testing.assert_close(out, wanted)


def test_noise_changes_the_choice_in_training_only():
    made = mixture(routing="noisy_top_k")
    x, noise = torch.randn(3, 7, 12), torch.randn(3, 7, 5)
    quiet, noisy = made(x)[0], made(x, noise)[0]
    assert not torch.allclose(quiet, noisy)
    out = made.router(x, noise)
    scores = made.router.gate(x) + noise * F.softplus(made.router.noise(x))
    chosen = scores.topk(2).indices
    assert torch.equal(out.counts, torch.bincount(chosen.flatten(), minlength=5))
    model = Mixtral(MixtralConfig(**SIZES, routing="noisy_top_k"))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert not torch.equal(model(ids)[0], model(ids)[0])
    model.eval()
    assert torch.equal(model(ids)[0], model(ids)[0])


def test_all_tokens_at_one_expert_leave_the_others_with_gradient_zero():
    made, x = mixture(experts_per_token=1, balance="bias"), torch.randn(2, 7, 12)
    made.router.bias_steps[3] = 10**6
    out, _ = made(x)
    torch.testing.assert_close(out, expert(made, 3, x))
    out.square().sum().backward()
    for name, parameter in made.experts.named_parameters():
        others = [0, 1, 2, 4]
        assert parameter.grad[3].abs().sum() > 0, name
        assert parameter.grad[others].abs().sum() == 0, name


def test_shared_experts_see_every_token():
    made, x = mixture(num_shared_experts=2), torch.randn(2, 7, 12)
    with_shared, _ = made(x)
    assert made.shared.up.weight.shape == (40, 12)
    wanted = made.shared(x)
    made.shared = None
    torch.testing.assert_close(with_shared - made(x)[0], wanted)


def test_losses_of_the_router_are_those_of_the_papers_and_skip_padding():
    router = Router(MixtralConfig(**SIZES)).train()
    x, counted = torch.randn(3, 7, 12), torch.arange(7)[None] < torch.tensor([[7], [2], [5]])
    losses = router(x, None, counted).losses
    logits = router.gate(x[counted])
    probabilities = logits.softmax(-1)
    share = F.one_hot(probabilities.topk(2).indices, 5).sum((0, 1)) / (2 * len(logits))
    torch.testing.assert_close(losses[0], 5 * (share * probabilities.mean(0)).sum())
    torch.testing.assert_close(losses[1], logits.logsumexp(-1).square().mean())
    assert int(router.record.tokens) == 14
    torch.nn.init.zeros_(router.gate.weight)
    torch.testing.assert_close(router(x).losses[0], torch.tensor(1.0))
    torch.testing.assert_close(router(x).losses[1], torch.tensor(math.log(5) ** 2))


def test_bias_follows_the_load_and_leaves_the_weights_of_the_answers_alone():
    router = Router(MixtralConfig(**SIZES, balance="bias", bias_rate=0.3)).train()
    x = torch.randn(3, 7, 12)
    plain = router(x)
    router.finish_step()
    load = torch.bincount(router.gate(x).softmax(-1).topk(2).indices.flatten(), minlength=5)
    assert torch.equal(router.bias_steps, (load.double().mean() - load).sign().long())
    moved = router(x)
    assert not torch.equal(moved.counts, plain.counts)
    probabilities = router.gate(x).softmax(-1)
    chosen = (probabilities + 0.3 * router.bias_steps).topk(2).indices
    weights = probabilities.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(moved.weights.sort().values, weights.flatten().sort().values)
    assert moved.losses[0] == 0
    assert "bias_steps" in router.state_dict()
    assert "bias_steps" not in Router(MixtralConfig(**SIZES)).state_dict()


def test_grouped_product_equals_the_loop_also_for_experts_without_rows():
    if not supports_grouped("cpu", torch.float32):
        pytest.skip("this torch has no F.grouped_mm for float32 on the CPU")
    counts = torch.tensor([5, 0, 17, 3])
    x = torch.randn(25, 32, dtype=torch.float32)
    padded = torch.cat([x, torch.full((4, 32), math.nan, dtype=torch.float32)])
    results = []
    for backend, given in (("grouped", x), ("loop", x), ("grouped", padded), ("loop", padded)):
        torch.manual_seed(3)
        layer, rows = GroupedLinear(4, 32, 48, backend).float(), given.clone().requires_grad_()
        out = layer(rows, RowCounts(counts))
        assert len(out) == len(given)
        out[:25].sin().sum().backward()
        results.append((out[:25], rows.grad[:25], layer.weight.grad))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-5)
    empty = GroupedLinear(4, 32, 48, "grouped").float()(x[:0], RowCounts(counts * 0))
    assert empty.shape == (0, 48)


# Of torch itself, where a graph breaks at what has a gradient function.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_compile_and_without_a_break_where_their_products_are_one_kernel(dtype):
    if not supports_grouped("cpu", dtype):
        pytest.skip(f"this torch has no F.grouped_mm for {dtype} on the CPU")
    experts = Experts(4, 32, 48, "grouped").to(dtype)
    whole = dtype == torch.bfloat16
    compiled = torch.compile(experts.compute, backend="aot_eager", fullgraph=whole)
    counts, x = torch.tensor([5, 0, 17, 3]), torch.randn(25, 32).to(dtype)
    results = []
    for compute in (experts.compute, compiled):
        rows = x.clone().requires_grad_()
        out, _ = compute(rows, counts)
        out.sin().sum().backward()
        results.append((out, rows.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("stacked", [True, False])
def test_mixtral_gives_the_logits_of_transformers(stacked):
    transformers = pytest.importorskip("transformers")
    torch.set_default_dtype(torch.float32)
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    other = {"num_key_value_heads": 2, "intermediate_size": 40, "num_local_experts": 5}
    more = {"max_position_embeddings": 32, "rope_theta": 1e4, "head_dim": 6}
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **other, **more, tie_word_embeddings=False)
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = MixtralConfig(
        vocab_size=61,
        num_layers=3,
        model_dim=24,
        num_heads=4,
        num_kv_heads=2,
        ff_dim=40,
        num_experts=5,
        tied_head=False,
    )
    ours = Mixtral(config).eval()
    state = theirs.state_dict()
    has_stacks = any(n.endswith("gate_up_proj") for n in state)
    if not stacked and has_stacks:
        state = _as_released(state)
    ours.load_state_dict(from_hugging_face_mixtral(state), strict=True)
    ids = torch.randint(0, 61, (4, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=1e-5, rtol=1e-5)


def _as_released(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give every expert three matrices of its own, as the published checkpoints have it."""
    released = {}
    for name, value in state.items():
        base = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("gate_up_proj"):
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                released[f"{base}.{e}.w1.weight"], released[f"{base}.{e}.w3.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            released |= {f"{base}.{e}.w2.weight": down for e, down in enumerate(value)}
        else:
            released[name.replace(".mlp.gate", ".block_sparse_moe.gate")] = value
    return released


@pytest.mark.parametrize(
    ("preset", "published"),
    [("tiny", None), ("mixtral-8x7b", 46_702_792_704), ("mixtral-8x22b", 140_620_634_112)],
)
def test_presets_have_the_published_sizes_and_a_whole_plan(preset, published):
    config = MixtralConfig.preset(preset)
    with torch.device("meta"):
        model = Mixtral(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    assert config.num_parameters == published or published is None
    active = config.linear_parameters - config.vocab_size * config.model_dim
    unused = (config.num_experts - 2) * 3 * config.model_dim * config.ff_dim * config.num_layers
    blocks = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    assert active == blocks - unused
    check_plan(model, model.parallel_plan(), ParallelSizes(tensor=2, pipeline=4))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"experts_per_token": 9}, r"experts_per_token=9 must be 1 .. num_experts=8"),
        ({"num_experts": 0}, r"num_experts=0 must be 1 or more"),
        ({"routing": "top1"}, r"routing='top1' must be 'top_k' or 'switch' or"),
        (
            {"routing": "switch"},
            r"each token to one expert, but experts_per_token=2\. Use experts_per_token=1",
        ),
        (
            {"routing": "expert_choice"},
            r"balance='auxiliary' is not supported with routing='expert_choice'",
        ),
        ({"capacity_factor": 0, "z_weight": -1}, r"(?s)capacity_factor=0 must.*z_weight=-1 must"),
        ({"positions": "learned", "bias": True}, r"(?s)positions='learned' must be.*bias=True"),
        ({"num_exprts": 3}, r"'num_exprts' is not a field of MixtralConfig; did you mean 'num_exp"),
    ],
)
def test_bad_sizes_are_refused(values, says):
    with pytest.raises(ConfigurationError, match=says):
        MixtralConfig.preset("tiny", **values)
    with pytest.raises(ConfigurationError, match=r"'huge' is none of tiny, small"):
        MixtralConfig.preset("huge")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_recomputed_router_counts_every_token_once(mode):
    model = Mixtral(MixtralConfig(**SIZES, balance="bias")).train()
    plain = copy.deepcopy(model)
    for block in model.blocks:
        recompute(block, mode)
    ids = torch.randint(0, 50, (2, 7))
    for each in (plain, model):
        # Two micro-batches, the first of which finds no record.
        for part in ids.split(1):
            logits, losses = each(part)
            (logits.square().mean() + losses.sum()).backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        got, want = block.moe.router, other.moe.router
        assert int(got.record.tokens) == ids.numel()
        assert torch.equal(got.record.load, want.record.load)
        assert torch.equal(got.step_load, want.step_load)
