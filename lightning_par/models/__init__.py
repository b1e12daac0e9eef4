"""Reference models: plain one-device modules with a plan, their LightningModule and data."""

from lightning_par.models.data import TextDataModule
from lightning_par.models.gpt import Block, GPT
from lightning_par.models.gpt_config import GPTConfig
from lightning_par.models.gpt_module import GPTModule
from lightning_par.models.token_data import write_token_file

__all__ = ["GPT", "Block", "GPTConfig", "GPTModule", "TextDataModule", "write_token_file"]
