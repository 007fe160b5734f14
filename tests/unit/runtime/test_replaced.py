"""An attribute is replaced inside the context alone, whether the owner has it or inherits it."""

from __future__ import annotations

import pytest

from swift_megatron_grpo.runtime.replaced import replaced


class Base:
    @staticmethod
    def name() -> str:
        return "base"


class Derived(Base):
    pass


def test_an_own_attribute_is_put_back() -> None:
    before = vars(Base)["name"]
    with replaced(Base, "name", lambda: "other"):
        assert Base.name() == Derived.name() == "other"
    assert vars(Base)["name"] is before and Derived().name() == "base"


def test_an_inherited_attribute_is_inherited_again_also_after_an_error() -> None:
    instance = Derived()
    with pytest.raises(ValueError, match="stop"), replaced(instance, "name", lambda: "other"):
        assert instance.name() == "other" and Derived.name() == "base"
        raise ValueError("stop")
    assert vars(instance) == {} and instance.name() == "base"
