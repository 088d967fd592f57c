"""Pictures in records show the pixels they name."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from stfseb.data.images import ImageSet
from stfseb.errors import StfsebError
from stfseb.evaluation.gallery import data_uri, gallery


def pixels(uri: str) -> np.ndarray:
    kind, _, content = uri.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_pictures_are_the_named_rows_with_captions():
    generator = torch.Generator().manual_seed(0)
    test = ImageSet(
        "t",
        torch.randint(0, 256, (5, 1, 6, 7), generator=generator, dtype=torch.uint8),
        classes=("cat", "dog"),
    )
    far = ImageSet("f", torch.randint(0, 256, (5, 3, 6, 7), generator=generator, dtype=torch.uint8))
    summary = {
        "extremes": {
            "test": {
                "most": [{"index": 3, "confidence": 0.9996, "prediction": 1, "label": 1}],
                "least": [{"index": 0, "confidence": 0.51, "prediction": 0, "label": 1}],
            },
            "ood": {
                "far": {"most": [{"index": 4, "confidence": 0.8, "prediction": 2}]},
                "gone": {"most": []},
            },
        }
    }
    found = gallery(summary, test, {"far": far})
    assert set(found) == {"test", "ood/far"}
    assert found["test"]["most"][0]["caption"] == "dog, 100.0\N{NO-BREAK SPACE}%"
    assert found["test"]["least"][0]["caption"] == "cat, 51.0\N{NO-BREAK SPACE}% (is dog)"
    assert found["ood/far"]["most"][0]["caption"] == "class 2, 80.0\N{NO-BREAK SPACE}%"
    np.testing.assert_array_equal(pixels(found["test"]["most"][0]["src"]), test.images[3, 0])
    np.testing.assert_array_equal(pixels(found["ood/far"]["most"][0]["src"]), far.images[4].permute(1, 2, 0))


def test_other_channel_counts_are_refused():
    with pytest.raises(StfsebError, match="2 channels"):
        data_uri(torch.zeros(2, 4, 4, dtype=torch.uint8))
