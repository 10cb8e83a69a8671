"""Images to learn from: which ones, which never, and batches that depend on nothing but their number."""

import hashlib
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gncprior import GncpriorError, datasets
from gncprior.datasets import (
    Dataset,
    bsds68,
    bsds68_names,
    download_bsds500,
    find_bsds500,
    fingerprint,
    open_dataset,
)

RANGE = (-9.0, 0.0)
PRINTS = datasets._validation_prints()


def noise(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def picture_with(bits: np.ndarray) -> np.ndarray:
    """A picture (64, 68) that has this fingerprint."""
    rises = np.where(np.unpackbits(bits).reshape(16, 16), 7, -7)
    small = 128 + np.concatenate([np.zeros((16, 1), int), rises.cumsum(1)], axis=1)
    return np.kron(small, np.ones((4, 4), int)).clip(0, 255).astype(np.uint8)


def write(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A folder laid out like the original archive, with the right names and tiny pictures."""
    root = tmp_path_factory.mktemp("data") / "BSR" / "BSDS500" / "data" / "images"
    for split, count in (("train", 200), ("test", 200)):
        for k in range(count):
            write(root / split / f"{split}{k:03}.jpg", noise((12, 20) if k % 2 else (20, 12), k))
    for name, bits in PRINTS.items():
        write(root / "val" / f"{name}.jpg", picture_with(bits))
    return root.parents[3]


@pytest.fixture
def four() -> Dataset:
    """Four pictures of different sizes whose pixels say where they are from."""
    images = []
    for k, (h, w) in enumerate([(10, 14), (14, 10), (9, 9), (20, 30)]):
        rows, columns = np.mgrid[:h, :w]
        images.append(((k * 60 + rows % 5 * 10 + columns % 10)[None]).astype(np.uint8))
    return Dataset("four", tuple("abcd"), tuple(images))


# ---------------------------------------------------------------- BSDS500


def test_splits(tree):
    assert find_bsds500(tree) == tree / "BSR/BSDS500/data/images"
    training, validation = open_dataset(tree)
    assert (len(training), len(validation)) == (400, 32)
    assert {image.shape for image in training.images} == {(1, 12, 20), (1, 20, 12)}
    test_names = {Path(name).name for name in bsds68_names().values()}
    assert set(validation.names) == {f"{n}.jpg" for n in PRINTS} - test_names
    assert not set(training.names) & {f"{name}.jpg" for name in PRINTS}
    held = bsds68(tree)
    assert (len(held), held.names[0], held.names[67]) == (68, "101085.jpg", "351093.jpg")


def test_the_list_of_bsds68():
    names = bsds68_names()
    assert list(names) == [f"test{k:03}.png" for k in range(1, 69)]
    stems = {Path(name).stem for name in names.values()}
    assert len(stems) == 68
    assert len(PRINTS) == 100
    assert stems < set(PRINTS)


@pytest.mark.parametrize(
    "layout",
    ["BSDS500", "BSDS500/data/images", "BSDS500-master/BSDS500/data/images", "images", "."],
)
def test_layouts(tmp_path, layout):
    for split in ("train", "val", "test"):
        (tmp_path / layout / split).mkdir(parents=True)
    assert find_bsds500(tmp_path).resolve() == (tmp_path / layout).resolve()


def test_incomplete_copies_are_refused(tmp_path, tree):
    root = find_bsds500(tree)
    for split in ("train", "val", "test"):
        (tmp_path / split).mkdir()
        for file in (root / split).iterdir():
            (tmp_path / split / file.name).symlink_to(file)
    lost = next((tmp_path / "val").glob("101085*"))
    lost.unlink()
    with pytest.raises(GncpriorError, match=r"val has 99 images and BSDS500 has 100"):
        open_dataset(tmp_path)
    (tmp_path / "val" / "other.jpg").symlink_to(next((root / "train").iterdir()))
    with pytest.raises(GncpriorError, match="lacks images of BSDS68"):
        open_dataset(tmp_path)


def test_the_environment_names_a_folder(tree, monkeypatch):
    monkeypatch.setenv("GNCPRIOR_DATA", str(tree))
    assert len(open_dataset()[0]) == 400
    monkeypatch.setenv("GNCPRIOR_DATA", str(tree / "nowhere"))
    with pytest.raises(GncpriorError, match="nowhere does not exist"):
        open_dataset()


def test_the_real_data_where_it_is(tree):
    """The counts of the paper's sets: of the real files where $GNCPRIOR_DATA has them, else of the tree."""
    root = find_bsds500(os.environ.get("GNCPRIOR_DATA") or tree)
    training, validation = datasets.bsds500(root)
    assert (len(training), len(validation), len(bsds68(root))) == (400, 32, 68)
    if root.is_relative_to(tree):
        return
    assert {image.shape for image in training.images} == {(1, 321, 481), (1, 481, 321)}
    held = bsds68(root)
    for name, image in zip(held.names, held.images, strict=True):
        assert np.array_equal(fingerprint(image), PRINTS[Path(name).stem])


# ---------------------------------------------------------------- the val split is refused


def distance(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.bitwise_count(a ^ b).sum())


def test_fingerprints_survive_formats_and_small_changes(tmp_path):
    bits = PRINTS["101085"]
    image = picture_with(bits)
    assert distance(fingerprint(image[None]), bits) == 0
    changed = image.astype(int) + np.random.default_rng(0).integers(-1, 2, size=image.shape)
    assert distance(fingerprint(changed.clip(0, 255).astype(np.uint8)[None]), bits) <= 8
    assert distance(fingerprint(np.stack([image] * 3)), bits) == 0
    apart = [distance(a, b) for a in PRINTS.values() for b in PRINTS.values() if a is not b]
    assert min(apart) > 40


@pytest.mark.parametrize("name", ["101085.jpg", "mine.png", "deep/er/holiday.webp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_the_val_split_are_refused_by_any_name(tmp_path, name, channels):
    for k in range(5):
        write(tmp_path / f"good{k}.png", noise((40, 40), k))
    write(tmp_path / name, picture_with(PRINTS["101085"]))
    with pytest.raises(GncpriorError, match=rf"1 images in .* \({Path(name).name}\)"):
        open_dataset(tmp_path, channels)
    (tmp_path / name).unlink()
    assert len(open_dataset(tmp_path, channels)[0]) == 4


def test_the_val_folder_itself_and_a_train_folder_with_a_stray_are_refused(tree, tmp_path):
    root = find_bsds500(tree)
    with pytest.raises(GncpriorError, match="belong to the val split of BSDS500"):
        open_dataset(root / "val")
    for split in ("train", "val", "test"):
        (tmp_path / split).mkdir()
        for file in (root / split).iterdir():
            (tmp_path / split / file.name).symlink_to(file)
    stray = tmp_path / "train" / "train000.jpg"
    stray.unlink()
    stray.symlink_to(root / "val" / "101085.jpg")
    with pytest.raises(GncpriorError, match=r"1 images in .* \(train000.jpg\)"):
        open_dataset(tmp_path)


# ---------------------------------------------------------------- other folders


def test_own_folder_holds_some_out(tmp_path):
    for k in range(25):
        write(tmp_path / f"{k:02}.png", noise((12, 13, 3), k))
    training, validation = open_dataset(tmp_path, channels=3)
    assert validation.names == ("06.png", "18.png")
    assert set(training.names) == {f"{k:02}.png" for k in range(25)} - set(validation.names)
    assert training.images[0].shape == (3, 12, 13)
    assert np.array_equal(training.images[0].transpose(1, 2, 0), noise((12, 13, 3), 0))
    assert str(tmp_path) not in training.title + validation.title


def test_folders_with_too_little(tmp_path):
    with pytest.raises(GncpriorError, match="has 0 images, and learning needs two"):
        open_dataset(tmp_path)
    for k in range(2):
        write(tmp_path / f"{k}.png", noise((12, 13), k))
    training, validation = open_dataset(tmp_path)
    assert (len(training), len(validation)) == (1, 1)
    assert len(training.at_least(12)) == 1
    with pytest.raises(GncpriorError, match="holds a patch of 13×13"):
        training.at_least(13)


def test_small_images_are_left_out_and_large_ones_cropped(four):
    assert four.at_least(10).names == ("a", "b", "d")
    cropped = four.cropped(10)
    assert [image.shape for image in cropped.images] == [(1, 10, 10)] * 2 + [(1, 9, 9), (1, 10, 10)]
    assert np.array_equal(cropped.images[3], four.images[3][:, 5:15, 10:20])
    assert cropped.names == four.names


# ---------------------------------------------------------------- download


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """An address on this machine that serves tmp_path/public."""
    (tmp_path / "public").mkdir()
    handler = partial(Quiet, directory=tmp_path / "public")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def md5(file: Path) -> str:
    return "md5:" + hashlib.md5(file.read_bytes()).hexdigest()


def test_download_is_checked_unpacked_once_and_kept(tree, tmp_path, server):
    archive = tmp_path / "public" / "archive.zip"
    root = find_bsds500(tree)
    with zipfile.ZipFile(archive, "w") as pack:
        for file in root.glob("*/*0.jpg"):
            pack.write(file, f"BSDS500-master/BSDS500/data/images/{file.relative_to(root)}")
        pack.writestr("BSDS500-master/BSDS500/data/groundTruth/train/1.mat", "large")
    url, good, cache = f"{server}/archive.zip", md5(archive), tmp_path / "cache"
    with pytest.raises(GncpriorError, match=r"could not be downloaded.*wrong checksum.*--data"):
        download_bsds500(url, "md5:" + "0" * 32, cache)
    found = download_bsds500(url, good, cache)
    assert {f.name for f in found.glob("*/*")} == {f.name for f in root.glob("*/*0.jpg")}
    assert [f.name for f in cache.iterdir()] == ["BSDS500"]
    assert not list(cache.rglob("*.mat"))
    archive.unlink()
    assert download_bsds500(url, good, cache) == found


def test_no_network_and_archives_of_something_else(tmp_path, server):
    archive, text = (tmp_path / "public" / name for name in ("archive.zip", "text.zip"))
    with zipfile.ZipFile(archive, "w") as pack:
        pack.writestr("readme.txt", "hello")
    text.write_text("no archive")
    with pytest.raises(GncpriorError, match="does not hold BSDS500"):
        download_bsds500(f"{server}/archive.zip", md5(archive), tmp_path / "a")
    with pytest.raises(GncpriorError, match="not a zip file"):
        download_bsds500(f"{server}/text.zip", md5(text), tmp_path / "b")
    with pytest.raises(GncpriorError, match=r"404.*\$GNCPRIOR_DATA"):
        download_bsds500(f"{server}/nothing.zip", md5(text), tmp_path / "c")


# ---------------------------------------------------------------- batches


def batch(dataset, seed, i, count=6, size=5, **more):
    return dataset.batch(seed, i, count=count, size=size, t_hat_range=RANGE, **more)


def test_a_batch_is_a_function_of_seed_and_number(four):
    again = Dataset(four.title, four.names, tuple(image.copy() for image in four.images))
    for i in (7, 0, 3):  # in any order, after anything
        for a, b in zip(batch(four, 1, i), batch(again, 1, i), strict=True):
            assert torch.equal(a, b)
    first = batch(four, 1, 0)
    for other in (batch(four, 1, 1), batch(four, 2, 0)):
        assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002  (what must not matter)
    assert all(torch.equal(a, b) for a, b in zip(first, batch(four, 1, 0), strict=True))


def test_patches_are_pieces_of_the_images_in_all_eight_orientations(four):
    found = set()
    for i in range(40):
        x, _, _ = batch(four, 0, i)
        pixels = (x * 255).round().numpy().astype(np.uint8)
        assert torch.equal(x, torch.from_numpy(pixels).float() / 255)
        for patch in pixels[:, 0]:
            image = four.images[patch[0, 0] // 60][0]
            windows = np.lib.stride_tricks.sliding_window_view(image, (5, 5))
            turned = [np.rot90(p, k) for p in (patch, patch.T) for k in range(4)]
            matches = [k for k, p in enumerate(turned) if (windows == p).all((2, 3)).any()]
            assert len(matches) == 1
            found.add(matches[0])
    assert found == set(range(8))


def test_every_position_and_every_image_is_as_likely(four):
    """Each image once a round, and all top-left corners of an image with the same frequency."""
    one = Dataset("one", ("a",), (np.arange(12 * 12, dtype=np.uint8).reshape(1, 12, 12),))
    corners = np.zeros(144)
    for i in range(200):
        x, _, _ = batch(one, 0, i, count=16, size=9)
        smallest = (x * 255).round().flatten(1).amin(1).long().numpy()
        np.add.at(corners, smallest, 1)
    seen = corners[corners > 0]
    assert len(seen) == 16
    expected = 200
    chi_squared = ((seen - expected) ** 2 / expected).sum()
    assert chi_squared < 37.7  # 99.9 % point for 15 degrees of freedom
    for begin in (0, 4, 40):
        assert sorted(four.order(3, begin, 4)) == [0, 1, 2, 3]
    sequence = [k for i in range(10) for k in four.order(3, 6 * i, 6)]
    assert sequence == four.order(3, 0, 60)


def test_noise_is_standard_normal_and_t_hat_is_stratified(four):
    draws = [batch(four, 0, i, count=64, size=9) for i in range(8)]
    noise = torch.cat([n.flatten() for _, n, _ in draws]).double()
    assert noise.numel() == 41472
    assert abs(float(noise.mean())) < 4 / noise.numel() ** 0.5
    assert abs(float(noise.var()) - 1) < 4 * (2 / noise.numel()) ** 0.5
    assert abs(float((noise**4).mean()) - 3) < 4 * (96 / noise.numel()) ** 0.5
    orders = []
    for _, _, t_hat in draws:
        stratum = ((t_hat.double() - RANGE[0]) / (RANGE[1] - RANGE[0]) * 64).floor().long()
        assert sorted(stratum.tolist()) == list(range(64))
        orders.append(tuple(stratum.tolist()))
    assert len(set(orders)) == len(orders)
    _, _, free = batch(four, 0, 0, count=4096, size=2, stratified=False)
    u = (free.double().sort().values - RANGE[0]) / (RANGE[1] - RANGE[0])
    gap = (u - torch.linspace(0, 1, 4096, dtype=torch.float64)).abs().max()
    assert 1e-3 < gap < 1.95 / 64  # Kolmogorov–Smirnov at 0.1 %, and not stratified


def test_colour_batches(tmp_path):
    colour = Dataset("colour", ("a",), (noise((3, 20, 30)),))
    x, n, _ = batch(colour, 0, 0)
    assert x.shape == n.shape == (6, 3, 5, 5)
    assert (x.dtype, n.dtype, float(x.max()) <= 1) == (torch.float32, torch.float32, True)


def test_a_batch_takes_little_time():
    images = tuple(noise((1, 321, 481), k) for k in range(8))
    dataset = Dataset("large", tuple("abcdefgh"), images)
    times = []
    for i in range(20):
        begin = time.perf_counter()
        batch(dataset, 0, i, count=32, size=64)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.008  # about 1 ms where nothing else runs


def test_digest_tells_images_apart(four):
    other = Dataset("four", four.names, (*four.images[:3], four.images[3] + np.uint8(1)))
    turned = Dataset("four", four.names, (four.images[0].transpose(0, 2, 1), *four.images[1:]))
    assert len({four.digest(), other.digest(), turned.digest()}) == 3
    assert four.digest() == Dataset("x", four.names, four.images).digest()
