"""Models of the structures that libraries have, without a plan, for plans by structure."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn, Tensor
from torch.nn import functional as F

__all__ = [
    "Convolutions",
    "EncoderOfTorch",
    "ImageTransformer",
    "LanguageModel",
    "Mixer",
    "Planless",
    "Skips",
    "StagesOfWindows",
    "fused_by_head",
    "fused_whole_width",
    "grouped_heads",
    "images",
    "separate_heads",
]


class _Separate(nn.Module):
    """Query, key, value, with fewer heads for the last two; a norm over the features of a head."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.n_heads, self.n_groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, groups * self.size)
        self.value = nn.Linear(width, groups * self.size)
        self.norm, self.out = nn.LayerNorm(self.size), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*x.shape[:2], heads, self.size).transpose(1, 2)

        query = self.norm(split(self.query(x), self.n_heads))
        key, value = (split(layer(x), self.n_groups) for layer in (self.key, self.value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class _FusedWhole(nn.Module):
    """One layer for all three, side by side, cut by the whole width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class _FusedByHead(nn.Module):
    """One layer for all three, query, key and value of a head beside each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], self.num_heads, 3 * self.head_dim).transpose(1, 2)
        query, key, value = qkv.chunk(3, -1)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out.transpose(1, 2).flatten(2))


Attention = Callable[[int, int], nn.Module]


def separate_heads(width: int, heads: int) -> nn.Module:
    """Three layers, as many heads for each."""
    return _Separate(width, heads, heads)


def grouped_heads(width: int, heads: int) -> nn.Module:
    """Three layers, half as many heads for key and value."""
    return _Separate(width, heads, heads // 2)


def fused_whole_width(width: int, heads: int) -> nn.Module:
    """One layer, stacked [3, heads, size]."""
    return _FusedWhole(width, heads)


def fused_by_head(width: int, heads: int) -> nn.Module:
    """One layer, interleaved [heads, 3, size]."""
    return _FusedByHead(width, heads)


class _GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, width: int, attention: Attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = attention(width, 4), _GatedMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens [B, T] -> logits [B, T, 64]; the head may be the table."""

    def __init__(self, attention: Attention = separate_heads, *, tied: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(32, 64, bias=False)  # defined before the blocks, used after them
        self.tokens, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.layers = nn.ModuleList(_Block(32, attention) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(places)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class EncoderOfTorch(nn.Module):
    """`nn.TransformerEncoder` over tokens [B, T]; position table as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 32), nn.Parameter(torch.randn(1, 12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x) + self.places))


class ImageTransformer(nn.Module):
    """Images [B, 3, 16, 16] -> logits [B, 10], with a class token and an odd number of tokens."""

    def __init__(self, attention: Attention = fused_whole_width) -> None:
        super().__init__()
        self.cls, self.places = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(32))
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*(_Block(32, attention) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class _WindowBlock(nn.Module):
    """Attention within windows, with a table of biases for each head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads, self.norm = 4, nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias_table = nn.Parameter(torch.randn(4, 4, 4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        windows = self.norm(x).view(-1, 4, width)
        qkv = self.qkv(windows).view(len(windows), 4, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=self.bias_table)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(x)


class _Stage(nn.Module):
    def __init__(self, width: int, depth: int, *, merges: bool) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * width, 2 * width) if merges else nn.Identity()
        width = 2 * width if merges else width
        self.blocks = nn.Sequential(*(_WindowBlock(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.merge, nn.Linear):
            x = x.reshape(x.shape[0], x.shape[1] // 2, -1)
        return self.blocks(self.merge(x))


class StagesOfWindows(nn.Module):
    """Stages of unequal width and depth, each with blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.layers = nn.Sequential(_Stage(16, 2, merges=False), _Stage(16, 3, merges=True))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(tokens)).mean(1))


class _MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Layers over tokens and layers over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*(_MixerBlock() for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


class Convolutions(nn.Module):
    """Blocks of convolutions; with batch norm they depend on the other samples."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stages = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(inplace=True)) for _ in range(4))
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Skips(LanguageModel):
    """The second half of the blocks also gets what the first half gave."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.tokens(x), []
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden + kept.pop() if number >= 2 else hidden)
            if number < 2:
                kept.append(hidden)
        return self.head(self.norm(hidden))


class Planless(pl.LightningModule):
    """Trains any of them on pairs (inputs, labels), and declares no plan."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Residual(nn.Module):
    """A convolution whose output is followed by another one, with groups that are normed."""

    def __init__(self, size: int, of: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(size, of, 3, padding=1), nn.GroupNorm(2, of)
        self.second = nn.Conv2d(of, of, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.norm(self.first(x))))


class UNet(nn.Module):
    """Images [B, 3, 16, 16] -> [B, 10]: what goes down enters, at each size, what goes up."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([Residual(32, 16), Residual(32, 8), Residual(16, 8)])
        self.down = nn.ModuleList([Residual(3, 8), Residual(8, 16), Residual(16, 16)])
        self.middle = nn.ModuleList([Residual(16, 16)])
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for part in self.middle:
            x = part(x)
        for part in self.up:
            x = part(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x.mean((2, 3)))


def images(count: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Random samples: images [3, 16, 16] and classes."""
    return [(torch.randn(3, 16, 16), torch.randint(10, ())) for _ in range(count)]
