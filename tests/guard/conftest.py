"""The data plane before scripted replicas, as in tests/proxy, and certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from tests.proxy.conftest import _frozen, pytest_asyncio_loop_factories, warm

__all__ = ["_frozen", "pytest_asyncio_loop_factories", "warm"]


class Authority:
    """A certificate authority of the test's, and files of what it issues."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = str(folder / f"authority-{id(self)}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str = "127.0.0.1", *, at: str = "") -> tuple[str, str]:
        """Certificate and private key for a name, in files; `at` gives the files' stem, to write over others."""
        issued = self._ca.issue_cert(name)
        stem = self._folder / (at or f"issued-{id(issued)}")
        cert_file, key_file = f"{stem}.cert.pem", f"{stem}.key.pem"
        Path(cert_file).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key_file)
        return cert_file, key_file

    def server(self, name: str = "127.0.0.1", *, trusts: Authority | None = None) -> ssl.SSLContext:
        """What a replica listens with; with `trusts` it asks for a certificate of that authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(name))
        if trusts is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(trusts.file)
        return context

    def client(self, *shown: str) -> ssl.SSLContext:
        """Trusts this authority alone; `shown` are the files of the certificate it shows."""
        context = ssl.create_default_context(cafile=self.file)
        if shown:
            context.load_cert_chain(*shown)
        return context


def copy(source: str, target: str | Path) -> None:
    """One file's content over another's."""
    Path(target).write_bytes(Path(source).read_bytes())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    """Another one."""
    return Authority(tmp_path)
