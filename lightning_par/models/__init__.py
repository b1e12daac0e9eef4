"""Reference models: plain one-device modules with a `ParallelPlan`, LightningModules and data."""

from lightning_par.models.bert.config import BertConfig
from lightning_par.models.bert.lightning_module import BertModule
from lightning_par.models.bert.model import Bert, from_hugging_face_bert
from lightning_par.models.data.sentence_pairs import SentenceDataModule
from lightning_par.models.data.text_data_module import TextDataModule
from lightning_par.models.data.token_windows import write_token_file
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.lightning_module import GPTModule
from lightning_par.models.gpt.model import Block, GPT
from lightning_par.models.huggingface import HuggingFaceModule
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.models.mixtral.lightning_module import MixtralModule
from lightning_par.models.mixtral.model import from_hugging_face_mixtral, Mixtral

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
