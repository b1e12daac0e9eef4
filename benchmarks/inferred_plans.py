"""Plans that are inferred for models of other libraries: right, refused or wrong.

Needs timm, torchvision, litgpt, x-transformers, diffusers and open_clip, or some of them. Every
model trains three steps on two ranks, with tensor and with pipeline parallelism, without a plan;
losses and weights are compared with those of one process. Dropout and DropPath are off, since a
mesh draws other numbers for them; numbers are float64, as a diverging run in float32 magnifies its
rounding. The proof of the first step is off, so that a wrong plan is seen as one.
"""

import argparse
import collections
import importlib.util
import multiprocessing as mp
import os
import queue
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_par.errors import LightningParError
from lightning_par.strategies import Hybrid3DStrategy
from tests.support.parity import quiet_trainer

ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS = {
    "tp2": {**ONES, "tensor_parallel_size": 2},
    "pp2": {**ONES, "pipeline_parallel_size": 2, "num_microbatches": 2},
}
TOLERANCE = 1e-5  # some models compute parts in float32
STEPS, BATCH, CLASSES, VOCAB, LENGTH = 3, 4, 10, 64, 16
LIMIT = 180
Model = tuple[str, Callable[[], nn.Module], str]


def timm_models() -> Iterator[Model]:
    """Give image models of timm."""
    import timm

    small: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4}
    sized = {
        "vit_tiny_patch16_224": {**small, "num_heads": 4},
        "deit_tiny_patch16_224": {**small, "num_heads": 4},
        "beit_base_patch16_224": {**small, "num_heads": 4},
        "cait_xxs24_224": {**small, "num_heads": 4},
        "eva02_tiny_patch14_224": {**small, "num_heads": 4},
        "mixer_s16_224": {"img_size": 32},
        "swin_tiny_patch4_window7_224": {
            "img_size": 32,
            "window_size": 4,
            "embed_dim": 16,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
        "convnext_atto": {"depths": (2, 2, 2, 2), "dims": (8, 16, 32, 64)},
        "resnet10t": {},
        "poolformer_s12": {},
    }
    for name, options in sized.items():
        yield (
            name,
            lambda n=name, o=options: timm.create_model(n, num_classes=CLASSES, **o),
            "image",
        )


def torchvision_models() -> Iterator[Model]:
    """Give image models of torchvision."""
    from torchvision import models

    vit = {"num_layers": 4, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    yield (
        "VisionTransformer",
        lambda: models.VisionTransformer(32, 8, **vit, num_classes=CLASSES),
        "image",
    )
    yield (
        "SwinTransformer",
        lambda: models.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
        ),
        "image",
    )
    kept = {"stochastic_depth_prob": 0.0, "num_classes": CLASSES}
    setting = models.convnext.CNBlockConfig
    yield (
        "ConvNeXt",
        lambda: models.ConvNeXt(
            [setting(8, 16, 2), setting(16, 32, 2), setting(32, None, 2)], **kept
        ),
        "image",
    )
    for name in ("resnet18", "mobilenet_v3_small", "squeezenet1_1"):
        yield name, lambda n=name: models.get_model(n, num_classes=CLASSES), "image"


def litgpt_models() -> Iterator[Model]:
    """Give language models of litgpt, small ones of its named architectures."""
    from litgpt import Config, GPT

    names = ("pythia-14m", "Llama-3.2-1B", "phi-1_5", "falcon-7b", "Mistral-7B-v0.1", "Gemma-2-2b")
    size = {"n_layer": 4, "n_embd": 32, "n_head": 4, "block_size": 32, "intermediate_size": 64}
    for name in names:
        options = {**size, "padded_vocab_size": VOCAB, "n_query_groups": 2, "head_size": 8}

        def make(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return GPT(Config.from_name(name, **options))

        yield name, make, "text"


def x_transformers_models() -> Iterator[Model]:
    """Give language and image models of x-transformers."""
    from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper

    size = {"dim": 32, "depth": 4, "heads": 4}
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "rotary": {"rotary_pos_emb": True},
        "alibi": {"alibi_pos_bias": True},
        "rmsnorm, glu": {"use_rmsnorm": True, "ff_glu": True, "ff_no_bias": True},
        "grouped": {"attn_kv_heads": 2},
        "qk norm": {"attn_qk_norm": True},
        "sandwich norm": {"sandwich_norm": True},
        "relative bias": {"rel_pos_bias": True},
    }
    for name, options in variants.items():

        def make(options: dict[str, Any] = options) -> nn.Module:
            layers = Decoder(**size, **options)
            return TransformerWrapper(num_tokens=VOCAB, max_seq_len=32, attn_layers=layers)

        yield f"decoder, {name}", make, "text"

    def image() -> nn.Module:
        layers = Encoder(**size)
        return ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=layers
        )

    yield "image encoder", image, "image"


