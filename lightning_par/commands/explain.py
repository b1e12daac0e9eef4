"""The command that explains the codes of errors."""

from lightning_par.commands import fill
from lightning_par.errors import ConfigurationError, nearest
from lightning_par.errors.catalogue import entries, families

__all__ = ["explain"]


def explain(code: list[str]) -> None:
    """Explain the code at the end of an error: its cause, an example and the cure.

    Args:
        code: A code, such as LP203; none: list all codes.

    Raises:
        ConfigurationError: A code does not exist.
    """
    codes, known = [each.upper() for each in code], entries()
    unknown = [each for each in codes if each not in known]
    if unknown:
        hint = nearest(unknown[0], known)
        raise ConfigurationError(
            "LP905", f"{', '.join(unknown)} is no error code of lightning_par{hint}"
        )
    if codes:
        print("\n\n".join(fill(str(known[each])) for each in codes))
        return
    for family, title in families().items():
        titles = (f"{each}  {e.title}" for each, e in known.items() if each.startswith(family))
        print(f"{title}\n", *titles, "", sep="\n")
