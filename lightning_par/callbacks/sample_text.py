"""`SampleText`: texts that the model writes while it trains."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from lightning_par.engine.rng import fork_all_rng, seed_all_generators
from lightning_par.errors import ConfigurationError

__all__ = ["SampleText", "Tokenizer"]


class Tokenizer(Protocol):
    """Turns text into tokens and back, as tokenizers of transformers and `TextDataModule` do."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


class SampleText(Callback):
    """Generates from prompts every few validation epochs or steps, and logs the texts.

    The model is what has a method ``generate(input_ids, max_new_tokens=...)``, as models of
    transformers and `GPT` have: the LightningModule itself, or the first module in it. It is called
    on every rank, for one prompt after the other, in evaluation mode and without gradients. The
    numbers that it draws are the same at every time and on every rank, and no others change.

    A logger that has a method `log_text` gets a table of prompts and texts, as that of Weights &
    Biases; without one, rank 0 prints them.

    Args:
        prompts: Texts, or lists of tokens.
        tokenizer: Encodes prompts and decodes what is written; None: texts are numbers of tokens.
        every_n_epochs: Number of validation epochs from one time to the next.
        every_n_steps: Number of optimizer steps from one time to the next, instead.
        max_new_tokens: Number of tokens to write.
        seed: Of what `generate` draws.
        options: Other options of `generate`, such as ``{"do_sample": True, "top_k": 40}``.

    Attributes:
        texts: Those of the last time, prompts included, on every rank.

    Raises:
        ConfigurationError: A number is less than 1, or a prompt has no token; at the start of
            training, no module has `generate`.

    **Communicates**: what the model does for every token.

    Examples:
        >>> sampling = SampleText([[1, 2, 3]], every_n_steps=100, max_new_tokens=20)
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[int]],
        tokenizer: Tokenizer | None = None,
        *,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        max_new_tokens: int = 50,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        steps = 1 if every_n_steps is None else every_n_steps
        if min(every_n_epochs, steps, max_new_tokens) < 1:
            raise ConfigurationError(
                "LP912",
                "SampleText needs every_n_epochs, every_n_steps and max_new_tokens of 1 or more, "
                f"but got every_n_epochs={every_n_epochs}, every_n_steps={every_n_steps}, "
                f"max_new_tokens={max_new_tokens}.",
            )
        if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
            raise ConfigurationError(
                "LP912",
                "SampleText needs a tokenizer, since a prompt is a text. Pass tokenizer=, or "
                "prompts of token ids.",
            )
        self.prompts, self.tokenizer, self.seed = list(prompts), tokenizer, seed
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        self.max_new_tokens, self.options = max_new_tokens, dict(options or {})
        self.texts: list[str] = []
        self._epochs, self._last_step = 0, 0

    @property
    def calls_model(self) -> str:
        """The hook that calls the model."""
        return "on_validation_epoch_end" if self.every_n_steps is None else "on_train_batch_end"

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if no module generates, or if a prompt has no token."""
        _writer(pl_module)
        if not all(len(self._encode(prompt)) for prompt in self.prompts):
            raise ConfigurationError(
                "LP912",
                "SampleText got a prompt without tokens. Pass prompts with at least one token.",
            )

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write texts, if it is time."""
        if self.every_n_steps is not None or trainer.sanity_checking:
            return
        self._epochs += 1
        if self._epochs % self.every_n_epochs == 0:
            self._sample(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Write texts, if it is time."""
        step = trainer.global_step
        # With gradient accumulation several batches end at the same step.
        if self.every_n_steps is None or step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        self._sample(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, int]:
        return {"epochs": self._epochs, "last_step": self._last_step}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._epochs, self._last_step = state_dict["epochs"], state_dict["last_step"]

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(prompt))

    def _decode(self, tokens: list[int]) -> str:
        return (
            " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)
        )

    def _sample(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        model, device = _writer(module), module.device
        trained = [part for part in module.modules() if part.training]
        module.eval()
        try:
            with torch.no_grad(), fork_all_rng(device):
                seed_all_generators(self.seed, device)
                self.texts = [self._continued(model, prompt, device) for prompt in self.prompts]
        finally:
            for part in trained:
                part.training = True
        self._log(trainer, module)

    def _continued(self, model: Any, prompt: str | Sequence[int], device: torch.device) -> str:
        tokens = torch.tensor([self._encode(prompt)], device=device)
        written = model.generate(tokens, max_new_tokens=self.max_new_tokens, **self.options)
        return self._decode(written[0].tolist())

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        asked = [p if isinstance(p, str) else self._decode(list(p)) for p in self.prompts]
        rows = [list(row) for row in zip(asked, self.texts, strict=True)]
        loggers = [logger for logger in trainer.loggers if hasattr(logger, "log_text")]
        for logger in loggers:
            logger.log_text(key="samples", columns=["prompt", "text"], data=rows, step=step)
        if not loggers:  # on rank 0, beside a progress bar
            module.print("\n".join([f"Texts at step {step}:", *self.texts]))


def _writer(module: nn.Module) -> Any:
    """Return the module that generates."""
    for part in module.modules():
        if callable(getattr(part, "generate", None)):
            return part
    raise ConfigurationError(
        "LP917",
        f"SampleText needs a method generate, but neither {type(module).__name__} nor a submodule "
        "has one. Add generate(input_ids, max_new_tokens=...), which returns the prompt and the "
        "new tokens as a tensor [B, T]; or remove the callback.",
    )
