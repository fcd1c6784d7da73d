"""Triton's interpreter in half of its time. It makes the type of every block anew at every operation, which costs it
more than the operation; here those of one name are made once and copied. What is computed, and how, stays Triton's.
"""

from __future__ import annotations

from typing import Any


def remember_types() -> None:
    """For this process. Nothing changes a type, or a tensor's shape, once it is made."""
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle)

    def of_name(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, of_name
