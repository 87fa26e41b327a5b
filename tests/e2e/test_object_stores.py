"""Files in object stores: moto (the API of S3) and Azurite (Azure Blob Storage), as processes of their own.

It needs `moto_server` (`pip install "moto[server]"`) and `azurite-blob` (`npm install azurite`) in `$PATH`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from email.utils import formatdate

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw.files.storage import ObjectStorage, StorageUnavailable
from responses_mw.state import Missing
from responses_mw.state.files import File, new_file_id
from tests.e2e.test_dashboard import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OWNER = "alice"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's account, which is public."""
CHUNK = b"x" * 300_000


class Store:
    """An object store in a process. `scheme` is that of `files.url`."""

    def __init__(self, scheme: str, *command: str) -> None:
        self.scheme = scheme
        self.port = free_port()
        self._command = [word.format(port=self.port) for word in command]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _launch(self) -> None:
        if shutil.which(self._command[0]) is None:
            pytest.skip(f"there is no {self._command[0]} here")
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def start(self) -> None:
        self._launch()
        async with httpx.AsyncClient(trust_env=False) as client:
            async with asyncio.timeout(PATIENCE):
                while True:
                    with suppress(httpx.TransportError):
                        await client.get(self.address)
                        return
                    await asyncio.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def create_bucket(self, name: str) -> None:
        if self.scheme == "s3":
            httpx.put(f"{self.address}/{name}", trust_env=False).raise_for_status()
            return
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02", "content-length": "0"}
        lines = "".join(f"{header}:{headers[header]}\n" for header in ("x-ms-date", "x-ms-version"))
        text = "PUT" + 12 * "\n" + f"{lines}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        headers["authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        url = f"{self.address}/{ACCOUNT}/{name}?restype=container"
        httpx.put(url, headers=headers, trust_env=False).raise_for_status()


@pytest.fixture(params=["s3", "az"])
async def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    if request.param == "s3":
        store = Store("s3", "moto_server", "-H", "127.0.0.1", "-p", "{port}")
        environment = {"AWS_ENDPOINT_URL": store.address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    else:
        store = Store("az", "azurite-blob", "--silent", "--inMemoryPersistence", "--blobPort", "{port}")
        environment = {
            "AZURE_STORAGE_ENDPOINT": f"{store.address}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        await store.start()
        yield store
    finally:
        store.kill()


async def chunks(number: int, between: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
    for index in range(number):
        yield CHUNK
        if index == number // 2:
            between()


def record(file_id: str) -> File:
    return File(file_id, "a", "user_data", 0, 0, None, "")


async def size(storage: ObjectStorage, file_id: str) -> int:
    return sum([len(chunk) async for chunk in await storage.read(record(file_id), OWNER)])


async def test_files_of_all_sizes_are_written_read_and_erased(store: Store) -> None:
    store.create_bucket("files")
    storage = ObjectStorage(f"{store.scheme}://files/prefix")
    await storage.check()
    for number in (0, 1, 60):
        file_id = new_file_id()
        await storage.write(file_id, OWNER, chunks(number))
        assert await size(ObjectStorage(f"{store.scheme}://files/prefix"), file_id) == number * len(CHUNK)
        await storage.erase(file_id, OWNER)
        await storage.erase(file_id, OWNER)
        with pytest.raises(Missing):
            await size(storage, file_id)


async def test_a_missing_bucket_is_unavailable(store: Store) -> None:
    storage = ObjectStorage(f"{store.scheme}://nothing")
    for number in (1, 60):
        with pytest.raises(StorageUnavailable) as raised:
            await storage.write(new_file_id(), OWNER, chunks(number))
        assert raised.value.reason.endswith("Create the bucket, or correct files.url.")
    with pytest.raises(StorageUnavailable):
        await size(storage, new_file_id())


async def test_a_store_that_is_killed_while_a_file_is_written_is_unavailable_until_it_is_back(store: Store) -> None:
    store.create_bucket("files")
    storage = ObjectStorage(f"{store.scheme}://files")
    with pytest.raises(StorageUnavailable):
        await storage.write(new_file_id(), OWNER, chunks(60, store.kill))
    await store.start()
    store.create_bucket("files")  # both have lost it
    await storage.check()


async def test_a_wrong_key_is_unavailable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if store.scheme == "s3":
        pytest.skip("moto accepts all keys")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(StorageUnavailable) as raised:
        await ObjectStorage("az://files").check()
    assert raised.value.reason.endswith("Check the credentials of the storage, and their permissions.")
