"""Annotations of shapes and dtypes, such as ``Float[Tensor, "B T D"]``.

They are jaxtyping's where it is installed, and the test run checks them; without it they mean the
tensor type and cost nothing.
"""

from typing import Any, TYPE_CHECKING

__all__ = ["Bool", "Float", "Int", "Shaped"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Shaped
    except ImportError:

        class _Unchecked:
            """Makes ``[Tensor, shape]`` the tensor type."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Shaped = _Unchecked
