"""Defines the base class and the value types of all sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megagrpo.config.basics.paths import is_user_code

COLDEST = 0.01  # vLLM raises a lower temperature above 0 to this one
HOTTEST = 2.0  # vLLM rejects a request with a higher temperature
LARGEST_INT = 2**63 - 1  # torch and vLLM keep integers in 64 bits


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0 (greedy) or at least {COLDEST:g}, the lowest temperature that vLLM samples at")
    return temperature


@dataclass(frozen=True)
class ShownAs:
    """Metadata of a text field with usual values: how help and docs show the type, as in `a | b | FILE.py:NAME`."""

    text: str

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, in which editors find the values in lower case; other values stay valid."""
        return {"anyOf": [{"enum": [name for name in self.text.split(" | ") if name.islower()]}, handler(core_schema)]}


def choice_or_user_code(names: Iterable[str]) -> tuple[BeforeValidator, ShownAs]:
    """Return the annotations of a key that takes one of `names`, or the user's code as `FILE.py:NAME`."""
    choices = list(names)

    def check(value: object) -> object:
        if isinstance(value, str) and (value in choices or is_user_code(value)):
            return value
        expected = ", ".join([*(f"'{name}'" for name in choices), "or your own as FILE.py:NAME"])
        raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})

    return BeforeValidator(check), ShownAs(" | ".join([*choices, "FILE.py:NAME"]))


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # at most three years; Python's timers overflow above 292 years
Count = Annotated[int, Field(gt=0, le=4096)]  # of processes
Temperature = Annotated[float, Field(ge=COLDEST, le=HOTTEST)]
GreedyOrTemperature = Annotated[float, Field(ge=0, le=HOTTEST), AfterValidator(_greedy_or_warm)]


class Section(BaseModel):
    """The base class of sections: frozen, without unknown keys. The string below each field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans, which pydantic accepts as numbers, and integers of more than 64 bits."""
        assert info.field_name is not None, "pydantic names the field in every field validator"
        kinds = set(_plain_types(cls.model_fields[info.field_name].annotation))
        if not kinds & {int, float}:
            return value
        for number in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
            if isinstance(number, bool) and bool not in kinds:
                raise ValueError("must be a number, not true or false")
            if isinstance(number, int) and abs(number) > LARGEST_INT:
                raise ValueError(f"must be at most {LARGEST_INT} = 2^63 - 1")
        return value


def _plain_types(annotation: Any) -> list[Any]:
    """Return the types in an annotation, including types inside lists and unions."""
    return [annotation] + [kind for inside in get_args(annotation) for kind in _plain_types(inside)]
