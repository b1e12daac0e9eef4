"""The command that checks the certificate of a run, and compares two."""

from pathlib import Path

from lightning_par.commands import PathName
from lightning_par.observe.certificate import differences, read_certificate

__all__ = ["certificate"]


def certificate(run: PathName, other: PathName | None = None) -> int:
    """Print and check the certificate.json that a run has written: what it was, which steps were
    proved to equal those of one process, and a hash of its weights. Of two runs, say what is equal
    and what differs.

    Exits with status 1 if a certificate was changed after the run, or two runs differ in precision,
    seed, number of steps or data.

    Args:
        run: Directory of a run, or its certificate.
        other: Directory of another run.

    Raises:
        ConfigurationError: There is no certificate, or it was changed.
    """
    one = read_certificate(Path(run))
    if other is None:
        print(*one.lines(), "checked: its hash is that of its content", sep="\n")
        return 0
    equal, different, is_same = differences(one, read_certificate(Path(other)))
    print(f"equal: {', '.join(equal) or 'nothing'}")
    print(*(f"differs: {text}" for text in different), sep="\n")
    if not is_same:
        print("not the same run on two meshes: precision, seed, steps or data differ")
    return 0 if is_same else 1
