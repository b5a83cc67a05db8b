"""The layer and its layout."""

import inspect
from typing import Any

from torch import Tensor, nn

from kernel_loader.fusion import Concatenate, WeightConverter

PARTS = ("q_proj", "k_proj", "v_proj")


class PackedQKV(nn.Module):
    """The forward of the attention module that it was made of, with one product for its three projections.

    Projections of one tensor share a product. One that is called with another tensor than the one before it, as in
    attention to an encoder, has a product to itself, of all rows.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    packed_of: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the module has it
        """As that of the attention module, whose projections take (..., H)."""
        return self.packed_of.forward(_Call(self), *args, **kwargs)


class PackedQKVLayout(PackedQKV):
    """An attention module whose q_proj, k_proj and v_proj are nn.Linear of the same width.

    Its qkv_proj has their rows one after another. Everything else of the module stays as it is.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        parts = [getattr(attention, name) for name in PARTS]
        if not all(getattr(type(part), "forward", None) is nn.Linear.forward for part in parts):
            kinds = ", ".join(type(part).__qualname__ for part in parts)
            raise TypeError(f"expected {', '.join(PARTS)} to be nn.Linear, got {kinds}")
        if len({(part.in_features, part.bias is None) for part in parts}) > 1:
            raise ValueError(f"expected projections of one width, all with a bias or none, got {parts}")
        own, cls = vars(attention), type(attention)
        if taken := [
            name for name in ("qkv_proj", "packed_of", "packed_sizes", "packed_static") if hasattr(attention, name)
        ]:
            raise ValueError(f"expected no {taken[0]} in the attention, got one in {cls.__qualname__}")
        code = getattr(inspect.unwrap(cls.forward), "__code__", None)
        if "__class__" in getattr(code, "co_freevars", ()):
            raise TypeError(f"expected a forward that does not call super(), got that of {cls.__qualname__}")
        usual = vars(nn.Module())
        self.__dict__.update({name: value for name, value in own.items() if name not in usual})
        self.training = attention.training
        for name, child in own["_modules"].items():
            if name not in PARTS:
                self.add_module(name, child)
        for name, parameter in own["_parameters"].items():
            self.register_parameter(name, parameter)
        for name, buffer in own["_buffers"].items():
            self.register_buffer(name, buffer, persistent=name not in own["_non_persistent_buffers_set"])
        self.packed_of = cls
        self.packed_static = frozenset(
            name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, staticmethod)
        )
        self.packed_sizes = tuple(part.out_features for part in parts)
        self.qkv_proj = nn.Linear(
            parts[0].in_features,
            sum(self.packed_sizes),
            bias=parts[0].bias is not None,
            device="meta",
            dtype=parts[0].weight.dtype,
        )

    @property
    def conversion_mapping(self) -> list[WeightConverter]:
        """The projections; the names of everything else stay."""
        packed = Concatenate(0, self.packed_sizes)
        return [
            WeightConverter([f"Attention.{name}.{kind}" for name in PARTS], f"qkv_proj.{kind}", [packed])
            for kind, _ in self.qkv_proj.named_parameters()
        ]


class _Call:
    """The attention module as its own forward sees it in one call: projections give what was computed together."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - a module with a layout's attributes
        packed, start = _Packed(module.qkv_proj), 0
        own: dict[str, Any] = {"_module": module}
        for name, size in zip(PARTS, module.packed_sizes, strict=True):
            own[name] = _Part(packed, start, size)
            start += size
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        module = self.__dict__["_module"]
        cls = module.packed_of
        if name in module.__dict__ or hasattr(nn.Module, name) or not hasattr(cls, name):
            return getattr(module, name)
        found = getattr(cls, name)
        if name in module.packed_static or not hasattr(found, "__get__"):
            return found
        return found.__get__(self, cls)  # its methods are called with what stands for the module

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever the module has
        setattr(self.__dict__["_module"], name, value)


class _Packed:
    """The product of the packed matrix with a tensor, as long as that is the one that is asked for."""

    def __init__(self, linear: Any) -> None:  # noqa: ANN401 - nn.Linear, or what has been put around it
        self.linear = linear
        self._input: Tensor | None = None
        self._product: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        if self._product is None or self._input is not x:
            self._input, self._product = x, self.linear(x)
        return self._product


class _Part:
    """A projection, as rows of the packed matrix."""

    def __init__(self, packed: _Packed, start: int, size: int) -> None:
        self._packed, self._start, self.out_features = packed, start, size

    def __call__(self, x: Tensor) -> Tensor:
        # Views of their own: a module may scale its queries in place.
        return self._packed.product(x).narrow(-1, self._start, self.out_features)

    @property
    def in_features(self) -> int:
        width: int = self._packed.linear.in_features
        return width

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._packed.linear.weight
        return weight.narrow(0, self._start, self.out_features)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self._packed.linear.bias
        return None if bias is None else bias.narrow(0, self._start, self.out_features)