class Denoiser(nn.Module):
    """A denoising network of diffusers on images, at one time step."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__()
        self.net, self.options = net, options

    @override
    def forward(self, x: Tensor) -> Tensor:
        options = dict(self.options)
        if options.pop("labels", False):
            options["class_labels"] = torch.zeros(len(x), dtype=torch.long, device=x.device)
        times = torch.full((len(x),), 7, device=x.device)
        out: Tensor = self.net(x, timestep=times, **options, return_dict=False)[0]
        return out[:, :3].mean((2, 3)).repeat(1, 4)[:, :CLASSES]


def diffusers_models() -> Iterator[Model]:
    """Give denoising networks of diffusers."""
    import diffusers

    transformer = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4}
    shape = {"sample_size": 32, "patch_size": 8, "in_channels": 3}
    yield (
        "DiTTransformer2DModel",
        lambda: Denoiser(
            diffusers.DiTTransformer2DModel(**transformer, **shape, norm_num_groups=4, dropout=0.0),
            labels=True,
        ),
        "image",
    )
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    yield (
        "UNet2DModel",
        lambda: Denoiser(
            diffusers.UNet2DModel(
                sample_size=32,
                **blocks,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            )
        ),
        "image",
    )


def open_clip_models() -> Iterator[Model]:
    """Give the towers of open_clip."""
    from open_clip.transformer import TextTransformer, VisionTransformer

    size = {"width": 32, "layers": 4, "heads": 4}
    yield (
        "VisionTransformer",
        lambda: VisionTransformer(
            image_size=32, patch_size=8, mlp_ratio=2.0, output_dim=CLASSES, **size
        ),
        "image",
    )
    text = {"context_length": LENGTH, "vocab_size": VOCAB, "output_dim": CLASSES}
    yield "TextTransformer", lambda: TextTransformer(**text, **size), "tokens"


def transformers_models() -> Iterator[Model]:
    """Give models of transformers that declare no plan of their own."""
    from transformers import AutoConfig, AutoModelForImageClassification

    size = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": CLASSES,
    }
    for kind in ("vit", "beit", "dinov2", "ijepa", "vit_msn", "data2vec-vision"):

        def make(kind: str = kind) -> nn.Module:
            config = AutoConfig.for_model(kind, **size)
            return AutoModelForImageClassification.from_config(config)

        yield kind, make, "image"


LIBRARIES: dict[str, Callable[[], Iterator[Model]]] = {
    "timm": timm_models,
    "torchvision": torchvision_models,
    "litgpt": litgpt_models,
    "x_transformers": x_transformers_models,
    "diffusers": diffusers_models,
    "open_clip": open_clip_models,
    "transformers": transformers_models,
}


class Task(pl.LightningModule):
    """Classifies images, or predicts tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for module in net.modules():
            for name in ("p", "drop_prob", "dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Losses(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["loss"]))


def data(kind: str) -> DataLoader[Any]:
    """Give batches of images or texts."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * BATCH
    classes = torch.randint(CLASSES, (count,), generator=generator)
    if kind == "image":
        return DataLoader(
            TensorDataset(torch.randn(count, 3, 32, 32, generator=generator), classes), BATCH
        )
    tokens = torch.randint(1, VOCAB, (count, LENGTH + 1), generator=generator)
    labels = classes if kind == "tokens" else tokens[:, 1:]
    return DataLoader(TensorDataset(tokens[:, :-1], labels), BATCH)


def body(rank: int, world: int, port: int, library: str, index: int, layout: str, out: Any) -> None:
    """Train on one rank; put what came out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        _, make, kind = list(LIBRARIES[library]())[index]
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        module, losses = Task(make()), Losses()
        strategy: Any = "auto"
        if world > 1:
            strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=False)  # type: ignore[arg-type]
        trainer = quiet_trainer(strategy=strategy, devices=world, max_epochs=1, callbacks=[losses])
        trainer.fit(module, data(kind))
        # As arrays, which travel by value: the sender of a tensor has to outlive its receiver.
        weights = {name: w.detach().numpy() for name, w in module.named_parameters()}
        out.put((rank, "trained", (losses.found, weights)))
    except LightningParError as error:
        out.put((rank, "refused", str(error)))
    except BaseException:
        out.put((rank, "crash", traceback.format_exc()))


def run(world: int, *job: Any) -> tuple[str, Any]:
    """Run `body` on ranks that are forked from here; give what rank 0, or who failed, says."""
    context = mp.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = context.Queue()
    ranks = [context.Process(target=body, args=(r, world, port, *job, out)) for r in range(world)]
    for process in ranks:
        process.start()
    said: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + LIMIT
    while len(said) < world and time.monotonic() < deadline:
        try:
            rank, kind, what = out.get(timeout=1)
        except queue.Empty:
            continue
        said[rank] = kind, what
        if kind == "crash":
            deadline = min(deadline, time.monotonic() + 10)
    for process in ranks:
        process.kill()
        process.join()
    worst = [said[r] for r in said if said[r][0] != "trained"]
    kinds = [w for w in worst if w[0] == "refused"] or worst
    if kinds:
        return kinds[0]
    return said[0] if len(said) == world else ("hang", "")


def compare(found: Any, wanted: Any) -> float:
    """Give the largest difference of a loss or an element of a weight, relative if above 1."""
    pairs = list(zip(found[0], wanted[0], strict=True))
    pairs += [(found[1][name], weight) for name, weight in wanted[1].items()]
    return max(float((abs(a - b) / np.maximum(1.0, abs(b))).max()) for a, b in pairs)


def main() -> None:
    """Print a line for every model and layout, and the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(LIBRARIES), help="names of libraries")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in LAYOUTS}
    models = 0
    for library in options.only:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed")
            continue
        for index, (name, _, _) in enumerate(LIBRARIES[library]()):
            models += 1
            kind, wanted = run(1, library, index, "")
            if kind != "trained":
                print(f"{library} {name}: does not train on one process: {wanted[-300:]}")
                continue
            for layout, count in counts.items():
                kind, found = run(2, library, index, layout)
                text = ""
                if kind == "trained":
                    error = compare(found, wanted)
                    kind, text = ("right" if error <= TOLERANCE else "WRONG"), f"{error:.1e}"
                elif found:
                    text = found if kind == "refused" else found[-600:]
                count[kind] += 1
                print(f"{library} {name} {layout}: {kind} {text[:600]}", flush=True)
    print(f"{models} models; {', '.join(f'{n}: {dict(c)}' for n, c in counts.items())}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
