"""Reference models: plain one-device modules with a plan, their LightningModule and data."""

from lightning_par.models.bert import Bert, from_hugging_face_bert
from lightning_par.models.bert_config import BertConfig
from lightning_par.models.bert_module import BertModule
from lightning_par.models.data import TextDataModule
from lightning_par.models.gpt import Block, GPT
from lightning_par.models.gpt_config import GPTConfig
from lightning_par.models.gpt_module import GPTModule
from lightning_par.models.sentences import SentenceDataModule
from lightning_par.models.token_data import write_token_file

__all__ = [
    "GPT",
    "Bert",
    "BertConfig",
    "BertModule",
    "Block",
    "GPTConfig",
    "GPTModule",
    "SentenceDataModule",
    "TextDataModule",
    "from_hugging_face_bert",
    "write_token_file",
]
