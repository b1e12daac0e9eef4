import hashlib
from contextlib import contextmanager


class ConstructionRecord: ...


@contextmanager
def record_construction():
    yield ConstructionRecord()


def seed_of(*parts):
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")
