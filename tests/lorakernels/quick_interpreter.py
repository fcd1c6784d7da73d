"""Triton's interpreter in a third of its time. It makes the type of every block anew at every operation, which costs it
more than the operation; here those of one name are made once and copied. It asks anew, too, what becomes of two types
in an operation, and replaces the language's functions at each call of a device function, where its kernel's launch has
replaced them; here what left its operands as they were is remembered by the types' names, and a launch replaces once.
What is computed, and how, stays Triton's.
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


def remember_answers() -> None:
    """For this process, of what depends on nothing but the operands' types."""
    from triton.language.semantic import TritonSemantic

    broadcast, cast, promote = (
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.cast,
        TritonSemantic.computation_type_impl,
    )
    alike: set[tuple[str, str]] = set()  # two that need no broadcast
    cast_already: set[tuple[str, str]] = set()
    promoted: dict[Any, Any] = {}

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        key = (lhs.type.name, rhs.type.name)
        if key in alike:
            return lhs, rhs
        found = broadcast(self, lhs, rhs)
        if found[0] is lhs and found[1] is rhs:
            alike.add(key)
        return found

    def cast_to(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        key = (input.type.name, dst_ty.name)
        if key in cast_already:
            return input
        found = cast(self, input, dst_ty)
        if found is input:
            cast_already.add(key)
        return found

    def computation_type_impl(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return promoted[key]

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    TritonSemantic.cast = cast_to
    TritonSemantic.computation_type_impl = computation_type_impl


def patch_once_a_launch() -> None:
    """For this process."""
    from triton import language
    from triton.runtime import interpreter

    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    known: dict[Any, frozenset[int]] = {}  # which of the language's modules a function of these globals sees
    done: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        if fn not in known:
            known[fn] = frozenset(id(v) for v in fn.__globals__.values() if v is language or v is language.core)
        if known[fn] and known[fn] <= done:
            return None  # in a launch whose end restores them; nobody asks for this one's scope
        done.update(known[fn])
        return patch(fn)

    def restored(self: Any) -> None:
        done.clear()
        restore(self)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_lang, restored
