"""`Section`: what `Config` and its sections have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of `Config` and its sections: immutable, no unknown fields, no coercion surprises."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
