"""`Section`: the base of `Config` and of each of its sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of `Config` and its sections: immutable, without unknown fields, with strict conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
