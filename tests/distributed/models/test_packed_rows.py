"""Rows of several documents in models of transformers: equal to one process, or refused."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.user_code.test_families import Family
from tests.support.user_code import Cases

CASES = Cases(__name__)
LENGTH, V = 16, 48
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "use_cache": False,  # beside a cache, transformers looks for no documents
}


def rows(*, mask: str | None = None) -> list[dict[str, Any]]:
    """Return rows of two or three documents, cut at other places in every row.

    Args:
        mask: Whether there is a mask of padding ("ones") or of documents ("documents"), too.
    """
    found = []
    for place in range(32):
        cuts = [0, 2 + place % 5, 9 + place % 4, LENGTH][:: 1 if place % 3 else 3]
        tokens = torch.randint(3, V, (LENGTH,))
        labels, positions = tokens.clone(), torch.empty(LENGTH, dtype=torch.long)
        seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for a, b in pairwise(cuts):
            positions[a:b] = torch.arange(b - a)
            seen[a:b, a:b] = True
            labels[a] = -100  # nothing of the document before tells it
        row = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        if mask == "ones":
            row["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        elif mask == "documents":
            row["attention_mask"] = seen.tril()[None]
        found.append(row)
    return found


def flat(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the rows of a batch to one, as transformers' `DataCollatorWithFlattening` does."""
    joined = {name: torch.cat([row[name] for row in batch])[None] for name in batch[0]}
    starts = (joined["position_ids"][0] == 0).nonzero()[:, 0].int()
    bounds = torch.cat([starts, torch.tensor([joined["input_ids"].shape[1]], dtype=torch.int32)])
    longest = int(bounds.diff().max())
    return {
        **joined,
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
        **dict.fromkeys(("max_length_q", "max_length_k"), longest),
    }


def case(name: str, family: str, *rest: Any, **cells: Any) -> None:
    """Add a case: a language model of a family, causal if nothing else is said."""
    options, mask = cells.pop("config", {}), cells.pop("mask", None)
    kind = cells.pop("kind", transformers.AutoModelForCausalLM)

    def make() -> tuple[Any, ...]:
        config = transformers.CONFIG_MAPPING[family](**{**_SIZES, **options})
        return Family(kind.from_config(config)), rows(mask=mask), *rest

    make.__name__ = name
    CASES.add(**{"tolerance": 1e-6, **cells})(make)


_EQUAL = "tp2 pp2 zero3"
case("positions_that_begin_anew", "llama", equal=_EQUAL + " cp2", large="tp2pp2 cp2pp2 cp2tp2")
case("windows", "mistral", config={"sliding_window": 4}, equal=_EQUAL + " cp2")
case("norms_of_heads", "qwen3", equal="pp2 cp2", large="tp2 zero3")
case("sinks", "granite_swa", config={"sliding_window": 4}, equal=_EQUAL + " cp2")
case("positions_beside_a_mask_of_padding", "llama", mask="ones", equal=_EQUAL + " cp2")
case("masks_of_documents", "llama", mask="documents", equal=_EQUAL, refused={"cp2": "LP304"})
# There the documents of a row see each other, on one process as well.
case("beside_a_cache", "llama", config={"use_cache": True}, equal="pp2 cp2")
case(
    "without_a_cache",
    "bert",
    kind=transformers.AutoModelForMaskedLM,
    refused={"cp2": "treats the row as several documents"},
)
# A batch of one row is one micro-batch.
case("one_row_of_all", "llama", flat, equal=_EQUAL + " cp2")


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
