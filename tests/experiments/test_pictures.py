"""A picture given to `predict` is read as the folders of a task are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stfseb.data.pictures import LeftOutWarning, read_picture
from stfseb.errors import StfsebError
from stfseb.experiments.pictures import read_inputs


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16)])
def test_oblong_pictures_are_cropped_as_in_training(tmp_path, shape):
    ramp = np.linspace(0, 255, 90)[None, :, None].repeat(40, 0).repeat(3, 2)
    pixels = ramp.astype(np.uint8)
    path = tmp_path / "oblong.png"
    Image.fromarray(pixels).save(path)
    names, images = read_inputs(path, shape)
    assert names == [str(path)]
    assert torch.equal(images[0], read_picture(path, shape[0], shape[1]))
    # Of columns 0 to 89 the middle 40 remain, 25 to 64; squeezing the picture instead would keep 0 and 255.
    assert abs(int(images[0, :, :, 0].float().mean()) - ramp[0, 25, 0]) < 5
    assert abs(int(images[0, :, :, -1].float().mean()) - ramp[0, 64, 0]) < 5


def test_damaged_and_oblong_models_are_said(tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    with pytest.raises(StfsebError, match="cannot be read as PNG, JPEG, WebP"):
        read_inputs(path, (1, 28, 28))
    with pytest.raises(StfsebError, match="give them as an"):
        read_inputs(path, (1, 28, 20))


def test_a_folder_gives_its_pictures(tmp_path):
    (tmp_path / "more").mkdir()
    for name, value in (("b.png", 10), ("a.jpg", 200), ("more/c.PNG", 90)):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    names, images = read_inputs(tmp_path, (1, 8, 8))
    assert sorted(names) == [str(tmp_path / name) for name in ("a.jpg", "b.png", "more/c.PNG")]
    names = [str(Path(name).relative_to(tmp_path)) for name in names]
    means = dict(zip(names, images.float().mean((1, 2, 3)).tolist(), strict=True))
    assert means == pytest.approx({"a.jpg": 200, "b.png": 10, "more/c.PNG": 90}, abs=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(StfsebError, match="holds no PNG, JPEG, WebP"):
        read_inputs(empty, (1, 8, 8))
    with pytest.raises(StfsebError, match="does not exist"):
        read_inputs(tmp_path / "nothing.png", (1, 8, 8))


def test_pictures_that_cannot_be_read_are_left_out_where_that_is_asked_for(tmp_path):
    Image.new("L", (8, 8), 7).save(tmp_path / "b.webp")
    for name in ("a.png", "c.png"):
        (tmp_path / name).write_text("no picture")
    with pytest.raises(StfsebError, match=r"2 of 3 pictures cannot be read \(.*a.png', '.*c.png'; the first: .*\): "):
        read_inputs(tmp_path, (1, 8, 8))
    unread = {}
    names, images = read_inputs(tmp_path, (1, 8, 8), unread)
    assert names == [str(tmp_path / "b.webp")]
    assert (len(images), list(unread)) == (1, [tmp_path / "a.png", tmp_path / "c.png"])
    names, images = read_inputs(tmp_path / "a.png", (1, 8, 8), unread)
    assert (names, tuple(images.shape)) == ([], (0, 1, 8, 8))
    (tmp_path / "d.heic").write_text("")
    with pytest.warns(LeftOutWarning, match=r"keeps 3 pictures, 1 \.heic are left out"):
        read_inputs(tmp_path, (1, 8, 8), unread)
