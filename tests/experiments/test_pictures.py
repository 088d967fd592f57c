"""A picture given to `predict` is read as the folders of a task are."""

import numpy as np
import pytest
import torch
from PIL import Image

from stfseb.data.pictures import read_picture
from stfseb.errors import StfsebError
from stfseb.experiments.pictures import read_inputs


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16)])
def test_oblong_pictures_are_cropped_as_in_training(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    path = tmp_path / "oblong.png"
    Image.fromarray(pixels).save(path)
    names, images = read_inputs(path, shape)
    assert names == ["oblong.png"]
    assert torch.equal(images[0], read_picture(path, shape[0], shape[1]))
    middle = Image.fromarray(pixels[:, 25:65]).resize((shape[1], shape[1]), Image.Resampling.BICUBIC)
    expected = np.asarray(middle.convert("L" if shape[0] == 1 else "RGB"), dtype=int).reshape(*shape[1:], shape[0])
    assert abs(images[0].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 2


def test_damaged_and_oblong_models_are_said(tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    with pytest.raises(StfsebError, match="cannot be read as PNG or JPEG"):
        read_inputs(path, (1, 28, 28))
    with pytest.raises(StfsebError, match="give them as an .npy array"):
        read_inputs(path, (1, 28, 20))
