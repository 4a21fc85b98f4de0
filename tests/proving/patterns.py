"""Small replicas, a few channels wide, of what well-known architectures are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Attention as most vision transformers write it: one layer for queries, keys and values; sizes remembered."""

    def __init__(self, dim: int, heads: int, *, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.fused = heads, dim // heads, fused
        self.scale = self.head_dim**-0.5
        self.attn_dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, self.attn_dim))


class Block(nn.Module):
    """A transformer block with layer scale."""

    def __init__(self, dim: int, heads: int, *, fused: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(dim, 10), nn.GELU(), nn.Dropout(0.1), nn.Linear(10, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, a class token, position embeddings, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 12, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.position = nn.Parameter(torch.randn(1, 5, 12))
        self.blocks = nn.Sequential(Block(12, 3), Block(12, 2, fused=False))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.norm(self.blocks(x))[:, 0]


class Encoder(nn.Module):
    """torch's own transformer layers: heads are tied to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=6, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embed(words))
        return out.mean(1)


class WindowAttention(nn.Module):
    """Windows of a map, shifted by a roll, with a table of relative biases; the head's width is taken from C."""

    index: Tensor

    def __init__(self, dim: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift, self.window = heads, shift, 2
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.randn(9, heads) * 0.1)
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + 1
        self.register_buffer("index", apart[0] * 3 + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.window
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        qkv = self.qkv(x).reshape(len(x), s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1).unsqueeze(0)
        x = ((q @ k.transpose(-2, -1)) * 0.5 + bias).softmax(-1) @ v
        x = self.proj(x.transpose(1, 2).reshape(-1, s * s, c))
        x = x.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    """Two windowed blocks and a merging of patches between them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, stride=2)
        self.first, self.second = WindowAttention(8, 2, 0), WindowAttention(12, 3, 1)
        self.norm = nn.LayerNorm(32)
        self.merge = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        x = x + self.first(x)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        x = self.merge(self.norm(x))
        return (x + self.second(x)).mean((1, 2))


class Grid(nn.Module):
    """Attention over a sparse grid, as in MaxViT, after a convolution with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)
        self.attn = Attention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.stem(x)))
        x = x * self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        b, c, h, w = x.shape
        y = x.view(b, c, 2, h // 2, 2, w // 2).permute(0, 3, 5, 2, 4, 1).reshape(-1, 4, c)
        y = self.attn(y).view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 3, 1, 4, 2).reshape(b, c, h, w)
        return (x + y).mean((2, 3))


class ChannelFirstNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norms in both forms, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 2, stride=2), ChannelFirstNorm(6)
        self.depth, self.norm = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        y = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return (x + self.scale * y.permute(0, 3, 1, 2)).mean((-2, -1))


class MobileNet(nn.Module):
    """An inverted residual with squeeze and excitation (MobileNetV3, EfficientNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(4, 9, 1, bias=False), nn.BatchNorm2d(9), nn.SiLU(inplace=True))
        self.depth = nn.Sequential(nn.Conv2d(9, 9, 3, padding=1, groups=9, bias=False), nn.BatchNorm2d(9))
        self.squeeze, self.excite = nn.Conv2d(9, 2, 1), nn.Conv2d(2, 9, 1)
        self.project = nn.Sequential(nn.Conv2d(9, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.hardswish(self.depth(self.expand(x)))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return F.adaptive_avg_pool2d(x + self.project(y), 1).flatten(1)


class ShuffleNet(nn.Module):
    """Two branches, concatenated and shuffled, then cut in half again."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(3, 4, 3, stride=2)
        self.inner = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.last = nn.Conv2d(8, 5, 1)

    @staticmethod
    def shuffle(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], dim=1))
        a, b = x.chunk(2, dim=1)
        x = torch.cat([a, F.relu(self.inner(b))], dim=1)
        return F.relu(self.last(x)).mean((2, 3))


class DenseNet(nn.Module):
    """Each layer reads all before it; a transition; normalization before activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(7), nn.BatchNorm2d(10)])
        self.layers = nn.ModuleList([nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(7, 3, 3, padding=1)])
        self.transition = nn.Conv2d(10, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=False):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        x = F.relu(self.norms[2](torch.cat(features, 1)))
        return F.avg_pool2d(self.transition(x), 4).flatten(1)


class Inception(nn.Module):
    """Parallel branches of different kernels and a pooling branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 3, padding=1)
        self.row, self.column = nn.Conv2d(5, 4, (1, 3), padding=(0, 1)), nn.Conv2d(5, 4, (3, 1), padding=(1, 0))
        self.pool = nn.Conv2d(3, 2, 1)
        self.last = nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        three = F.relu(self.three(x))
        pooled = self.pool(F.max_pool2d(x, 3, stride=1, padding=1))
        x = torch.cat([self.one(x), torch.cat([self.row(three), self.column(three)], 1), pooled], 1)
        return F.relu(self.last(F.relu(x).mean((2, 3))))


