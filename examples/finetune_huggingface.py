"""Fine-tune a folder of save_pretrained: python examples/finetune_huggingface.py FOLDER"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import lightning_par  # noqa: F401  (registers the strategies)


class FineTune(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.config = AutoConfig.from_pretrained(folder)

    def configure_model(self):  # parameters made here take no memory until they are placed
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_config(self.config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    folder = sys.argv[1]
    tokens = torch.tensor(list(Path(__file__).read_bytes()))  # here goes your tokenizer
    samples = [{"input_ids": row, "labels": row} for row in tokens[:1024].view(-1, 32)]
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="tensor_parallel", max_epochs=1)
    trainer.fit(FineTune(folder), DataLoader(samples, batch_size=8), ckpt_path=folder)
    trainer.save_checkpoint("tuned.ckpt")
    print("lightning-par export --format huggingface --ckpt tuned.ckpt --out tuned")
