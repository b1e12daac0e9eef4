"""Reference models: plain one-device modules with a plan, their LightningModule and data."""

from lightning_par.models.bert import Bert, from_hugging_face_bert
from lightning_par.models.bert_config import BertConfig
from lightning_par.models.bert_module import BertModule
from lightning_par.models.data import TextDataModule
from lightning_par.models.gpt import Block, GPT
from lightning_par.models.gpt_config import GPTConfig
from lightning_par.models.gpt_module import GPTModule
from lightning_par.models.huggingface_module import HuggingFaceModule
from lightning_par.models.mixtral import from_hugging_face_mixtral, Mixtral
from lightning_par.models.mixtral_config import MixtralConfig
from lightning_par.models.mixtral_module import MixtralModule
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
    "HuggingFaceModule",
    "Mixtral",
    "MixtralConfig",
    "MixtralModule",
    "SentenceDataModule",
    "TextDataModule",
    "from_hugging_face_bert",
    "from_hugging_face_mixtral",
    "write_token_file",
]
