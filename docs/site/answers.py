"""Writes answers.json: the layouts of common questions, as `lightning-par search` gives them.

    python docs/site/answers.py

which_layout.md shows them as a table, and its calculator beside the plain answer.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calculator_data import configurations

from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.plain_layout import plain_layout
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Planner

FILE = Path(__file__).with_name("answers.json")
PRECISION = "bf16-mixed"
USUAL = 256
"""Sequences of a step that the table does not name."""
# Model, device, nodes, sequences of a step.
QUESTIONS = (
    ("gpt2", "a100-40", 1, 256),
    ("gpt2-xl", "a100-40", 1, 256),
    ("gpt3-1.3b", "a100-80", 1, 256),
    ("gpt3-2.7b", "a100-40", 1, 256),
    ("gpt3-6.7b", "a100-80", 1, 256),
    ("gpt3-6.7b", "h100", 1, 256),
    ("llama2-7b", "a100-80", 1, 256),
    ("llama2-7b", "a100-80", 2, 256),
    ("llama3-8b", "h100", 1, 16),
    ("llama3-8b", "h100", 1, 256),
    ("llama3-8b", "h200", 1, 256),
    ("llama3-8b", "h100", 2, 256),
    ("gpt3-13b", "a100-80", 1, 256),
    ("gpt3-13b", "a100-80", 2, 256),
    ("gpt3-13b", "a100-40", 2, 256),
    ("gpt3-13b", "h100", 2, 256),
    ("llama3-70b", "h100", 4, 256),
    ("llama3-70b", "a100-80", 8, 256),
    ("llama3-70b", "h100", 8, 256),
    ("mixtral mixtral-8x7b", "h100", 2, 64),
)


def answers() -> Iterator[dict[str, Any]]:
    """Yield every question with its answers: the plain layout, the fastest, and their times."""
    configs = configurations()
    for model, device, nodes, samples in QUESTIONS:
        profile = load_profile(device)
        planner = Planner(
            shape=read_shape(configs[model]),
            device=profile,
            code=implementation(PRECISION, profile),
        )
        space = LayoutSpace(devices=nodes * profile.node, node=profile.node, samples=samples)
        fastest = planner.search(space).best[0]
        plain = plain_layout(planner, space)
        assert plain is not None
        found = planner.predict(plain)
        yield {
            "model": model,
            "device": device,
            "nodes": nodes,
            "samples": samples,
            "plain": str(plain),
            "plain_seconds": round(found.time.seconds, 3),
            "fastest": str(fastest.layout),
            "fastest_seconds": round(fastest.time.seconds, 3),
        }


def table(found: list[Mapping[str, Any]]) -> str:
    """Return the answers as a table of Markdown."""
    lines = ["| model | devices | plain answer | fastest by `search` | plain takes |"]
    lines.append("|---|---|---|---|---|")
    for one in found:
        name, count = one["model"].split()[-1], one["samples"]
        model = name if count == USUAL else f"{name}, {count} sequences"
        devices = f"{load_profile(one['device']).node * one['nodes']} {one['device']}"
        longer = one["plain_seconds"] / one["fastest_seconds"] - 1
        plain, fastest = (one[key].removesuffix(", recompute none") for key in ("plain", "fastest"))
        fastest = "the same" if fastest == plain else fastest
        lines.append(f"| {model} | {devices} | {plain} | {fastest} | {longer:+.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, answers())) + "\n]\n")
