"""From local text to text: a tokenizer, a small Llama on two ranks, an export that generates.

python examples/huggingface_end_to_end.py --steps 300
"""

import argparse
from itertools import islice
from pathlib import Path

import lightning as L
import torch
from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from lightning_par import Hybrid3DStrategy
from lightning_par.commands.export import export
from lightning_par.models.data.tokenizers import standard_library_files

LENGTH, VOCABULARY = 64, 1000


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


class Writer(L.LightningModule):
    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--files", type=int, default=40, help="of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    files = islice(standard_library_files(), options.files)
    texts = [path.read_text(errors="replace") for path in files]
    tokenizer = make_tokenizer(texts)
    ids = torch.tensor(tokenizer.encode("</s>".join(texts)))
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=1),
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Writer(), DataLoader(samples, batch_size=8, shuffle=True))
    checkpoint, folder = options.out / "writer.ckpt", options.out / "writer"
    trainer.save_checkpoint(checkpoint)
    if not trainer.is_global_zero:
        return
    export(ckpt=str(checkpoint), out=str(folder), format="huggingface")
    tokenizer.save_pretrained(folder)
    # From here on nothing knows of this package.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("def main(", return_tensors="pt")
    written = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=40,
        do_sample=True,
        top_k=20,
        pad_token_id=1,
    )
    print("one process writes:", tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
