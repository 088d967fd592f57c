"""The service over a real socket: answers, limits, hostile input."""

import contextlib
import functools
import http.client
import io
import json
import socket
import struct
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from conftest_serving import Server, pictures, png

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from stfseb.errors import StfsebError
from stfseb.likelihoods import GaussianRegression
from stfseb.serving.app import ServiceLimits, create_app
from stfseb.serving.limits import RateLimiter


def call(server, method, path, body=None, headers=None):
    """Return status, headers and body (parsed where it is JSON)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
        if response.headers.get_content_type() == "application/json":
            content = json.loads(content)
        return response.status, response.headers, content
    finally:
        connection.close()


def numbers(server, images):
    body = json.dumps({"images": images}) if not isinstance(images, str) else images
    return call(server, "POST", "/predict", body, {"Content-Type": "application/json"})


def upload(server, content, name="file", filename="photo.png"):
    head = f'--cut\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode()
    body = head + content + b"\r\n--cut--\r\n"
    return call(server, "POST", "/predict/image", body, {"Content-Type": "multipart/form-data; boundary=cut"})


def test_numbers_get_what_the_method_says(server, classifier):
    x, y = pictures(6, seed=5)
    status, _, found = numbers(server, x.tolist())
    assert status == 200
    samples, seed = classifier.rule_draw()
    expected = classifier.predict_proba(x, samples, seed=seed)
    for row, want, label in zip(found["predictions"], expected, y, strict=True):
        np.testing.assert_allclose(list(row["probabilities"].values()), want, atol=1e-5)
        np.testing.assert_allclose(np.mean(row["samples"], axis=0), want, atol=1e-5)
        np.testing.assert_allclose(list(row["spread"].values()), np.std(row["samples"], axis=0), atol=1e-5)
        assert row["class"] == ["left", "right", "<b>centre</b>"][label]
        assert row["rule"].startswith("An image looks unfamiliar")


def test_company_does_not_change_an_answer(server):
    x, _ = pictures(40, seed=6)
    alone = [numbers(server, x[i : i + 1].tolist())[2]["predictions"][0] for i in range(3)]
    together = numbers(server, x.tolist())[2]["predictions"]
    for one, other in zip(alone, together, strict=False):
        np.testing.assert_allclose(one["samples"], other["samples"], atol=1e-5)


def test_noise_looks_unfamiliar_and_a_picture_does_not(server):
    noise = (np.random.default_rng(0).random((8, 8)) * 255).astype(np.uint8)
    status, _, found = upload(server, png(noise))
    assert status == 200
    assert found["predictions"][0]["unfamiliar"]
    assert "looks unfamiliar" in found["predictions"][0]["why"]
    bright = np.full((80, 80), 25, np.uint8)
    bright[:, :30] = 200
    _, _, found = upload(server, png(bright))
    assert found["predictions"][0]["class"] == "left"
    assert not found["predictions"][0]["unfamiliar"]


def test_health_metrics_page_and_description(server):
    status, _, found = call(server, "GET", "/health")
    assert (status, found["status"], found["method"], found["samples"]) == (200, "ready", "ST-FS-EB", 3)
    status, headers, text = call(server, "GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert b'stfseb_requests_total{path="/health",status="200"}' in text
    status, headers, text = call(server, "GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"http://" not in text.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in text
    assert call(server, "GET", "/openapi.json")[2]["paths"]["/predict"]
    assert call(server, "GET", "/docs")[0] == 404  # it would load scripts from elsewhere


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 422),
        ("{", 400),
        ("[" * 100_000, 400),
        ("null", 422),
        ('{"images": []}', 422),
        ('{"images": [[[[0.5]]]]}', 422),
        ('{"images": "x"}', 422),
        (json.dumps({"images": [[[[0.5] * 8] * 8]] * 65}), 422),
        (json.dumps({"images": [[[[2.0] * 8] * 8]]}), 422),
        (json.dumps({"images": [[[[float("nan")] * 8] * 8]]}), 422),
        (json.dumps({"images": [[[[float("inf")] * 8] * 8]]}), 422),
        (json.dumps({"images": [[[[0.5] * 8] * 8]]}).replace("0.5", "1e999", 1), 422),
        (json.dumps({"images": [[[[0.5] * 8] * 8]]}).replace("0.5", "9" * 5000, 1), 400),
        (json.dumps({"images": [[[[0.5] * 8] * 8]], "more": 1}), 422),
        (json.dumps({"images": [[[["0.5; rm"] * 8] * 8]]}), 422),
    ],
)
def test_malformed_numbers_are_refused_in_one_line(server, body, status):
    found = numbers(server, body)
    assert found[0] == status
    assert len(found[2]["detail"]) <= 300
    assert "\n" not in found[2]["detail"]


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(side, content=b""):
    """Return a PNG of side x side grey pixels in a few bytes: all rows are zero."""
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + (content or chunk(b"IDAT", b"")) + chunk(b"IEND", b"")


@functools.cache
def hostile():
    good = png(np.zeros((16, 16), np.uint8))
    text = zlib.compress(bytes(100_000_000), 9)
    gif = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0, 0, 0) + b";"
    return {
        "empty": b"",
        "words": b"not an image",
        "truncated": good[: len(good) // 2],
        "bomb": bomb(60_000),
        "above_the_pixels": bomb(4_100),
        "negative": bomb(2**31 - 1),
        "text_bomb": good[:33] + chunk(b"zTXt", b"a\0\0" + text) + good[33:],
        "wrong_checksum": good[:40] + b"\xff\xff" + good[42:],
        "gif": gif,
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/etc/passwd) (r) file\n",
        "deep": png(np.zeros((4, 4), np.uint8)).replace(b"\x08\x00\x00\x00\x00", b"\x10\x00\x00\x00\x00", 1),
        "jpeg_head": b"\xff\xd8\xff\xe0" + bytes(64),
        "zip": b"PK\x03\x04" + bytes(64),
    }


@pytest.mark.parametrize("name", sorted(hostile()))
def test_hostile_images_are_refused_quickly(server, name):
    started = time.monotonic()
    status, _, found = upload(server, hostile()[name])
    assert status == 422, found
    assert "'file'" in found["detail"]
    assert time.monotonic() - started < 5
    assert call(server, "GET", "/health")[0] == 200


def test_mutated_images_never_break_the_service(server):
    generator = np.random.default_rng(0)
    buffer = io.BytesIO()
    from PIL import Image

    Image.fromarray((generator.random((20, 24, 3)) * 255).astype(np.uint8)).save(buffer, "JPEG")
    for good in (png((generator.random((20, 24, 3)) * 255).astype(np.uint8)), buffer.getvalue()):
        for _ in range(40):
            bad = bytearray(good)
            for place in generator.integers(0, len(bad), 6):
                bad[place] = generator.integers(256)
            assert upload(server, bytes(bad))[0] in (200, 422)


def test_forms_that_are_no_upload(server):
    assert upload(server, png(np.zeros((8, 8))), name="other")[0] == 422
    assert call(server, "POST", "/predict/image", b"x", {"Content-Type": "text/plain"})[0] == 422
    broken = call(server, "POST", "/predict/image", b"--x", {"Content-Type": "multipart/form-data"})
    assert broken[0] in (400, 422)
    odd = upload(server, png(np.zeros((8, 8))), filename="../../etc/passwd")
    assert odd[0] == 200


def test_too_large_requests_are_refused_before_they_are_read(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    with connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000000\r\n\r\n")
        assert b" 413 " in connection.recv(4096)


def test_too_large_requests_without_a_length_are_cut_off(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    piece = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    answer = b""
    with connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(OSError):  # the service closes the connection, as it should
            for _ in range(32):
                connection.sendall(piece)
        try:
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b"reset"
    assert b" 413 " in answer or answer in (b"", b"reset")
    assert call(server, "GET", "/health")[0] == 200


def test_other_names_and_other_pages_are_refused(server):
    assert call(server, "GET", "/health", headers={"Host": "evil.example"})[0] == 400
    _, headers, _ = call(server, "GET", "/health", headers={"Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in headers


def test_a_client_that_asks_too_often_has_to_wait(classifier):
    with Server(create_app(classifier, ServiceLimits(rate=0.001))) as server:  # the first request may take its time
        x, _ = pictures(1)
        assert numbers(server, x.tolist())[0] == 200
        status, headers, _ = numbers(server, x.tolist())
        assert status == 429
        assert headers["Retry-After"] == "1"
        assert call(server, "GET", "/health")[0] == 200
        assert b'stfseb_requests_total{path="/predict",status="429"} 1' in call(server, "GET", "/metrics")[2]


def test_requests_that_do_not_arrive_are_given_up(classifier):
    with Server(create_app(classifier, ServiceLimits(rate=0, seconds=0.5))) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        with connection:
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in connection.recv(4096)


def test_when_too_many_wait_and_when_the_model_is_slow(classifier):
    app = create_app(classifier, ServiceLimits(rate=0, waiting=4, seconds=2.0))
    plain, release = app.state.batcher.function, threading.Event()

    def slow(x):
        release.wait(30)
        return plain(x)

    with Server(app) as server:
        app.state.batcher.function = slow
        found = []
        x, _ = pictures(2)

        def ask():
            found.append(numbers(server, x.tolist())[0])

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(set(found)) == [503, 504]
        app.state.batcher.function = plain
        release.set()
        assert numbers(server, x.tolist())[0] == 200


def test_a_failing_model_fails_its_requests_and_not_the_service(classifier):
    app = create_app(classifier, ServiceLimits(rate=0))
    plain = app.state.batcher.function

    def failing(x):
        raise RuntimeError("secret path")

    with Server(app) as server:
        app.state.batcher.function = failing
        x, _ = pictures(1)
        status, _, found = numbers(server, x.tolist())
        assert status == 500
        assert "secret" not in json.dumps(found)
        app.state.batcher.function = plain
        assert numbers(server, x.tolist())[0] == 200


def test_requests_share_batches(classifier):
    app = create_app(classifier, ServiceLimits(rate=0, company=5.0, batch=24))  # all come within the wait
    with Server(app) as server:
        x, _ = pictures(24)
        results = {}

        def ask(i):
            results[i] = numbers(server, x[i : i + 1].tolist())[2]["predictions"][0]["class"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text = call(server, "GET", "/metrics")[2].decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["stfseb_batch_images_sum"]) == 24
    assert float(lines["stfseb_batch_images_count"]) <= 6
    expected = ["left", "right", "<b>centre</b>"]
    assert all(results[i] == expected[i % 3] for i in range(24))


def test_limiter_forgets_old_clients_and_fills_up_again():
    limiter = RateLimiter(1.0, 2)
    assert [limiter.allow("a", 0.0) for _ in range(3)] == [True, True, False]
    assert limiter.allow("b", 0.0)
    assert limiter.allow("a", 1.1)
    assert not limiter.allow("a", 1.2)
    for i in range(20_000):
        limiter.allow(str(i), 2.0)
    assert len(limiter._buckets) == 10_000
    assert RateLimiter(0).allow("a")


def test_models_that_cannot_be_served_are_said(classifier):
    import stfseb

    method = stfseb.MCDropout(stfseb.MLP(4, 1), likelihood=GaussianRegression())
    with pytest.raises(StfsebError, match="does not say what images it takes"):
        create_app(method)
    method.provenance = {"input": [1, 2, 2]}
    with pytest.raises(StfsebError, match="only classifiers"):
        create_app(method)


def test_batches_keep_order_and_size():
    import asyncio

    from stfseb.serving.batching import Batcher

    sizes = []

    async def main():
        batcher = Batcher(lambda x: x[:, 0].tolist(), most=8, wait=0.01, observe=sizes.append)
        await batcher.start()
        requests = [torch.full((count, 1), float(i)) for i, count in enumerate((3, 3, 3, 8, 1, 1))]
        found = await asyncio.gather(*(batcher.submit(rows) for rows in requests))
        await batcher.stop()
        return found

    found = asyncio.run(main())
    assert [len(rows) for rows in found] == [3, 3, 3, 8, 1, 1]
    assert all(set(rows) == {float(i)} for i, rows in enumerate(found))
    assert sum(sizes) == 19
    assert max(sizes) <= 8
