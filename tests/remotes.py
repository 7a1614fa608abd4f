"""Real servers of remote stores, and stores to share, for tests."""

from __future__ import annotations

import functools
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

from m2ncompile.remote import Remote, parse

#: What a user would have in the environment or in the protocol's own files.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
}


def s3_client() -> Any:
    """A client that shares no code with what is tested."""
    import boto3

    return boto3.client("s3")


class Bucket:
    """What lies in `s3://bucket/plans`, by paths below it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"s3://{name}/plans"
        self.client = s3_client()
        self.client.create_bucket(Bucket=name)
        self.client.put_bucket_versioning(
            Bucket=name, VersioningConfiguration={"Status": "Enabled"}
        )

    def files(self) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        keys = [entry["Key"] for entry in found]
        return {key.removeprefix("plans/"): self.read(key) for key in keys}

    def read(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def write(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"plans/{path}", Body=data)

    def writes(self) -> list[str]:
        """One a write, the first first."""
        found = self.client.list_object_versions(Bucket=self.name).get("Versions", [])
        found.sort(key=lambda version: version["LastModified"])
        return [version["Key"].removeprefix("plans/") for version in found]


class Folder:
    """What lies in `file://folder`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"

    def files(self) -> dict[str, bytes]:
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}

    def write(self, path: str, data: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)


class Memory:
    """What lies in `memory://`."""

    def __init__(self, name: str) -> None:
        import fsspec

        self.url = f"memory://{name}"
        self._name = f"/{name}/"
        self._files: Any = fsspec.filesystem("memory")

    def files(self) -> dict[str, bytes]:
        found = self._files.find(self._name)
        return {path.removeprefix(self._name): self._files.cat_file(path) for path in found}

    def write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(self._name + path, data)


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server in a thread."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    # Those of an earlier server know its address, not this one's.
    S3FileSystem.clear_instance_cache()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


@contextmanager
def http_server(
    folder: Path, handler: type[http.server.SimpleHTTPRequestHandler] = _Handler
) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server of a folder, and the paths it was asked for."""
    made = functools.partial(handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), made)
    server.daemon_threads = True
    asked: list[str] = []
    server.asked = asked  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def long_server(piece: bytes, times: int, pause: float = 0) -> Iterator[tuple[str, Queue[bool]]]:
    """Answers with `piece` again and again, `pause` seconds apart; and whether it was cut off."""
    cut: Queue[bool] = Queue()
    over = threading.Event()

    class Long(_Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(times):
                    over.wait(pause)
                    self.wfile.write(piece)
            except OSError:
                cut.put(True)
            else:
                cut.put(False)

    with http_server(Path("/nonexistent"), Long) as (url, _):
        try:
            yield url, cut
        finally:
            over.set()


def closed_port() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def with_digest(url: str, digest_of: Any, seconds: float = 30) -> Remote:
    """A remote of things other than plans."""
    return Remote(parse(url), digest_of, seconds)
