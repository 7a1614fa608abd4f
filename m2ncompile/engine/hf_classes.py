"""Transformers' model classes, kept as they are.

vLLM's Transformers backend (OLMo-2) makes its own of a class of transformers while
it builds a model: it changes the class in place, which then can't be built without
vLLM any more, by the inventory of the next spec for one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["kept_classes"]


@contextmanager
def kept_classes(config: Any) -> Iterator[None]:
    """Whatever the block changes in transformers' classes is undone after it.

    `config` is the model's transformers config; its classes are loaded first, so
    that none is seen changed only.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    for mapping in (AutoModel._model_mapping, AutoModelForCausalLM._model_mapping):
        if type(config) in mapping:
            mapping[type(config)]
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in _classes()}
    try:
        yield
    finally:
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                cls.__bases__ = bases
            for name in vars(cls).keys() - attributes.keys():
                delattr(cls, name)
            for name, value in attributes.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)


def _classes() -> list[type]:
    return [
        value
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == name
    ]
