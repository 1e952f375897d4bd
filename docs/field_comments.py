"""An extension of Griffe: on the pages of the API the comment behind a field of a class is the field's docstring."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r" # ?(?!noqa|type:)(.+)$")


class FieldComments(griffe.Extension):
    """Gives each field without a docstring the comment of its last line."""

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Called once for each attribute."""
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and attr.lines:
            if comment := _COMMENT.search(attr.lines[-1]):
                attr.docstring = griffe.Docstring(comment[1], parent=attr)