class Mixer(nn.Module):
    """MLPs over positions and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return (x + self.channels(self.norm2(x))).mean(1)


class ResNeXt(nn.Module):
    """A bottleneck of groups with a projected shortcut; RegNet's gate on it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.up = nn.Conv2d(8, 6, 1)
        self.shortcut = nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.down(x)), inplace=True)
        y = F.relu(self.norm2(self.groups(y)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return F.relu(self.up(y) + self.shortcut(x)).mean((2, 3))


class Gated(nn.Module):
    """RMS norm, a gated MLP cut by chunk, and one by GLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.norm = nn.RMSNorm(6)
        self.both, self.back = nn.Linear(6, 8), nn.Linear(4, 6)
        self.glu = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        value, gate = self.both(self.norm(x)).chunk(2, dim=-1)
        return F.glu(self.glu(x + self.back(F.silu(gate) * value)))


class StandardizedConv(nn.Conv2d):
    """Each filter is brought to mean 0 and variance 1 before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class BigTransfer(nn.Module):
    """Standardized convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = StandardizedConv(3, 8, 3), nn.GroupNorm(4, 8)
        self.next = StandardizedConv(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.next(F.relu(self.norm(self.stem(x))))).mean((2, 3))


class Functional(nn.Module):
    """No layers, only parameters and functions; 1-D and 3-D convolutions; an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, 3, 3) * 0.3), nn.Parameter(torch.zeros(6))
        self.line, self.cube = nn.Conv1d(6, 4, 3), nn.Conv3d(1, 3, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(5, 4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        cubes = F.relu(self.cube(x.unsqueeze(1))).mean((2, 3, 4))
        x = F.relu(F.conv2d(x, self.weight, self.bias)).flatten(2)
        x = torch.einsum("bcn,oc->bon", F.relu(self.line(x)), self.mix)
        return torch.cat([F.max_pool1d(x, 3).mean(-1), cubes], dim=1)


class Decoder(nn.Module):
    """Transposed convolutions, whole and by channel, and a buffer of zeros that goes with the features."""

    zeros: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2)
        self.up, self.spread = nn.ConvTranspose2d(6, 5, 2, stride=2), nn.ConvTranspose2d(5, 5, 2, groups=5)
        self.bias = nn.Parameter(torch.randn(6))
        self.register_buffer("zeros", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down(x)) * (torch.stack([self.bias, self.zeros]).sum(0) + 1).view(-1, 1, 1)
        return F.pad(F.relu(self.spread(self.up(x))), (1, 1, 0, 0)).mean((2, 3))


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(2))
PATTERNS: dict[str, tuple[type[nn.Module], Tensor, int, int]] = {
    # name: class, input, axes, those of them that a statistic couples
    "VisionTransformer": (VisionTransformer, IMAGES, 5, 1),
    "Encoder": (Encoder, WORDS, 3, 1),
    "Swin": (Swin, IMAGES, 2, 1),
    "Grid": (Grid, IMAGES, 3, 0),
    "ConvNeXt": (ConvNeXt, IMAGES, 2, 1),
    "MobileNet": (MobileNet, IMAGES, 3, 0),
    "ShuffleNet": (ShuffleNet, IMAGES, 2, 0),
    "DenseNet": (DenseNet, IMAGES, 4, 0),
    "Inception": (Inception, IMAGES, 6, 0),
    "Mixer": (Mixer, IMAGES, 3, 1),
    "ResNeXt": (ResNeXt, IMAGES, 3, 0),
    "Gated": (Gated, ROWS, 3, 1),
    "BigTransfer": (BigTransfer, IMAGES, 2, 1),
    "Functional": (Functional, IMAGES, 4, 1),
    "Decoder": (Decoder, IMAGES, 2, 1),
}


class Llama(nn.Module):
    """Groups of queries share a key and a value; rotated by places; a gated MLP; RMS norms."""

    inverse: Tensor

    def __init__(self, *, repeat: bool = False) -> None:
        super().__init__()
        self.embed, self.num_key_value_groups, self.repeat = nn.Embedding(11, 16), 2, repeat
        self.q, self.k, self.v = (nn.Linear(16, n, bias=False) for n in (24, 12, 12))
        self.o = nn.Linear(24, 16, bias=False)
        self.gate, self.up, self.down = nn.Linear(16, 10), nn.Linear(16, 10), nn.Linear(10, 16)
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.register_buffer("inverse", 1.0 / 10 ** torch.tensor([0.0, 1.0]), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None].to(self.inverse.dtype) @ self.inverse[None]
        angles = torch.cat([angles, angles], -1).to(x.dtype)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angles.cos() + turned * angles.sin()

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        y = self.norm1(x)
        q, k, v = (f(y).view(*y.shape[:2], -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.rotated(q), self.rotated(k)
        if self.repeat:
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        x = x + self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        y = self.norm2(x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y))).mean(1)


class RepeatingLlama(Llama):
    """Likewise, keys and values repeated by hand."""

    def __init__(self) -> None:
        super().__init__(repeat=True)


class Recurrent(nn.Module):
    """Two layers of an LSTM in both directions, a GRU, and a plain recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 5), nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True)
        self.gru, self.plain = nn.GRU(8, 6, batch_first=True, bias=False), nn.RNN(6, 5, batch_first=True)
        self.last = nn.Linear(5, 4)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.plain(self.gru(self.lstm(self.embed(words))[0])[0])
        return self.last(states[:, -1].relu())


class Packed(nn.Module):
    """Sentences of several lengths, packed for an LSTM and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.last = nn.Embedding(11, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        lengths = 1 + (words[:, 1:] > 4).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        states, (last, _) = self.lstm(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        return self.last(torch.cat([states.sum(1), last[0]], 1))


class Cells(nn.Module):
    """Recurrent layers stepped through by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.plain = nn.LSTMCell(5, 6), nn.GRUCell(6, 4), nn.RNNCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, kept, last = None, None, None
        for _ in range(3):
            state = self.lstm(x, state)
            kept = self.gru(state[0], kept)
            last = self.plain(kept, last)
        assert last is not None
        return last


PATTERNS |= {
    "Llama": (Llama, WORDS, 3, 1),
    "RepeatingLlama": (RepeatingLlama, WORDS, 3, 1),
    "Recurrent": (Recurrent, WORDS, 5, 0),
    "Packed": (Packed, WORDS, 3, 0),
    "Cells": (Cells, ROWS, 3, 0),
}
