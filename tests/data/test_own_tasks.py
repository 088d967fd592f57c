"""A user's own task from YAML: folders of pictures, arrays, registered sets, and every way it can be wrong."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from stfseb.data.images import ImageSet
from stfseb.data.pictures import LeftOutWarning, read_picture
from stfseb.data.task_files import built_in
from stfseb.data.tasks import definition_of, load_task
from stfseb.errors import StfsebError

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(5)


def picture(path: Path, colour: tuple[int, int, int], size=(20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def photos(tmp_path):
    for split, count in (("train", 6), ("test", 2)):
        for name, colour in (("rose", (200, 0, 0)), ("leaf", (0, 180, 0)), ("sky", (0, 0, 220))):
            for i in range(count):
                picture(tmp_path / split / name / f"{i}.{'png' if i % 2 else 'JPG'}", colour)
    picture(tmp_path / "other" / "deep" / "1.jpeg", (9, 9, 9))
    picture(tmp_path / "other" / "2.png", (250, 250, 250))
    return tmp_path


def write(folder: Path, **keys) -> Path:
    path = folder / "my_task.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


BASE = {"train": "train", "test": "test", "channels": 3, "image_size": 16, "validation": {"fraction": 0.2}}


def test_one_class_is_refused_before_training(photos):
    picture(photos / "single" / "rose" / "1.png", (200, 0, 0))
    with pytest.raises(StfsebError, match="has one class folder, 'rose': give two classes or more"):
        load_task(write(photos, **{**BASE, "train": {"folder": "single"}}))


def test_folders_of_pictures(photos):
    task = load_task(write(photos, **BASE, ood={"other": {"folder": "other"}}, context="other", dropout=0.3))
    assert task.name == "my_task"
    assert task.class_names == ("leaf", "rose", "sky")
    data = task.load()
    assert (len(data.train), len(data.validation), len(data.test)) == (14, 4, 6)
    assert data.test.images.shape == (6, 3, 16, 16)
    assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.images[:, :, 8, 8].argmax(1).tolist() == [1, 1, 0, 0, 2, 2]  # green, red, blue
    assert data.ood["other"].labels is None
    assert len(data.context) == 2
    # The rights of a built-in task: the same defaults and presets.
    assert task.presets == built_in()["defaults"]["presets"]
    assert task.shifts.rotation == load_task("mnist").shifts.rotation


def test_what_ablations_start_from_makes_no_other_task(photos):
    file = write(photos, **BASE)
    plain, preset = definition_of(file), load_task(file).presets["stfseb"]
    assert definition_of(write(photos, **BASE, ablated={"stfseb": {"dof": 3.0}})) == plain
    assert load_task(file).start("stfseb") == {**preset, "dof": 3.0}


def test_grey_and_shape_of_a_picture(tmp_path):
    array = np.zeros((10, 30, 3), np.uint8)
    array[:, 10:20] = (255, 0, 0)
    Image.fromarray(array).save(tmp_path / "a.png")
    got = read_picture(tmp_path / "a.png", 1, 10)
    assert got.shape == (1, 10, 10)
    assert got[0, :, 3:7].unique().tolist() == [76]  # the luma of pure red; the black sides are cropped away
    assert read_picture(tmp_path / "a.png", 3, 5).shape == (3, 5, 5)


def test_orientation_mark_is_obeyed(tmp_path):
    array = np.zeros((8, 8, 3), np.uint8)
    array[:4] = 255  # white above
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(array).save(tmp_path / "a.jpg", exif=exif, quality=95)
    got = read_picture(tmp_path / "a.jpg", 1, 8)
    assert got[0, :3].float().mean() < 30
    assert got[0, 5:].float().mean() > 220


@pytest.mark.filterwarnings("ignore::stfseb.data.overlaps.OverlapWarning")  # one file serves for both
@pytest.mark.parametrize("layout", ["NHW", "NCHW", "NHWC", "float"])
def test_arrays(tmp_path, layout):
    images = RNG.integers(0, 256, (30, 8, 8), dtype=np.uint8)
    labels = np.arange(30) % 3
    stored = {"NHW": images, "NCHW": images[:, None], "NHWC": images[..., None], "float": images / 255}[layout]
    np.savez_compressed(tmp_path / "train.npz", images=stored, labels=labels)
    np.save(tmp_path / "x.npy", stored)
    np.save(tmp_path / "y.npy", labels)
    path = write(
        tmp_path, train="train.npz", test={"array": "x.npy", "labels": "y.npy"}, channels=1, image_size=8, classes=3
    )
    data = load_task(path).load()
    assert torch.equal(data.test.images[:, 0], torch.from_numpy(images))
    assert data.test.labels.tolist() == labels.tolist()
    assert len(data.train) == 27
    assert data.context is None


@pytest.mark.filterwarnings("ignore::stfseb.data.overlaps.OverlapWarning")  # one file serves for both
def test_named_arrays_and_fit(tmp_path):
    images = RNG.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pictures=images, kind=np.arange(12)[:, None] % 2, weight=np.ones(12))
    source = {"array": "a.npz", "images": "pictures", "labels": "kind", "fit": True}
    path = write(tmp_path, train=source, test=source, channels=1, image_size=8, classes=["no", "yes"])
    data = load_task(path).load()
    assert data.test.images.shape == (12, 1, 8, 8)
    luma = images.astype(float) @ [0.299, 0.587, 0.114]
    assert abs(data.test.images.double().mean() - luma.mean()) < 0.5
    assert data.test.note == "converted from 3x16x16"


def test_registered_sets_in_an_own_task(real_data, tmp_path):
    path = write(
        tmp_path, train="mnist", test="mnist", ood={"clothes": "fmnist"}, channels=1, image_size=28, classes=10
    )
    data = load_task(path).load(real_data)
    assert len(data.train) == 54_000
    assert len(data.ood["clothes"]) == 10_000


WRONG = [
    ({"trian": "train"}, r"my_task.yaml: unknown key 'trian': did you mean 'train'\?"),
    ({"train": "trane"}, "train: 'trane' is neither a registered set nor a folder in"),
    ({"train": "fminst"}, r"train: 'fminst' is neither a registered set \(did you mean 'fmnist'\?\)"),
    (
        {"context": "distortd"},
        r"\(did you mean 'distorted'\?\) nor a folder .* give one of these, 'train' or 'distorted', or",
    ),
    ({"train": {"folder": "gone"}}, "folder '.*gone' does not exist"),
    ({"train": {"folder": "train", "labels": "x"}}, r"unknown key in train \(folder\) 'labels'"),
    ({"train": 3}, "train: 3 is no source of images"),
    ({"train": {"set": "mnist", "split": "validation"}}, "unknown split of mnist 'validation'"),
    ({"ood": ["other"]}, "ood: .* must be a mapping"),
    ({"channels": "three"}, "channels: 'three' must be a whole number from 1 to 3"),
    ({"image_size": 0}, "image_size: 0 must be a whole number"),
    ({"image_size": True}, "image_size: True must be a whole number"),
    ({"dropout": 1.5}, "dropout: 1.5 must be a number"),
    ({"augment": "yes please"}, "augment: 'yes please' must be true or false"),
    ({"network": "resnet"}, "unknown network 'resnet'"),
    ({"network": {"name": "small", "hiden": 3}}, "unknown key in network 'hiden': did you mean 'hidden'"),
    ({"presets": {"stfsb": {}}}, "unknown method in presets 'stfsb': did you mean 'stfseb'"),
    ({"ablated": {"stfsb": {}}}, "unknown method in ablated 'stfsb': did you mean 'stfseb'"),
    ({"ablated": {"stfseb": 3}}, "ablated: stfseb: 3 must be a mapping"),
    ({"training": {"epoch": 3}}, "unknown key in training 'epoch': did you mean 'epochs'"),
    ({"training": {"epochs": 0}}, "training: epochs: 0 must be a whole number"),
    ({"training": {"lr": float("nan")}}, "training: lr: nan must be"),
    ({"validation": {"fraction": 1.5}}, "validation: fraction: 1.5 must be"),
    ({"validation": {"fraction": 0.1, "sed": 1}}, "unknown key in validation 'sed': did you mean 'seed'"),
    ({"shifts": {"rotation": 30}}, "shifts: rotation: 30 must be a list"),
    ({"shifts": {"corruption": "cifar-c"}}, "unknown corruption suite 'cifar-c'"),
    ({"classes": ["a"]}, "classes: .* must be two or more different names"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(c)[:40] for c, _ in WRONG])
def test_wrong_task_files(photos, change, message):
    with pytest.raises(StfsebError, match=message) as caught:
        load_task(write(photos, **(BASE | change)))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("my_task.yaml: ")


def test_files_that_are_no_tasks(tmp_path):
    with pytest.raises(StfsebError, match="does not exist"):
        load_task(tmp_path / "no.yaml")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(StfsebError, match="must hold keys"):
        load_task(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("train: [\n")
    with pytest.raises(StfsebError, match="is not YAML in line 2"):
        load_task(tmp_path / "bad.yaml")
    (tmp_path / "object.yaml").write_text("train: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(StfsebError, match="is not YAML"):
        load_task(tmp_path / "object.yaml")
    (tmp_path / "short.yaml").write_text("train: mnist\n")
    with pytest.raises(StfsebError, match="'test' is missing"):
        load_task(tmp_path / "short.yaml")


def test_classes_must_be_told_for_arrays(tmp_path):
    path = write(tmp_path, train="a.npz", test="a.npz", channels=1, image_size=8)
    with pytest.raises(StfsebError, match="'classes' is missing"):
        load_task(path)


def test_class_without_pictures(photos):
    (photos / "train" / "moon").mkdir()
    with pytest.raises(StfsebError, match="class 'moon' has no PNG, JPEG, WebP"):
        load_task(write(photos, **BASE)).load()


def test_test_class_that_was_never_trained(photos):
    picture(photos / "test" / "moon" / "1.png", (1, 1, 1))
    with pytest.raises(StfsebError, match=r"moon' is no class of this task \(leaf, rose, sky\): .* add pictures"):
        load_task(write(photos, **BASE)).load()


def test_pictures_in_other_formats_are_read_and_other_files_are_named(photos):
    for number, ending in enumerate(("webp", "bmp", "tif", "TIFF", "ppm")):
        picture(photos / "test" / "sky" / f"more{number}.{ending}", (0, 0, 220))
    for name in ("Thumbs.db", ".DS_Store", ".cache/deep.txt", "desktop.ini"):
        (photos / "test" / "sky" / name).parent.mkdir(exist_ok=True)
        (photos / "test" / "sky" / name).write_text("")
    data = load_task(write(photos, **BASE, ood={"other": {"folder": "other"}})).load()
    assert data.test.labels.bincount().tolist() == [2, 2, 7]
    assert data.test.note == data.ood["other"].note == ""
    for name in ("leaf/1.txt", "leaf/2.TXT", "leaf/LICENSE", "sky/1.heic"):
        (photos / "test" / name).write_text("")
    (photos / "other" / "labels.csv").write_text("")
    picture(photos / "test" / "astray.png", (0, 0, 0))
    data = load_task(write(photos, **BASE, ood={"other": {"folder": "other"}})).load()
    said = "left out, as they are not PNG, JPEG, WebP, BMP, TIFF or PPM: "
    beside = "test my_task-test: left out: 1 picture beside the class folders; "
    assert f"{beside}{said}2 .txt, 1 without an ending in leaf, 1 .heic in sky" in data.notes
    assert f"other: {said}1 .csv in other" in data.notes


def test_a_class_that_keeps_few_of_its_pictures_is_a_warning(photos):
    for number in range(7):
        (photos / "train" / "sky" / f"{number}.heic").write_text("")
    with pytest.warns(LeftOutWarning, match=r"class 'sky' keeps 6 pictures, 7 \.heic are left out: convert them to"):
        load_task(write(photos, **BASE)).load()
    for file in (photos / "test" / "sky").iterdir():
        file.rename(file.with_suffix(".avif"))
    with (
        pytest.warns(LeftOutWarning),
        pytest.raises(StfsebError, match=r"class 'sky' has no PNG.* in '.*sky' \(but 2 \.avif\): put some there"),
    ):
        load_task(write(photos, **BASE)).load()


def test_pictures_that_cannot_be_read_are_counted_and_named(photos):
    for number in range(4):
        (photos / "train" / "sky" / f"bad{number}.png").write_text("not a picture")
    with pytest.raises(
        StfsebError,
        match=r"^4 of 22 pictures cannot be read \(.*bad0.png', '.*bad1.png', '.*bad2.png', \.\.\.; the",
    ) as caught:
        load_task(write(photos, **BASE)).load()
    assert "\n" not in str(caught.value)


def test_a_set_of_images_is_shown_in_a_line():
    images = ImageSet("photos-train", torch.zeros(6, 3, 16, 16, dtype=torch.uint8), torch.arange(6) % 3, "converted")
    assert repr(images) == "ImageSet('photos-train', 6 images 3x16x16, labels of 3 classes, converted)"
    assert "no labels" in repr(ImageSet("other", images.images))


@pytest.mark.parametrize("damage", ["text", "truncated", "empty", "gif"])
def test_unreadable_picture(photos, damage):
    path = photos / "train" / "sky" / "1.png"
    if damage == "text":
        path.write_text("not a picture")
    elif damage == "truncated":
        noise = Image.fromarray(RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8))
        noise.save(path)
        path.write_bytes(path.read_bytes()[:900])
    elif damage == "gif":
        Image.new("L", (8, 8)).save(path, "GIF")
    else:
        path.write_bytes(b"")
    with pytest.raises(StfsebError, match=r"1.png' cannot be read as PNG, JPEG, .* PPM: replace or remove it"):
        load_task(write(photos, **BASE)).load()


def test_deep_and_huge_pictures_are_refused(tmp_path):
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(StfsebError, match="more than 8 bits"):
        read_picture(tmp_path / "deep.png", 1, 8)
    Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
    with pytest.raises(StfsebError, match="too large to be read safely"):
        read_picture(tmp_path / "huge.png", 1, 8)


def arrays_task(tmp_path, images, labels=None, **changes):
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(len(images), int) if labels is None else labels)
    keys = {"train": "a.npz", "test": "a.npz", "channels": 1, "image_size": 8, "classes": 2} | changes
    return load_task(write(tmp_path, **keys))


GREY = np.zeros((20, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (GREY, np.full(20, 2), r"has label 2, outside the 2 classes \(0 to 1\)"),
        (GREY, np.full(20, -1), "has label -1, outside"),
        (GREY, np.zeros(19, int), "20 images need 20 integer labels"),
        (GREY, np.zeros(20), "arrays that could be labels"),
        (np.zeros((20, 8, 8, 3), np.uint8), None, "3x8x8, the task has 1x8x8: .*fit: true"),
        (np.zeros((20, 9, 9), np.uint8), None, "1x9x9, the task has 1x8x8"),
        (np.zeros((20, 8, 8, 5), np.uint8), None, "is no set of grey or RGB images"),
        (np.zeros((0, 8, 8), np.uint8), None, "is empty"),
        (np.full((20, 8, 8), np.nan), None, "must be finite and from 0 to 1"),
        (np.full((20, 8, 8), 7.0), None, "must be finite and from 0 to 1"),
        (np.full((20, 8, 8), 300), None, "integers from 0 to 255"),
        (np.zeros((20, 8), np.uint8), None, "0 arrays that could be images"),
    ],
)
def test_wrong_arrays(tmp_path, images, labels, message):
    with pytest.raises(StfsebError, match=message) as caught:
        arrays_task(tmp_path, images, labels).load()
    assert "\n" not in str(caught.value)


def test_pickles_bombs_and_rubbish_are_refused(tmp_path):
    task = arrays_task(tmp_path, GREY)
    path = tmp_path / "a.npz"
    np.savez(path, images=GREY, labels=np.array([{}] * 20, dtype=object))
    with pytest.raises(StfsebError, match=r"pickled objects in 'labels.npy': refused"):
        task.load()
    path.write_bytes(b"PK\x03\x04 rubbish")
    with pytest.raises(StfsebError, match="cannot be read"):
        task.load()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 8, 8)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue())
    with pytest.raises(StfsebError, match="cannot be read"):
        task.load()
    path.unlink()
    with pytest.raises(StfsebError, match="does not exist"):
        task.load()
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(StfsebError, match="cannot be read"):
        load_task(
            write(
                tmp_path, train={"array": "x.npy", "labels": "x.npy"}, test="mnist", channels=1, image_size=8, classes=2
            )
        ).load()
