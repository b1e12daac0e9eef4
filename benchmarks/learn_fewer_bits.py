"""Learning on real text with the moments of AdamW in float32, in bfloat16 and in two bytes."""

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
from _learn import Losses, make_trainer, quiet
from torch.optim.lr_scheduler import LambdaLR

from lightning_par.models import GPTModule, TextDataModule
from lightning_par.models.language_module import group_parameters
from lightning_par.optimizers import AdamW

FORMS = ("torch.optim.AdamW", "bfloat16", "packed")


class _Module(GPTModule):
    states: Any = None

    def configure_optimizers(self) -> Any:
        if self.states not in FORMS[1:]:
            return super().configure_optimizers()
        groups = group_parameters(self.named_parameters(), weight_decay=self.weight_decay)
        optimizer = AdamW(groups, lr=self.lr, betas=self.betas, states=self.states)
        schedule = {"scheduler": LambdaLR(optimizer, self._lr_factor), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def _learn(states: str, seed: int, steps: int) -> tuple[float, float, float]:
    """Return the mean loss of the last 100 steps, that of held-out batches at the end, and the
    seconds of a step.
    """
    pl.seed_everything(seed, verbose=False)
    losses, module = Losses(), _Module("tiny", max_steps=steps, warmup_steps=20)
    module.states = states
    trainer = make_trainer(steps, callbacks=[losses])
    begin = time.process_time()
    trainer.fit(module, TextDataModule(length=64, batch_size=8, seed=seed))
    seconds = (time.process_time() - begin) / steps
    validated = float(trainer.callback_metrics["val_loss"])
    return statistics.mean(losses.values[-100:]), validated, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    quiet()
    print(f"{'':<20}last 100 steps, val, ms of CPU time a step; for each seed")
    for states in FORMS:
        found = [_learn(states, seed, given.steps) for seed in given.seeds]
        cells = [f"{last:.4f} {val:.4f} {1e3 * seconds:.1f}" for last, val, seconds in found]
        print(f"{states:<20}{'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
