"""Small random Hugging Face models in a LightningModule as a user would write it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset

VOCAB, TOKENS = 37, 12

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}


def _causal(kind: str, **options: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{kind}Config")
    values = {**_GROUPED, "tie_word_embeddings": False, **options}
    return lambda: transformers.AutoModelForCausalLM.from_config(config(**values))


def _mixtral(**options: Any) -> Callable[[], nn.Module]:
    return _causal("Mixtral", num_local_experts=4, experts_implementation="eager", **options)


def _bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**_SIZES, **off))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=24,
        n_layer=3,
        n_head=6,
        n_positions=16,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=6,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _causal("Llama"),
    "llama tied": _causal("Llama", tie_word_embeddings=True),
    "mistral": _causal("Mistral", sliding_window=None),
    "mixtral": _mixtral(),
    "mixtral aux": _mixtral(output_router_logits=True, router_aux_loss_coef=0.5),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=8),
    "t5": _t5,
}

WIDE = {"mixtral wide": _mixtral(hidden_size=96, intermediate_size=64, num_hidden_layers=4)}
"""Of a size at which a batch and tables of positions are nothing beside the weights."""


_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _modernbert() -> nn.Module:
    config = transformers.ModernBertConfig(**_SIZES, local_attention=6, layer_types=_LAYERS)
    return transformers.AutoModelForMaskedLM.from_config(config)


ATTENTIONS = {
    "mistral window": _causal("Mistral", sliding_window=5),
    "gemma3": _causal("Gemma3Text", head_dim=8, sliding_window=4, layer_types=_LAYERS),
    "modernbert": _modernbert,
    "deepseek": _causal(
        "DeepseekV3",
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=3,
    ),
}
"""Windows of tokens in all layers or in some; heads whose values have another size."""


class Adapted(nn.Module):
    """A low-rank adapter beside a frozen layer, with the names that PEFT gives."""

    def __init__(self, layer: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = layer
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(up.weight, std=0.1)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) / 2


def _adapted(first: int) -> Callable[[], nn.Module]:
    """Freeze a Llama; adapt some layers of the blocks from number `first` on."""

    def make() -> nn.Module:
        model = FAMILIES["llama"]()
        model.requires_grad_(False)
        for block in model.model.layers[first:]:
            for owner in (block.self_attn, block.mlp):
                for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
                    if hasattr(owner, name):
                        setattr(owner, name, Adapted(getattr(owner, name)))
        return model

    return make


COMPUTED = {"hrm": _causal("HrmText", num_hidden_layers=2, head_dim=4)}
"""Models that store some weights joined, which is undone when they are loaded."""
ADAPTED = {"adapters": _adapted(0), "adapters on top": _adapted(2)}
MODELS = {**FAMILIES, **WIDE, **ATTENTIONS, **COMPUTED, **ADAPTED}


def auto_class(family: str) -> Any:
    """What reads the folder of a family."""
    kinds = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    return kinds.get(family, transformers.AutoModelForCausalLM)


class HFModule(pl.LightningModule):
    """Nothing here knows of a mesh."""

    def __init__(self, family: str, on_meta: bool = False, by_name: bool = False) -> None:
        super().__init__()
        self.family, self.by_name = family, by_name
        torch.manual_seed(5)
        if not on_meta:
            self.model = MODELS[family]()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = MODELS[self.family]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.by_name:
            batch = {key: batch[key] for key in ("input_ids", "labels", "attention_mask")}
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A pipeline stage may have nothing to train, and an optimizer wants something to hold.
        trained = [p for p in self.parameters() if p.requires_grad] or self.parameters()
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class PaddedText(Dataset[dict[str, Tensor]]):
    """Random tokens of unequal lengths, padded at the end; padding is no target.

    The first label of a row counts for BERT and T5, and is never a target of a causal model. What
    is `explicit` says where its tokens are, and causal labels are shifted already.
    """

    def __init__(self, size: int, family: str, padded: bool = True, explicit: bool = False) -> None:
        self.explicit = explicit
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, VOCAB, (size, TOKENS), generator=generator)
        self.masked, self.padded = family == "bert", padded

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = TOKENS - (5 * index) % 9 if self.padded else TOKENS
        mask = (torch.arange(TOKENS) < length).long()
        ids = torch.where(mask == 1, self.ids[index], 0)
        labels = torch.where(mask == 1, ids, -100)
        if self.masked:
            hidden = (torch.arange(TOKENS) + index) % 3 == 0
            labels, ids = torch.where(hidden, labels, -100), torch.where(hidden, 1, ids)
        sample = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.explicit:
            sample["position_ids"] = torch.arange(TOKENS) + 2
        if self.explicit and not self.masked:
            sample["shift_labels"] = torch.cat([labels[1:], labels.new_full((1,), -100)])
        return sample


class PaddedTextData(pl.LightningDataModule):
    """Batches of four."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(PaddedText(8, "llama"), batch_size=4)
