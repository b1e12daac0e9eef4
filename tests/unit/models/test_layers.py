import pytest
import torch
from torch.nn import functional as F

from lightning_par.models.layers import (
    Attention,
    GeluMLP,
    make_norm,
    RotaryEmbedding,
    rotate,
    SwiGLU,
)

B, T, H = 2, 5, 6


def positions(length: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + length)[None]


def test_grouped_queries_equal_attention_with_expanded_keys_and_values():
    torch.manual_seed(0)
    grouped = Attention(24, num_heads=4, num_kv_heads=2).double()
    full = Attention(24, num_heads=4, num_kv_heads=4).double()
    for name in ("query", "out"):
        getattr(full, name).load_state_dict(getattr(grouped, name).state_dict())
    for name in ("key", "value"):
        weight = getattr(grouped, name).weight.view(2, H, 24).repeat_interleave(2, dim=0)
        getattr(full, name).weight.data = weight.reshape(24, 24)
    x = torch.randn(B, T, 24, dtype=torch.float64)
    rotary = RotaryEmbedding(H)(positions(T))
    torch.testing.assert_close(grouped(x, rotary), full(x, rotary), rtol=0, atol=1e-12)


def test_attention_equals_softmax_written_out_and_never_looks_ahead():
    torch.manual_seed(0)
    attention = Attention(12, num_heads=2, num_kv_heads=2, bias=True).double()
    x = torch.randn(B, T, 12, dtype=torch.float64)
    q, k, v = (m(x).view(B, T, 2, 6).transpose(1, 2) for m in list(attention.children())[:3])
    scores = q @ k.transpose(-1, -2) / 6**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, 12)
    torch.testing.assert_close(attention(x), attention.out(mixed), rtol=0, atol=1e-12)
    changed = x.clone()
    changed[:, 3:] += 1.0
    assert torch.equal(attention(changed)[:, :3], attention(x)[:, :3])


def test_attention_reads_the_numbers_of_heads_at_every_call():
    attention = Attention(24, num_heads=4, num_kv_heads=2)
    for name, rows in (("query", 12), ("key", 6), ("value", 6)):
        linear = getattr(attention, name)
        linear.weight = torch.nn.Parameter(linear.weight[:rows])
    attention.out.weight = torch.nn.Parameter(attention.out.weight[:, :12])
    attention.num_heads, attention.num_kv_heads = 2, 1
    assert attention(torch.randn(B, T, 24)).shape == (B, T, 24)


def test_rotary_scores_depend_on_the_distance_of_positions_only():
    torch.manual_seed(0)
    rotary = RotaryEmbedding(H)
    q, k = torch.randn(2, B, 3, 1, H).expand(2, B, 3, T, H)
    near, far = rotary(positions(T)), rotary(positions(T, first=100))
    scores = [rotate(q, r) @ rotate(k, r).transpose(-1, -2) for r in (near, far)]
    # float32 angles of about 100 are exact to 1e-5
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(rotate(q, near).norm(dim=-1), q.norm(dim=-1))
    assert not torch.allclose(scores[0][..., 0, 0], scores[0][..., 0, 1])


def test_rotary_tables_are_float32_and_hold_no_state_whatever_the_model_is_cast_to():
    rotary = RotaryEmbedding(H).to(torch.bfloat16)
    tables = rotary(torch.tensor([[0, 257], [1, 3], [2, 5]]))
    assert tables.shape == (2, 3, 1, 2, H)
    assert tables.dtype == torch.float32
    assert tables[0, 0, 0, 1, 0] == torch.tensor(257.0).cos()
    assert not rotary.state_dict()
    assert not list(rotary.buffers())
    x = torch.randn(3, 7, 2, H)
    assert rotate(x.bfloat16(), tables).dtype == torch.bfloat16
    assert rotate(x.double(), tables).dtype == torch.float64


def test_mlps_equal_their_formulas():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5)
    swiglu, gelu = SwiGLU(5, 7, bias=True), GeluMLP(5, 7)
    gated = swiglu.gate(x) * torch.sigmoid(swiglu.gate(x)) * swiglu.up(x)
    torch.testing.assert_close(swiglu(x), swiglu.down(gated))
    torch.testing.assert_close(gelu(x), gelu.down(F.gelu(gelu.up(x), approximate="tanh")))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_scale_to_unit_size(kind: str):
    norm = make_norm(kind, 7, eps=1e-6, bias=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    y = norm(torch.randn(2, 3, 7) * 5)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 3), rtol=1e-4, atol=0)
