"""What goes in and out, as OpenAPI describes it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

Pixel = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False, strict=True)]


class Answer(BaseModel):
    """What is said of one image."""

    model_config = ConfigDict(populate_by_name=True)

    likeliest: str = Field(alias="class", description="the likeliest class")
    probability: float = Field(description="its probability")
    probabilities: dict[str, float] = Field(description="of every class, averaged over samples")
    spread: dict[str, float] = Field(description="standard deviation of every class's probability over samples")
    samples: list[list[float]] = Field(description="every sample's probabilities, in the order of the classes")
    unfamiliar: bool
    abstains: bool
    why: str = Field(description="why it would rather not answer; empty where it answers")
    rule: str = Field(description="the model's rules in words")
    plausible: list[str] | None = Field(
        default=None, description="a set that holds the true class as often as promised"
    )


class Predictions(BaseModel):
    """One answer an image, in the order of the request."""

    predictions: list[Answer]


class Problem(BaseModel):
    """What is wrong with a request."""

    detail: str


class Health(BaseModel):
    """What is served, and that it is ready."""

    status: str
    method: str
    classes: list[str]
    input: list[int]
    samples: int
    task: str | None


def request_model(shape: tuple[int, int, int], most: int) -> type[BaseModel]:
    """Return the model of a JSON request for images of this shape, every length bounded."""
    channels, height, width = shape

    def exactly(inner: Any, length: int) -> Any:
        return Annotated[list[inner], Field(min_length=length, max_length=length)]

    image: Any = exactly(exactly(exactly(Pixel, width), height), channels)
    images = Annotated[list[image], Field(min_length=1, max_length=most)]
    return create_model(
        "Images", __config__=ConfigDict(extra="forbid"), images=(images, Field(description="(N, C, H, W) in [0, 1]"))
    )
