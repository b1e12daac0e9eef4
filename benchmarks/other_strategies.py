"""What the first step of Lightning's own strategies computes, on two ranks, against one process.

python -m benchmarks.other_strategies [--only TEXT]

`FirstStepProof` judges each module under each strategy, in float32. Prints a table, and every
difference with its likely cause. "fails": also without the callback.
"""

import argparse
import warnings
from typing import Any

from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_par.callbacks import FirstStepProof
from tests.support.models.other_strategies import divided, MODULES, STRATEGIES, strategy_named
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import close_ranks, RankError, run_ranks

__all__ = ["judge"]


def judge(rank: int, world: int, module: str, strategy: str, proves: bool = True) -> Any:
    """Run a step on one rank, and return the report of its proof."""
    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    subject, callback = MODULES[module], FirstStepProof()
    made = subject.make()
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy_named(strategy),
        callbacks=[callback] if proves else [],
        max_steps=1,
        limit_val_batches=0,
        **subject.trainer,
    )
    data = DataLoader(subject.samples(), 4)
    trainer.fit(divided(made) if strategy.startswith("ModelParallel") else made, data)
    return callback.report


def _verdict(report: Any) -> str:
    if report.unknown:
        return "not proved"
    return "equal" if report.equal else f"**{report.difference.kind}**"


def _fails(name: str, strategy: str) -> bool:
    """Whether the run fails without the proof, too."""
    try:
        run_ranks(judge, 2, name, strategy, False, timeout=120)
    except RankError:
        return True
    return False


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="modules whose names contain this")
    chosen = [name for name in MODULES if parser.parse_args().only in name]
    print(f"| module | {' | '.join(STRATEGIES)} |\n|{'---|' * (len(STRATEGIES) + 1)}")
    told: dict[str, str] = {}
    for name in chosen:
        cells = []
        for strategy in STRATEGIES:
            try:
                (report, *_) = run_ranks(judge, 2, name, strategy, timeout=120)
            except RankError as error:
                cells.append("fails" if _fails(name, strategy) else "fails in the proof")
                told[f"{name}, {strategy}"] = str(error).splitlines()[0]
                continue
            cells.append(_verdict(report))
            if not report.equal:
                told[f"{name}, {strategy}"] = str(report)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for what, text in told.items():
        print(f"\n{what}: {text}")
    close_ranks()


if __name__ == "__main__":
    # Ranks find `judge` by the name of its module, which is not that of the command.
    from benchmarks.other_strategies import main as run

    run()
