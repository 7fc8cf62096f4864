"""Recognize the model families of transformers whose parts can be fused, and code that replaced theirs.

Libraries replace classes and functions of transformers, such as a class's forward or ``rotate_half``. A fused
part computes what the original functions compute. So each fused part checks in each call that the functions
for which it stands are still the original ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NamedTuple

from torch import nn

from coda_agent.fused.huggingface.stack import hooked

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
# The families that pass a sliding window to attention, and where their attention modules read it.
WINDOWS = {"mistral": "config", "qwen2": "attention", "qwen3": "attention"}
REPLACED = "other code replaced"
# The methods of a family's classes for which fused parts stand. Gemma's norm has a ``_norm``.
METHODS = ("forward", "_norm")


def _classes(module: nn.Module, suffix: str) -> Iterator[tuple[type, bool]]:
    """Yield each family's class whose name ends in ``suffix``, such as LlamaDecoderLayer, from which a
    module's class descends, and whether it is the module's class."""
    exact = True
    for cls in _bases(module):
        if (name := _family(cls)) and cls.__name__.lower() == name + suffix.lower():
            yield cls, exact
        exact = False


def _bases(module: nn.Module) -> Iterator[type]:
    """A module's class and its base classes, without the classes that FSDP puts before them."""
    for cls in type(module).__mro__:
        if not cls.__module__.startswith("torch.distributed") and not cls.__name__.startswith("FSDP"):
            yield cls


def _family(cls: type) -> str:
    name = cls.__module__.removeprefix("transformers.models.").partition(".")[0]
    return name if name in FAMILIES and cls.__module__ == place(name) else ""


def place(name: str) -> str:
    """The name of the Python module that defines a family's classes."""
    return f"transformers.models.{name}.modeling_{name}"


def family(module: nn.Module, suffix: str) -> str:
    """The family of a model's class, such as "llama" for LlamaDecoderLayer. For any other class, and for a
    user's subclass, the result is ""."""
    return next((_family(cls) for cls, exact in _classes(module, suffix) if exact), "")


def descends(module: nn.Module, suffix: str) -> bool:
    """Whether a module's class is a family's class or a subclass of one."""
    return next(_classes(module, suffix), None) is not None


class Code(NamedTuple):
    """Functions of a class or of a Python module. None stands for a function that other code had replaced."""

    holder: type | str  # the class, or the module's name
    functions: tuple[tuple[str, Callable[..., Any] | None], ...]

    def replaced(self, module: nn.Module | None = None) -> str:
        """Say which function other code has replaced; return "" if they all are the original ones.
        ``module``: an instance of the class, which may have got another class since."""
        holder: Any = sys.modules[self.holder] if isinstance(self.holder, str) else self.holder
        if module is not None and next(_bases(module)) is not holder:
            return f"its class is now {kind(module)}"
        for name, function in self.functions:
            if function is None or getattr(holder, name) is not function:
                return f"{REPLACED} {holder.__name__.rpartition('.')[2]}.{name}"
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        return code_of, (self.holder, *(name for name, _ in self.functions))


def code_of(holder: type | str, *names: str) -> Code:
    """The functions with these names, of a class or of an imported Python module."""
    module: Any = sys.modules.get(holder if isinstance(holder, str) else holder.__module__)
    prefix, owner = ("", module) if isinstance(holder, str) else (f"{holder.__name__}.", holder)
    functions = {name: getattr(owner, name) for name in names}
    return Code(
        holder, tuple((n, f if _original(f, module, prefix + n) else None) for n, f in functions.items())
    )


def _original(function: Any, module: Any, name: str) -> bool:
    """Whether a function is the one that the module's file defines under this name. Decorators of the
    module's own package may wrap it. A function in C has no code to look at, only a name."""
    if isinstance(function, BuiltinFunctionType):
        return function.__name__ == name
    package = sys.modules[module.__name__.partition(".")[0]] if module else None
    file = getattr(package, "__file__", None)
    while True:
        code = getattr(function, "__code__", None)
        if not file or code is None or Path(file).parent not in Path(code.co_filename).parents:
            return False
        if not hasattr(function, "__wrapped__"):
            return (code.co_filename, code.co_qualname) == (module.__file__, name)
        function = function.__wrapped__


def code(module: nn.Module, suffix: str) -> Code | None:
    """The functions of a module's class for which fused parts stand; None if the class is not a family's."""
    cls = next((cls for cls, exact in _classes(module, suffix) if exact), None)
    return None if cls is None else code_of(cls, *(name for name in METHODS if hasattr(cls, name)))


def changed(module: nn.Module, original: Code | None) -> str:
    """Say how a module differs from a plain instance of the original class; return "" if it does not."""
    if hooked(module):
        return "has hooks"
    if original is None or type(module) is not original.holder:
        return f"is a {kind(module)}"
    if own_forward(module):
        return "has a forward of its own"
    return f"is changed: {why}" if (why := original.replaced()) else ""


def check_module(model: object) -> None:
    """Raise TypeError if a model is no module, but its name or its class, for example."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, such as a Hugging Face model, not {model!r:.100}")


def sharded(model: nn.Module) -> bool:
    """Whether FSDP shards weights of a model, by either of PyTorch's two implementations."""
    wrappers = ("FSDP", "FullyShardedDataParallel")
    return any(type(module).__name__.startswith(wrappers) for module in model.modules())


def kind(module: nn.Module) -> str:
    return f"{type(module).__module__.partition('.')[0]} {type(module).__name__}"


def own_forward(module: nn.Module) -> bool:
    """Whether an instance has another forward than its class, for example from a hook of accelerate."""
    return any(name in vars(module) for name in METHODS)


class Owner:
    """The model of which a layer is a part. A copy of the layer alone has the same owner."""

    def __init__(self, model: Any):
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner(memo.get(id(self.model), self.model))
