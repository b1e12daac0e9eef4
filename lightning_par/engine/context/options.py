"""Options of context parallelism: how sequences are sharded over the ``cp`` axis."""

from dataclasses import dataclass
from typing import get_args, Literal

from lightning_par.engine.context.kernels.select import check_backend
from lightning_par.errors import ConfigurationError, either, raise_problems

__all__ = ["ContextOptions"]


Method = Literal["ring", "ulysses", "hybrid"]


_CHOICES = {
    "method": get_args(Method),
    "layout": ("zigzag", "contiguous"),
    "route": ("direct", "ring"),
}


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options of context parallelism.

    Attributes:
        method: ``"ring"`` sends keys and values; ``"ulysses"`` exchanges tokens for heads before
            and after attention; ``"hybrid"`` does the latter in groups of `ulysses_size`
            neighboring ranks, and a ring joins the groups.
        ulysses_size: Ranks of a group under ``"hybrid"``.
        layout: ``"zigzag"`` gives all members of a ring the same work under a causal mask;
            ``"contiguous"`` gives each consecutive tokens.
        route: ``"direct"`` sends keys and values from their owner to the ranks that need them,
            ``"ring"`` from neighbor to neighbor, for machines whose devices share one network card.
        backend: Attention kernel; see ``lightning-par backends``.

    Examples:
        >>> options = ContextOptions(method="hybrid", ulysses_size=2)
    """

    method: Method = "ring"
    ulysses_size: int | None = None
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    route: Literal["direct", "ring"] = "direct"
    backend: str = "auto"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be {either([repr(v) for v in valid])}."
            for name, valid in _CHOICES.items()
            if getattr(self, name) not in valid
        ]
        size = self.ulysses_size
        if self.method == "hybrid":
            if not isinstance(size, int) or isinstance(size, bool) or size < 2:
                problems.append(
                    f"ulysses_size={size!r} must be a whole number of 2 or more with "
                    "method='hybrid'."
                )
        elif size is not None:
            problems.append(
                f"ulysses_size={size!r} needs method='hybrid': with method={self.method!r} the "
                "number of ranks that exchange heads is fixed."
            )
        raise_problems(ConfigurationError, "LP902", problems)

    def ulysses(self, degree: int) -> int:
        """Return how many neighboring ranks exchange heads.

        Args:
            degree: Size of the context axis.

        Raises:
            ConfigurationError: `ulysses_size` does not divide it.
        """
        if self.method != "hybrid":
            return degree if self.method == "ulysses" else 1
        assert self.ulysses_size is not None
        if degree % self.ulysses_size:
            fits = [n for n in range(2, degree + 1) if degree % n == 0]
            hint = f"Use {either(fits)}." if fits else "Use method='ring'."
            raise ConfigurationError(
                "LP307",
                f"ulysses_size={self.ulysses_size} does not divide context_parallel_size={degree}. "
                + hint,
            )
        return self.ulysses_size

    def check(self) -> None:
        """Check that this machine has the attention backend.

        Raises:
            ConfigurationError: It does not; the message lists the backends that work here.
        """
        check_backend(self.backend)
