"""Low-rank adapters (PEFT) beside the frozen weights of a Llama of transformers.

python lora_llama.py fit --config lora_llama.yaml
"""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from peft import get_peft_model, LoraConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig


class Adapters(L.LightningModule):
    def __init__(self, rank: int = 8, lr: float = 1e-2):
        super().__init__()
        # In place of these two lines: AutoModelForCausalLM.from_pretrained(folder)
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
        config = LlamaConfig(vocab_size=256, num_attention_heads=8, num_key_value_heads=4, **sizes)
        adapters = LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"])
        self.model = get_peft_model(AutoModelForCausalLM.from_config(config), adapters)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class Bytes(L.LightningDataModule):
    """This file, byte by byte; put your tokenizer and your text here."""

    def __init__(self, length: int = 32, batch_size: int = 8):
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def train_dataloader(self):
        tokens = torch.tensor(list(Path(__file__).read_bytes()))
        rows = tokens[: len(tokens) // self.length * self.length].view(-1, self.length)
        samples = [{"input_ids": row, "labels": row} for row in rows]
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


if __name__ == "__main__":
    LightningCLI(Adapters, Bytes)
